"""Compiled programs on disk, which are compiled again if they are damaged.

JAX writes an entry in place and never replaces one. Where the package zstandard
is installed, it does not check what it reads, and one changed bit may end the
process (it did with jax 0.10.2 on CPU). So entries get a digest here. The hook
is internal to JAX; where it is missing, JAX keeps programs in its own way.
"""

from collections.abc import Callable
import contextlib
import functools
import pathlib
from typing import Any

from absl import logging
import jax

from specdec.text import whole_files

_SEALED = '-sealed'  # Keys of JAX's own entries do not end so.
_ENTRY, _TIME = '-cache', '-atime'  # The files of an entry, in this order.


class _Checked:
  """A cache of JAX whose entries have a digest at their end."""

  def __init__(self, cache: Any):
    self._cache = cache
    self._path = pathlib.Path(cache._path)
    # JAX writes no program where one lacks its time, as after a kill.
    for file in self._path.glob(f'*{_SEALED}{_ENTRY}'):
      time = file.name.removesuffix(_ENTRY) + _TIME
      if cache.eviction_enabled and not file.with_name(time).exists():
        file.unlink(missing_ok=True)

  def get(self, key: str) -> bytes | None:
    """An entry; None if there is none, or none that is whole."""
    stored = self._cache.get(key + _SEALED)
    content = None if stored is None else whole_files.unsealed(stored)
    if stored is not None and content is None:
      logging.warning('%s/%s is damaged; it is compiled again', self._path, key)
      for file in self._path.glob(f'{key}{_SEALED}*'):
        file.unlink(missing_ok=True)
    return content

  def put(self, key: str, value: bytes) -> None:
    """Adds an entry."""
    self._cache.put(key + _SEALED, whole_files.sealed(value))


def _checked(make: Callable[[str], Any], path: str) -> Any:
  """The result of JAX's `get_file_cache`, `make`, with a checked cache."""
  found = make(path)
  if found is None or not hasattr(found[0], 'eviction_enabled'):
    return found
  return _Checked(found[0]), *found[1:]


def keep(folder: str | None) -> None:
  """Lets JAX keep compiled programs in a folder; None: nowhere.

  Processes may share the folder, also with programs that use JAX alone.
  """
  jax.config.update('jax_compilation_cache_dir', folder)
  with contextlib.suppress(ImportError, AttributeError):
    from jax._src import compilation_cache

    make = compilation_cache.get_file_cache
    if not isinstance(make, functools.partial):
      compilation_cache.get_file_cache = functools.partial(_checked, make)
