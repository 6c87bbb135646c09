"""Installs the TPU compiler for compile_for.py and its tests.

It is kept in ~/.cache/specdec/libtpu: JAX looks for a TPU at every start
if libtpu is in the environment. The version is the one that the installed JAX
requires.
"""

import importlib.metadata
import subprocess
import sys

from specdec.models import user_cache

if __name__ == '__main__':
  required = importlib.metadata.requires('jax') or []
  wanted = next(text for text in required if text.startswith('libtpu'))
  requirement = wanted.split(';')[0].strip()
  folder = user_cache.folder('libtpu')
  note = folder / 'requirement.txt'
  if not (note.is_file() and note.read_text('utf-8') == requirement):
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps']
    place = [f'--target={folder}', '--upgrade']
    subprocess.run([*pip, *place, requirement], check=True)
    note.write_text(requirement, 'utf-8')
