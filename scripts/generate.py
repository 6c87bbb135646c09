"""Continues a prompt, drafted by a small model, verified by a large one.

python scripts/generate.py --temperature=0.8 --prompt='import ' --show_origin
"""

import sys

from absl import flags
import command_line
import decoding_flags as options

_PROMPT = flags.DEFINE_string('prompt', options.DEFAULT_PROMPT, 'to continue')
_METHOD = flags.DEFINE_enum(
  'method',
  'staged',
  ['plain', 'chain', 'tree', 'staged'],
  'how to decode; the text is the same',
)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', 1, 'the prompt repeated, or so many prompts of the file'
)
_SHOW_ORIGIN = flags.DEFINE_bool(
  'show_origin', False, 'colour each token by who proposed it'
)
_JSON = flags.DEFINE_bool('json', False, 'one JSON object on stdout, no more')


def main() -> None:
  from models import origins
  from models import text_generation

  if _BATCH_SIZE.value < 1:
    raise ValueError(
      f'--batch_size must be at least 1, got {_BATCH_SIZE.value}'
    )
  if _PROMPT.present and options.PROMPT_FILE.value is not None:
    raise ValueError('give --prompt or --prompt_file, not both')
  if options.PROMPT_FILE.value is None:
    prompts = [_PROMPT.value] * _BATCH_SIZE.value
  else:
    prompts = options.read_prompts(options.PROMPT_FILE.value, _BATCH_SIZE.value)
  if _SHOW_ORIGIN.value and _JSON.value:
    raise ValueError('give --show_origin or --json, not both')
  result = text_generation.generate_text(
    prompts,
    target=options.TARGET.value,
    draft=options.draft_name(),
    method=_METHOD.value,
    drafting=options.draft_settings(),
    revision=options.REVISION.value,
    dtype=options.dtype(),
    seed=options.SEED.value,
    max_new_tokens=options.MAX_NEW_TOKENS.value,
    sampling=options.sampling(),
  )
  if _JSON.value:
    print(result.to_json())
  elif _SHOW_ORIGIN.value:
    print(result.with_origins(color=origins.wants_color(sys.stdout)))
  else:
    print(result)


if __name__ == '__main__':
  command_line.run(main)
