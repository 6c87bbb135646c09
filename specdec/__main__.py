"""The commands of an installed package: `specdec generate --prompt='import '`.

`specdec NAME ...` and `python -m specdec NAME ...` run `scripts/NAME.py`, which
the package contains. Without a name they list all commands.
"""

import ast
import pathlib
import runpy
import sys

_FOLDER = pathlib.Path(__file__).with_name('scripts')  # A link, in a clone.


def _commands() -> dict[str, str]:
  """The names of the commands, and the first sentence of each."""
  texts = {
    path.stem: path.read_text('utf-8') for path in sorted(_FOLDER.glob('*.py'))
  }
  return {
    name: str(ast.get_docstring(ast.parse(text))).splitlines()[0]
    for name, text in texts.items()
    if "__name__ == '__main__'" in text  # The other files have flags.
  }


def main() -> None:
  """Runs the command that the first argument names, with all others."""
  commands = _commands()
  name = sys.argv[1] if sys.argv[1:] else '--help'
  if name in commands:
    file = str(_FOLDER / f'{name}.py')
    sys.argv = [file, *sys.argv[2:]]
    sys.path.insert(0, str(_FOLDER))  # As Python does for a script.
    runpy.run_path(file, run_name='__main__')
    return
  lines = [f'  {command:16}{text}' for command, text in commands.items()]
  listed = '\n'.join(['specdec NAME --help lists the flags of:', '', *lines])
  if name != '--help':
    sys.exit(f'specdec: there is no command {name!r}; {listed}')
  print(listed)


if __name__ == '__main__':
  main()
