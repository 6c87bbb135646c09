"""Compares ways of decoding, interleaved, on the prompts of a file.

python scripts/benchmark.py --prompt_file=prompts.jsonl --output=result.json
"""

from absl import flags
import command_line
import decoding_flags as options
import planned

from models.drafters import METHODS

_ARMS = flags.DEFINE_list(
  'arms',
  ['plain', 'chain', 'tree', 'staged'],
  f'method or method:dtype, the first is the baseline; methods: {METHODS}, the'
  ' last ones without the draft; dtype: see --dtype',
)
_NUM_PROMPTS = flags.DEFINE_integer(
  'num_prompts', None, 'default: all', lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 1, 'prompts per batch')
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def main() -> None:
  from models import benchmark

  if options.PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  arms = [benchmark.parse_arm(arm, options.DTYPE.value) for arm in _ARMS.value]
  if _OUTPUT.value:
    benchmark.prepare_output(_OUTPUT.value)
  prompts = options.read_prompts(options.PROMPT_FILE.value, _NUM_PROMPTS.value)
  plan = planned.plan(_BATCH_SIZE.value, lambda: prompts)
  report = benchmark.run(
    prompts,
    arms=arms,
    target=options.TARGET.value,
    draft=options.draft_name(),
    revision=options.REVISION.value,
    seed=options.SEED.value,
    batch_size=_BATCH_SIZE.value,
    max_new_tokens=options.MAX_NEW_TOKENS.value,
    drafting=options.draft_settings(plan),
    sampling=options.sampling(),
    verify=options.VERIFY.value,
    children=options.CHILDREN.value,
    settings=options.as_dict(),
  )
  print(report)
  if _OUTPUT.value:
    report.write(_OUTPUT.value)


if __name__ == '__main__':
  command_line.run(main)
