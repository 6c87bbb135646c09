"""Installs the TPU compiler for compile_for.py and its tests in build/libtpu.

JAX looks for a TPU at every start if libtpu is in the environment. The version
is the one that the installed JAX requires.
"""

import importlib.metadata
import pathlib
import subprocess
import sys

_FOLDER = pathlib.Path(__file__).parents[1] / 'build' / 'libtpu'

if __name__ == '__main__':
  required = importlib.metadata.requires('jax') or []
  wanted = next(text for text in required if text.startswith('libtpu'))
  requirement, note = wanted.split(';')[0].strip(), _FOLDER / 'requirement.txt'
  if not (note.is_file() and note.read_text('utf-8') == requirement):
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps']
    folder = f'--target={_FOLDER}'
    subprocess.run([*pip, '--upgrade', folder, requirement], check=True)
    note.write_text(requirement, 'utf-8')
