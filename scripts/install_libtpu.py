"""Puts the TPU compiler into build/libtpu, for compile_for.py and its tests.

python scripts/install_libtpu.py

Not into the environment: where libtpu is installed, JAX looks for a TPU
whenever it starts, and complains that there is none. The version is the one
that the installed JAX asks for.
"""

import importlib.metadata
import pathlib
import re
import subprocess
import sys


def main() -> None:
  folder = pathlib.Path(__file__).parents[1] / 'build' / 'libtpu'
  stated = importlib.metadata.requires('jax') or []
  wanted = [one for one in stated if re.match(r'libtpu\b', one)]
  if not wanted:
    sys.exit('install_libtpu.py: the installed JAX names no libtpu')
  requirement = wanted[0].split(';')[0].strip()
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
