r"""Checks on your own models that drafting changes the speed and nothing else.

python scripts/check_lossless.py --prompt_file=prompts.jsonl --temperature=1

The tokens must be the same as with plain decoding and the same seed, so it is
for --verify=match, or --temperature=0. The exit status is 0 if all checks pass
and 1 if not.

  python scripts/check_lossless.py --prompt_file=prompts.jsonl \
      --server=http://127.0.0.1:8000 --plain_server=http://127.0.0.1:8080

compares two servers. The second decodes plainly; without it the first server
also decodes plainly. --target is their model; it scores the place where their
texts part.
"""

import dataclasses
import sys

from absl import flags
import command_line
import options

from specdec.models.text import settings as settings_lib

options.define_method(methods=[*settings_lib.METHODS])
options.define_constraint()
options.define_num_prompts()
_BATCH_SIZES = flags.DEFINE_list('batch_sizes', ['1', '4'], 'to be checked')
_MAX_MARGIN = flags.DEFINE_float(
  'max_margin',
  None,
  'divergences are tolerated where the two best scores were this close;'
  ' default: 0 in float32, with --cpu_kernels and with a constraint, which the'
  ' scores do not consider, else 0.1',
)
_SERVER = flags.DEFINE_string(
  'server',
  None,
  'the address of a server, which is checked in place of --method',
)
_PLAIN_SERVER = flags.DEFINE_string(
  'plain_server', None, 'the server that it is compared with; default: itself'
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def main() -> None:
  import loading

  from specdec.models.lab.bench import endpoint as endpoint_lib
  from specdec.models.lab.bench import lossless
  from specdec.models.lab.bench import record
  from specdec.models.text import pair as pair_lib

  prompts = options.file_prompts()
  sizes = options.batch_sizes(_BATCH_SIZES.value)
  constraint = options.constraint()
  if not options.keeps_tokens() and options.sampling().temperature > 0:
    raise ValueError(
      f'--verify={options.VERIFY.value} gives other tokens than plain decoding,'
      ' with the same distribution; give --verify=match or --temperature=0'
    )
  if _SERVER.value is None and _PLAIN_SERVER.value is not None:
    raise ValueError(
      f'--plain_server={_PLAIN_SERVER.value} is compared with --server; give it'
    )
  record.prepare_output(_OUTPUT.value)
  margin = _MAX_MARGIN.value
  if margin is None:
    margin = 0.0 if constraint or loading.is_exact() else 0.1
  arguments = options.decoding() | constraint
  if _SERVER.value is not None:
    server = endpoint_lib.Endpoint(_SERVER.value)
    plain = endpoint_lib.Endpoint(_PLAIN_SERVER.value or server.url)
    names = ('max_new_tokens', 'sampling', 'seed')
    checks = lossless.check_servers(
      pair_lib.load_pair(loading.models().of_target),
      prompts,
      (server, plain),
      batch_sizes=sizes,
      max_margin=margin,
      **{name: arguments[name] for name in names},
    )
  else:
    generator = loading.generator(prompts, max(sizes))
    checks = lossless.check_tokens(
      generator, prompts, batch_sizes=sizes, max_margin=margin, **arguments
    )
  print(*checks, sep='\n')
  figures = {'checks': [dataclasses.asdict(check) for check in checks]}
  record.write_record(_OUTPUT.value, options.as_dict(), figures)
  if not all(check.passed for check in checks):
    sys.exit(1)


if __name__ == '__main__':
  command_line.run(main)
