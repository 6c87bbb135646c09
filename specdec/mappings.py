"""Compiled programs, released before the process has no memory mapping left.

On CPU every kernel of a program takes some memory mappings: a plain program of
the embedded pair some 150 in all, a staged one 1,100. Linux allows a process
65,530 of them (`vm.max_map_count`), and the next one is a segmentation fault
within the compiler. So `jit` counts them whenever a program was compiled; where
few are left, all programs are released. They are compiled again when they are
needed; decodes go on.
"""

from collections.abc import Callable
import functools
import gc
import pathlib
from typing import Any

from absl import logging
import jax

_TAKEN = pathlib.Path('/proc/self/maps')
_ALLOWED = pathlib.Path('/proc/sys/vm/max_map_count')


def _mappings() -> tuple[int, int]:
  """Memory mappings of this process, and how many it may have.

  0 and 1 on other systems than Linux; they have no such limit.
  """
  try:
    return _TAKEN.read_bytes().count(b'\n'), int(_ALLOWED.read_text())
  except OSError:
    return 0, 1


class Programs:
  """The programs of some functions, which are released together."""

  def __init__(self) -> None:
    self._functions: list[Any] = []
    # Mappings of other libraries, counted when programs were last released.
    self._others = 0

  def jit(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `jax.jit` with the options; its programs are released."""

    def decorate(function: Callable[..., Any]) -> Any:
      jitted: Any = jax.jit(function, **options)

      @functools.wraps(function)
      def call(*args: Any, **kwargs: Any) -> Any:
        num_programs = jitted._cache_size()
        result = jitted(*args, **kwargs)
        if jitted._cache_size() > num_programs:
          self._check()
        return result

      for name in ('trace', 'lower', 'eval_shape', 'clear_cache'):
        setattr(call, name, getattr(jitted, name))
      call._cache_size = jitted._cache_size  # type: ignore[attr-defined]
      self._functions.append(jitted)
      return call

    return decorate

  def _check(self) -> None:
    """Releases the programs if they take too many mappings."""
    taken, allowed = _mappings()
    self._others = min(self._others, taken)
    # A third, or two thirds of what others leave: a program takes more for a
    # moment than it keeps.
    if allowed - taken >= min(allowed, 2 * (allowed - self._others)) / 3:
      return
    for function in self._functions:
      function.clear_cache()
    gc.collect()
    logging.log_first_n(
      logging.WARNING,
      '%d of the %d memory mappings that Linux allows this process are taken,'
      ' so all compiled programs are released; those that are needed again are'
      ' compiled again. Fewer shapes need fewer programs: give all calls one'
      ' batch size and one room_for_new_tokens, or allow more mappings:'
      ' sysctl -w vm.max_map_count=%d',
      1,
      taken,
      allowed,
      4 * allowed,
    )
    self._others, _ = _mappings()


jit = Programs().jit
"""`jax.jit` for functions of this package, as a decorator with options."""
