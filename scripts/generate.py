"""Continues a prompt: a small model drafts, a large model verifies.

python scripts/generate.py --temperature=0.8 --prompt='import ' --show_origin
"""

import dataclasses
import functools
import itertools
import sys

from absl import flags
import command_line
import options

_PROMPT = flags.DEFINE_string('prompt', options.DEFAULT_PROMPT, 'to continue')
options.define_method()
_BATCH_SIZE = options.define_batch_size(
  1, 'copies of the prompt, or prompts of the file'
)
options.define_stop()
options.define_constraint()
_LOG_PROBS = flags.DEFINE_bool(
  'log_probs', False, 'with --json, also the log-probabilities of the tokens'
)
_STREAM = flags.DEFINE_bool(
  'stream', False, 'show the text while it grows; Ctrl-C stops it'
)
_CHAT = flags.DEFINE_bool(
  'chat',
  False,
  'the prompt is a message, which the chat template of the tokenizer puts into'
  ' words; for instruct models, see also chat.py',
)
_SYSTEM = flags.DEFINE_string('system', None, 'with --chat, the system message')
_SHOW_ORIGIN = flags.DEFINE_bool(
  'show_origin', False, 'colour each token by its source'
)
_JSON = flags.DEFINE_bool('json', False, 'print one JSON object and no more')
_COMPARE = flags.DEFINE_bool(
  'compare',
  None,
  'also decode plainly, and say how many times as fast drafting was; default:'
  ' only with the embedded target, and without --json and --stream',
)
# Both ways are timed this often in turn, and the best time of each counts: a
# short decode takes a tenth of a second, too little for one measurement.
_REPEATS = 3


def _show(begin):
  """Prints a text while it grows, until its end or Ctrl-C; its result."""
  from specdec.models import waiting
  from specdec.models.text import result as result_lib

  with command_line.interrupts() as interrupts:
    with waiting.announced('compiling and reading the prompt'):
      stream = begin()
      shown = result_lib.labelled(new for (new,) in stream.said())
      first = next(shown, '')
    for new in itertools.chain([stream.prompts[0] + first], shown):
      print(new, end='', flush=True)
      if interrupts:
        break
  return stream.result()


def _compares():
  """Whether plain decoding is timed, too."""
  if _COMPARE.value is not None:
    return _COMPARE.value
  is_embedded = flags.FLAGS.target == 'demo' and flags.FLAGS.method != 'plain'
  return is_embedded and not _JSON.value


def _comparison(generator, begin):
  """How many times faster than plain decoding a generator is, in one line.

  `begin` makes a decode of a generator.
  """
  import loading

  import specdec
  from specdec.models.text import text_decoding

  # A store would have the answers of the round before.
  generator = dataclasses.replace(generator, store=None)
  ways = {
    loading.method(): generator,
    'plain': dataclasses.replace(generator, drafter=specdec.PLAIN),
  }
  rounds = [
    [
      text_decoding.timed(
        functools.partial(begin, way), f'{name}, {number + 1} of {_REPEATS}'
      )
      for name, way in ways.items()
    ]
    for number in range(_REPEATS)
  ]
  best, plain = (
    min(result.stats.seconds for result in results)
    for results in zip(*rounds, strict=True)
  )
  tokens = [result.tokens for result in rounds[0]]
  same = 'the same' if tokens[0] == tokens[1] else 'other'
  return f'{plain / best:.2f} times as fast as plain decoding, {same} tokens'


def main() -> None:
  import loading

  from specdec.models.text import chat_template
  from specdec.models.text import result as result_lib
  from specdec.models.text import text_decoding

  batch_size = _BATCH_SIZE.value
  if _STREAM.value + _SHOW_ORIGIN.value + _JSON.value > 1:
    raise ValueError('give one of --stream, --show_origin and --json')
  if _STREAM.value and batch_size > 1:
    raise ValueError('--stream shows one prompt; leave out --batch_size')
  if _COMPARE.value and (_STREAM.value or _JSON.value):
    raise ValueError('--compare prints a line; leave out --stream and --json')
  if _COMPARE.value and loading.method() == 'plain':
    raise ValueError(
      '--compare compares a method with plain decoding; leave out --compare, or'
      ' choose another --method than plain'
    )
  if _SYSTEM.value is not None and not _CHAT.value:
    raise ValueError(
      '--system is the system message of a chat; give --chat too'
    )
  prompts = options.given_prompts(_PROMPT, batch_size)
  if options.PROMPT_FILE.value and not _BATCH_SIZE.present:
    print(
      '--prompt_file: only its first prompt; --batch_size takes more',
      file=sys.stderr,
    )
  ask = functools.partial(chat_template.first_messages, system=_SYSTEM.value)
  given = [*map(ask, prompts)] if _CHAT.value else prompts
  generator = loading.generator(
    prompts, batch_size, given[0] if _CHAT.value else None
  )
  arguments = options.decoding() | {
    'stop': options.stop(),
    'log_probs': _LOG_PROBS.value,
    **options.constraint(),
  }
  if _STREAM.value:
    result = _show(functools.partial(generator.stream, given, **arguments))
    print(f'\n\n{result.table()}')
  else:
    begin = lambda way: way.stream(given, **arguments)
    result = text_decoding.timed(
      functools.partial(begin, generator), loading.method()
    )
    if _JSON.value:
      print(result.to_json())
    elif _SHOW_ORIGIN.value:
      print(result.with_origins(color=result_lib.wants_color(sys.stdout)))
    else:
      print(result)
    if _compares():
      print(_comparison(generator, begin))
  errors = [error for error in result.errors if error]
  if errors:
    raise ValueError('; '.join(errors))


if __name__ == '__main__':
  command_line.run(main)
