"""Compares ways of decoding, interleaved, on the prompts of a file.

  python scripts/benchmark.py --prompt_file=prompts.jsonl --output=result.json

Settings of an arm that differ from the flags go in parentheses, alternatives of
a sweep between bars:

  python scripts/benchmark.py --prompt_file=prompts.jsonl \
      --arms='plain,chain(num_draft_tokens=2|4),tree(num_nodes=8|16,rounds=2|3)'
"""

from absl import flags
import command_line
import decoding_flags as options
import planned

from models.text.drafters import METHODS

flags.adopt_module_key_flags(options)  # Listed by --help.

_ARMS = flags.DEFINE_string(
  'arms',
  'plain,chain,tree,staged',
  'separated by commas, each method, method:dtype or'
  ' method(option=value,...):dtype, the first is the baseline; methods:'
  f' {METHODS}, the last ones without the draft, and transformers,'
  ' transformers-assisted, transformers-lookup; options: see the flags of the'
  ' same names, a|b gives an arm each; dtype: see --dtype',
)
_PEER = flags.DEFINE_enum(
  'peer',
  'none',
  ['none', 'transformers'],
  'also decode with its plain, assisted and prompt lookup generation, in the'
  ' dtypes of the arms; needs torch',
)
_NUM_PROMPTS = flags.DEFINE_integer(
  'num_prompts', None, 'default: all', lower_bound=1
)
_PROMPT_BUCKET = flags.DEFINE_integer(
  'prompt_bucket',
  None,
  'of those, only prompts of more than half of it and at most so many tokens: a'
  ' power of 2 saves compiling for others; default: all',
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 1, 'prompts per batch')
_MAX_SECONDS = flags.DEFINE_float(
  'max_seconds', None, 'begin no batch after measuring for so long'
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'JSON file to write, with tables (.md) beside it'
)
_PLOTS = flags.DEFINE_string(
  'plots',
  None,
  'folder for pictures; default: beside the JSON, if matplotlib is installed',
)


def main() -> None:
  from models.bench import arms
  from models.bench import benchmark
  from models.bench import plots
  from models.bench import record as results

  if options.PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  specs = arms.parse_arms(_ARMS.value, options.DTYPE.value)
  if _PEER.value == 'transformers':
    specs += arms.peer_arms(
      specs,
      has_draft=options.draft_name() is not None,
      batch_size=_BATCH_SIZE.value,
    )
  if _OUTPUT.value:
    results.prepare_output(_OUTPUT.value)
  folder = plots.choose_folder(_PLOTS.value, _OUTPUT.value)
  prompts = options.read_prompts(options.PROMPT_FILE.value, _NUM_PROMPTS.value)
  plan = planned.plan(_BATCH_SIZE.value, lambda: prompts)
  report = benchmark.run(
    prompts,
    arms=specs,
    task=benchmark.Task(
      target=options.TARGET.value,
      draft=options.draft_name(),
      revision=options.REVISION.value,
      draft_dtype=options.DRAFT_DTYPE.value,
      drafting=options.draft_settings(plan),
      sampling=options.sampling(),
      verify=options.VERIFY.value,
      children=options.CHILDREN.value,
      break_even=options.BREAK_EVEN.value,
      seed=options.SEED.value,
      batch_size=_BATCH_SIZE.value,
      max_new_tokens=options.MAX_NEW_TOKENS.value,
      prompt_bucket=_PROMPT_BUCKET.value,
      max_seconds=_MAX_SECONDS.value,
    ),
    settings=options.as_dict(),
  )
  print(report)
  if _OUTPUT.value:
    report.write(_OUTPUT.value)
  if folder is not None:
    plots.draw(
      results.record(dict(report.settings), report.figures),
      folder,
      _OUTPUT.value or 'benchmark',
    )


if __name__ == '__main__':
  command_line.run(main)
