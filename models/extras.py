"""Optional packages, which the extras of the distribution install."""

import pathlib


def command(extra: str) -> str:
  """The command that installs an extra, such as `gguf`.

  In a clone it installs the clone itself, elsewhere the wheel.
  """
  root = pathlib.Path(__file__).resolve().parents[1]
  if not (root / 'pyproject.toml').exists():
    return f"pip install 'specdec-jax[{extra}]'"
  place = '.' if root == pathlib.Path.cwd() else root
  return f"pip install -e '{place}[{extra}]'"
