"""Continues a prompt, drafted by a small model, verified by a large one.

python scripts/generate.py --temperature=0.8 --prompt='import ' --show_origin
"""

import sys

from absl import flags
import command_line
import decoding_flags as options
import planned

flags.adopt_module_key_flags(options)  # Listed by --help.

_PROMPT = flags.DEFINE_string('prompt', options.DEFAULT_PROMPT, 'to continue')
_METHOD = flags.DEFINE_enum(
  'method',
  'staged',
  ['plain', 'chain', 'tree', 'staged'],
  'how to decode; the text is the same; --plan chooses',
)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', 1, 'the prompt repeated, or so many prompts of the file'
)
_STOP = flags.DEFINE_multi_string(
  'stop', [], r'the text ends before this; \n is a line end; may be repeated'
)
_LOG_PROBS = flags.DEFINE_bool(
  'log_probs', False, 'those of the tokens too, with --json'
)
_STREAM = flags.DEFINE_bool(
  'stream', False, 'show the text while it grows; Ctrl-C stops it'
)
_SHOW_ORIGIN = flags.DEFINE_bool(
  'show_origin', False, 'colour each token by who proposed it'
)
_JSON = flags.DEFINE_bool('json', False, 'one JSON object on stdout, no more')


def _prompts() -> list[str]:
  if _BATCH_SIZE.value < 1:
    raise ValueError(
      f'--batch_size must be at least 1, got {_BATCH_SIZE.value}'
    )
  if options.PROMPT_FILE.value is None:
    return [_PROMPT.value] * _BATCH_SIZE.value
  if _PROMPT.present:
    raise ValueError('give --prompt or --prompt_file, not both')
  if not _BATCH_SIZE.present:
    print(
      '--prompt_file: its first prompt alone; --batch_size takes more',
      file=sys.stderr,
    )
  return options.read_prompts(options.PROMPT_FILE.value, _BATCH_SIZE.value)


def main() -> None:
  from models.text import result as origins
  from models.text.generator import TextOptions

  if _STREAM.value + _SHOW_ORIGIN.value + _JSON.value > 1:
    raise ValueError('give one of --stream, --show_origin and --json')
  prompts = _prompts()
  if _STREAM.value and len(prompts) > 1:
    raise ValueError('--stream shows one prompt; leave out --batch_size')
  generator = planned.generator(_METHOD, prompts, len(prompts))
  how: TextOptions = {
    'max_new_tokens': options.MAX_NEW_TOKENS.value,
    'sampling': options.sampling(),
    'seed': options.SEED.value,
    'stop': [stop.replace('\\n', '\n') for stop in _STOP.value],
    'verify': options.VERIFY.value,
    'children': options.CHILDREN.value,
    'log_probs': _LOG_PROBS.value,
  }
  if options.BREAK_EVEN.value is not None:
    how['break_even'] = options.BREAK_EVEN.value
  if _STREAM.value:
    result = command_line.show(prompts[0], generator.stream(prompts, **how))
  else:
    result = generator.timed(prompts, **how)
  if _JSON.value:
    print(result.to_json())
  elif _SHOW_ORIGIN.value:
    print(result.with_origins(color=origins.wants_color(sys.stdout)))
  elif _STREAM.value:
    print(f'\n\n{result.table()}')
  else:
    print(result)
  errors = [error for error in result.errors if error]
  if errors:
    raise ValueError('; '.join(errors))


if __name__ == '__main__':
  command_line.run(main)
