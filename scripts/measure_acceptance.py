"""How often guesses stand by each rule of verification, and what theory says.

python scripts/measure_acceptance.py --prompt_file=prompts.jsonl --temperature=1
"""

from absl import flags
import command_line
import decoding_flags as options

flags.adopt_module_key_flags(options)  # Listed by --help.

_NUM_PROMPTS = flags.DEFINE_integer(
  'num_prompts', None, 'default: all', lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 4, 'prompts per batch')
_CHILDREN = flags.DEFINE_list(
  'numbers_of_children', ['1', '2', '4'], 'of the trees of depth 1'
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def main() -> None:
  import models
  from models.bench import lossless as acceptance
  from models.bench import record as results

  if options.PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  if _OUTPUT.value:
    results.prepare_output(_OUTPUT.value)
  generator = models.load(
    options.TARGET.value,
    options.draft_name(),
    method='chain',
    dtype=options.DTYPE.value,
    draft_dtype=options.DRAFT_DTYPE.value,
    revision=options.REVISION.value,
  )
  figures = acceptance.measure(
    generator,
    options.read_prompts(options.PROMPT_FILE.value, _NUM_PROMPTS.value),
    sampling=options.sampling(),
    seed=options.SEED.value,
    batch_size=_BATCH_SIZE.value,
    max_new_tokens=options.MAX_NEW_TOKENS.value,
    numbers_of_children=[int(number) for number in _CHILDREN.value],
    chain_length=options.NUM_DRAFT_TOKENS.value,
  )
  print(acceptance.table(figures))
  if _OUTPUT.value:
    results.write_record(_OUTPUT.value, options.as_dict(), figures)


if __name__ == '__main__':
  command_line.run(main)
