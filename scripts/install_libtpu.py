"""Installs the TPU compiler for compile_for.py and its tests.

python scripts/install_libtpu.py

The version is the one that the installed JAX requires. It goes to build/libtpu,
because JAX looks for a TPU at every start if libtpu is in the environment.
"""

import importlib.metadata
import pathlib
import subprocess
import sys


def main() -> None:
  folder = pathlib.Path(__file__).parents[1] / 'build' / 'libtpu'
  required = importlib.metadata.requires('jax') or []
  wanted = next(text for text in required if text.startswith('libtpu'))
  requirement = wanted.split(';')[0].strip()
  installed = folder / 'requirement.txt'
  if installed.is_file() and installed.read_text('utf-8') == requirement:
    return
  command = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps']
  subprocess.run(
    [*command, '--upgrade', f'--target={folder}', requirement], check=True
  )
  installed.write_text(requirement, 'utf-8')


if __name__ == '__main__':
  main()
