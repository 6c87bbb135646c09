"""Checks on your own models that drafting changes the speed and nothing else.

python scripts/check_lossless.py --prompt_file=prompts.jsonl --temperature=1

The tokens must be the same as with plain decoding and the same seed, so it is
for --verify=match, or --temperature=0. The exit status is 0 if all checks pass
and 1 if not.
"""

import dataclasses
import sys

from absl import flags
import command_line
import options
import prompt_flags

from specdec.models.text import settings as settings_lib

options.define_method(methods=settings_lib.METHODS)
options.define_constraint()
prompt_flags.define_num_prompts()
_BATCH_SIZES = flags.DEFINE_list('batch_sizes', ['1', '4'], 'to be checked')
_MAX_MARGIN = flags.DEFINE_float(
  'max_margin',
  None,
  'divergences are tolerated where the two best scores were this close;'
  ' default: 0 in float32, with --cpu_kernels and with a constraint, of which'
  ' scores know nothing, else 0.1',
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def main() -> None:
  import loading

  from specdec.models.lab.bench import lossless
  from specdec.models.lab.bench import record

  prompts = prompt_flags.file_prompts()
  sizes = prompt_flags.batch_sizes(_BATCH_SIZES.value)
  constraint = options.constraint()
  if not options.keeps_tokens() and options.sampling().temperature > 0:
    raise ValueError(
      f'--verify={options.VERIFY.value} gives other tokens than plain decoding,'
      ' with the same distribution; give --verify=match or --temperature=0'
    )
  record.prepare_output(_OUTPUT.value)
  margin = _MAX_MARGIN.value
  if margin is None:
    margin = 0.0 if constraint or loading.is_exact() else 0.1
  checks = lossless.check_tokens(
    loading.generator(prompts, max(sizes)),
    prompts,
    batch_sizes=sizes,
    max_margin=margin,
    **options.decoding(),
    **constraint,
  )
  print(*checks, sep='\n')
  found = [dataclasses.asdict(result) for result in checks]
  record.write_record(_OUTPUT.value, options.as_dict(), {'checks': found})
  if not all(result.passed for result in checks):
    sys.exit(1)


if __name__ == '__main__':
  command_line.run(main)
