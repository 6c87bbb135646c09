"""Checks that drafting changes the speed and nothing else, on your own models.

python scripts/check_lossless.py --prompt_file=prompts.jsonl --temperature=1

With --verify=match the tokens must be those of plain decoding with the same
seed; with the other rules they must have the law of the target. The exit status
is 0 if all is well and 1 if not.
"""

import dataclasses
import sys
from typing import Any

from absl import flags
import command_line
import decoding_flags as options
import planned

flags.adopt_module_key_flags(options)  # Listed by --help.

_METHOD = flags.DEFINE_string('method', 'staged', 'how to draft')
_NUM_PROMPTS = flags.DEFINE_integer(
  'num_prompts', None, 'default: all', lower_bound=1
)
_BATCH_SIZES = flags.DEFINE_list('batch_sizes', ['1', '4'], 'to be checked')
_MAX_MARGIN = flags.DEFINE_float(
  'max_margin',
  None,
  'divergences are tolerated where the two best scores were this close;'
  ' default: 0 in float32, 0.1 in bfloat16',
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def _batch_sizes() -> list[int]:
  try:
    sizes = [int(size) for size in _BATCH_SIZES.value]
  except ValueError:
    sizes = []
  if not sizes or min(sizes) < 1:
    raise ValueError(
      f'--batch_sizes={",".join(_BATCH_SIZES.value)}: expected integers of at'
      ' least 1'
    )
  return sizes


def main() -> None:
  from models.bench import lossless
  from models.bench import record as results

  if options.PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  prompts = options.read_prompts(options.PROMPT_FILE.value, _NUM_PROMPTS.value)
  batch_sizes = _batch_sizes()
  if _OUTPUT.value:
    results.prepare_output(_OUTPUT.value)
  max_margin = _MAX_MARGIN.value
  if max_margin is None:
    max_margin = 0.0 if options.DTYPE.value == 'float32' else 0.1
  generator = planned.generator(_METHOD, prompts, max(batch_sizes))
  sampling = options.sampling()
  checks: list[Any]
  how: dict[str, Any] = {
    'batch_sizes': batch_sizes,
    'sampling': sampling,
    'seed': options.SEED.value,
    'max_new_tokens': options.MAX_NEW_TOKENS.value,
    'verify': options.VERIFY.value,
    'children': options.CHILDREN.value,
  }
  # Greedy decoding leaves nothing to chance, whatever the rule.
  if options.VERIFY.value == 'match' or sampling.temperature == 0:
    how['max_margin'] = max_margin
    checks = lossless.check_tokens(generator, prompts, **how)
  else:
    checks = lossless.check_distribution(generator, prompts, **how)
  for check in checks:
    print(check)
  if _OUTPUT.value:
    results.write_record(
      _OUTPUT.value,
      options.as_dict(),
      {'checks': [dataclasses.asdict(check) for check in checks]},
    )
  if not all(check.passed for check in checks):
    sys.exit(1)


if __name__ == '__main__':
  command_line.run(main)
