"""A conversation in the terminal with an instruct model.

python scripts/chat.py --target=my/instruct --draft=my/smaller_instruct

An answer is shown while it grows, and Ctrl-C ends it. Only what is new is read
in each turn. /show shows who proposed what, /new starts over, /quit ends.
"""

import contextlib
import functools
import io
import sys

from absl import flags
import command_line
import options
import several_hosts

flags.set_default(options.MAX_NEW_TOKENS, 512)

options.define_method()
options.define_constraint()
_SYSTEM = flags.DEFINE_string('system', None, 'the system message')
_CONTEXT = flags.DEFINE_integer(
  'context',
  None,
  'the most tokens of the whole conversation; default: the context of the'
  ' target, and at most 2048',
)
_ENDS = {
  'cancelled': ' [stopped]',
  'length': ' [cut by --max_new_tokens or --context]',
}
# Read before anything is typed; some templates refuse an empty message.
_FIRST = 'Hello'
_COMMANDS = '/show: who proposed what; /new: start over; /quit'
several_hosts.refuse(
  'every host would read its own terminal; a conversation needs one host'
)


def _next_line():
  """A line that the user types, without spaces around it; None at the end."""
  while True:
    try:
      if line := input('> ').strip():
        return line
    except KeyboardInterrupt:
      print(f'\n{_COMMANDS}')
    except EOFError:
      print()
      return None


def _show(chat):
  """Prints who proposed the tokens of the last answer."""
  from specdec.models.text import result as result_lib

  color, result = result_lib.wants_color(sys.stdout), chat.result()
  print(f'{result.marked(0, color=color)}\n\n{result.legend(color=color)}')
  print(
    f'{result.stats.new_tokens} tokens,'
    f' {result.stats.block_efficiency:.2f} per forward of the target; read'
    f' {chat.num_read} of {len(result.prompt_tokens[0])} tokens before them'
  )


def _answer(chat, interrupts, waits):
  """Prints an answer while it grows, until its end or Ctrl-C."""
  from specdec.models.text import result as result_lib

  for new in result_lib.labelled(chat.said()):
    waits.close()
    print(new, end='', flush=True)
    if interrupts:
      break
  result = chat.result()
  error = result.errors[0]
  print(f' [{error}]' if error else _ENDS.get(result.finish_reasons[0], ''))


def _ask(chat, line):
  """Sends a message; after a ValueError nothing has changed."""
  try:
    chat.reply(line)
  except ValueError as error:
    if chat.result().text[0]:
      raise
    # Templates that refuse an empty answer would refuse all that follows.
    chat.restart([*chat.messages[:-1], {'role': 'user', 'content': line}])
    print(f'[your last message, without an answer, is left out: {error}]')


def main() -> None:
  import loading

  from specdec.models import waiting
  from specdec.models.text import chat_template

  with contextlib.suppress(ImportError):
    import readline  # noqa: F401, lets `input` edit lines
  if isinstance(sys.stdin, io.TextIOWrapper):
    # UTF-8 whatever the locale; a message with other bytes is refused.
    sys.stdin.reconfigure(encoding='utf-8-sig', errors='surrogateescape')
  begin = functools.partial(chat_template.first_messages, system=_SYSTEM.value)
  generator = loading.generator([options.DEFAULT_PROMPT], 1, begin(_FIRST))
  # Before anything is typed, so that bad flags are refused first.
  chat = generator.chat(
    begin(_FIRST),
    context=_CONTEXT.value,
    **options.decoding(),
    **options.constraint(),
  )
  is_new = True
  print(_COMMANDS)
  while (line := _next_line()) not in (None, '/quit'):
    if line == '/new':
      is_new = True
    elif line == '/show' and not is_new:
      _show(chat)
    elif line.startswith('/'):
      print(_COMMANDS)
    else:
      # Also while a message is read, which must not be left half done.
      with (
        command_line.interrupts() as interrupts,
        contextlib.ExitStack() as waits,
      ):
        waits.enter_context(waiting.announced('compiling and reading'))
        try:
          chat.restart(begin(line)) if is_new else _ask(chat, line)
        except ValueError as error:
          waits.close()
          print(f'{error}; your message is left out, /new starts over')
          continue
        is_new = False
        _answer(chat, interrupts, waits)


if __name__ == '__main__':
  command_line.run(main)
