"""A conversation in the terminal with an instruct model.

python scripts/chat.py --target=my/instruct --draft=my/smaller_instruct

An answer is shown while it grows, and Ctrl-C ends it. Only what is new is read
in each turn. /show shows who proposed what, /new begins anew, /quit ends.
"""

import contextlib
import signal
import sys

from absl import flags
import command_line
import options

flags.adopt_module_key_flags(options)  # Listed by --help.
flags.set_default(options.MAX_NEW_TOKENS, 512)

_METHOD = flags.DEFINE_enum(
  'method',
  'staged',
  ['plain', 'chain', 'tree', 'staged'],
  'how to decode; the answers are the same; --plan chooses',
)
_SYSTEM = flags.DEFINE_string('system', None, 'the system message')
_CONTEXT = flags.DEFINE_integer(
  'context',
  None,
  'tokens of the whole conversation; default: as many as the target can, and at'
  ' most 2048',
)
_COMMANDS = '/show: who proposed what; /new: begin anew; /quit'


@contextlib.contextmanager
def _interrupts():
  """Ctrl-C does not end the program, but makes the yielded list true."""
  seen: list[bool] = []
  before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
  try:
    yield seen
  finally:
    signal.signal(signal.SIGINT, before)


def _next_line():
  """What the user types, without spaces around it; None at the end."""
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
  from models.text.result import wants_color

  color, result = wants_color(sys.stdout), chat.result()
  print(f'{result.marked(0, color=color)}\n\n{result.legend(color=color)}')
  print(
    f'{result.stats["new_tokens"]} tokens,'
    f' {result.stats["block_efficiency"]:.2f} per forward of the target; read'
    f' {chat.num_read} of {len(result.prompt_tokens[0])} tokens before them'
  )


def _answer(chat):
  """Prints an answer while it grows, until its end or Ctrl-C."""
  with _interrupts() as interrupts:
    for new in chat:
      print(new, end='', flush=True)
      if interrupts:
        break
  result = chat.result()
  reason = result.finish_reasons[0]
  if reason == 'error':
    raise ValueError(result.errors[0])
  ends = {
    'cancelled': ' [stopped]',
    'length': ' [cut: --max_new_tokens or --context]',
  }
  print(ends.get(reason, ''))


def main() -> None:
  from models.text.chat_template import first_messages

  with contextlib.suppress(ImportError):
    import readline  # noqa: F401, lets `input` edit lines
  system = _SYSTEM.value
  generator = options.generator(_METHOD, [options.DEFAULT_PROMPT], 1)
  arguments = options.decoding() | {'context': _CONTEXT.value}
  # A model without a template is refused before anything is typed.
  generator.pair.ids_of([first_messages(_COMMANDS, system)])
  print(_COMMANDS)
  chat = None
  while (line := _next_line()) not in (None, '/quit'):
    if line == '/new':
      chat = None
    elif line == '/show' and chat is not None:
      _show(chat)
    elif line.startswith('/'):
      print(_COMMANDS)
    else:
      try:
        if chat is None:
          chat = generator.chat(first_messages(line, system), **arguments)
        else:
          chat.reply(line)
      except ValueError as error:  # The context is full, as a rule.
        print(f'{error} (/new begins anew)')
        continue
      _answer(chat)


if __name__ == '__main__':
  command_line.run(main)
