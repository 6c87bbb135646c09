"""Memory of the host for weights that kernels read.

Kernels read weights from memory in every forward. With pages of 4 KB a
processor looks up an address for every page, in a virtual machine twice.
Huge pages have 2 MB. Many Linux systems give them only to memory that asks.
"""

import contextlib
import math
import mmap
import threading

import numpy as np

_ALIGNMENT = 64  # Bytes; JAX copies arrays on the CPU that begin elsewhere.
_HUGE_PAGE = 1 << 21  # Bytes.
_CHUNK = 32 << 20  # Bytes; larger arrays have memory of their own.

_lock = threading.Lock()
_rest = np.zeros(0, np.uint8)  # The free end of the last chunk.


def _allocate(size: int) -> np.ndarray:
  """Zeros `[size]` of uint8, in huge pages if Linux has some."""
  if not hasattr(mmap, 'MADV_HUGEPAGE'):
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]
  size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
  flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
  pages = mmap.mmap(-1, size + _HUGE_PAGE, flags)
  memory = np.frombuffer(pages, np.uint8)
  start = -memory.ctypes.data % _HUGE_PAGE
  with contextlib.suppress(OSError):  # This system has none.
    pages.madvise(mmap.MADV_HUGEPAGE, start, size)
  return memory[start : start + size]


def zeros(shape: tuple[int, ...]) -> np.ndarray:
  """Zeros of uint32 that JAX can take as they are, without a copy.

  Arrays lie next to one another in chunks, so that huge pages serve small ones,
  too. A chunk is released with the last of its arrays.
  """
  global _rest
  size = 4 * math.prod(shape)
  place = -(-size // _ALIGNMENT) * _ALIGNMENT
  with _lock:
    if place > _CHUNK:
      memory = _allocate(place)
    else:
      if place > len(_rest):
        _rest = _allocate(_CHUNK)
      memory, _rest = _rest[:place], _rest[place:]
  return memory[:size].view(np.uint32).reshape(shape)
