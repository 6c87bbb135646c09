"""Memory for weights is aligned, zero, shared by small arrays, and released."""

import pathlib
import re
import weakref

import jax
import numpy as np
import pytest

from specdec.models.nn.cpu import huge_pages


def test_small_arrays_lie_next_to_one_another(monkeypatch):
  monkeypatch.setattr(huge_pages, '_rest', np.zeros(0, np.uint8))
  arrays = [huge_pages.zeros((size,)) for size in (3, 40, 1000)]
  starts = [array.ctypes.data for array in arrays]
  assert np.diff(starts).tolist() == [64, 192]
  assert starts[0] % huge_pages._ALIGNMENT == 0
  for number, array in enumerate(arrays):
    array += np.uint32(number + 1)
  for number, array in enumerate(arrays):  # None wrote into another.
    assert (array == number + 1).all()
    assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data
  assert not huge_pages.zeros((7,)).any()


def test_a_large_array_leaves_the_chunk_of_others(monkeypatch):
  monkeypatch.setattr(huge_pages, '_CHUNK', 1 << 10)
  monkeypatch.setattr(huge_pages, '_rest', np.zeros(0, np.uint8))
  first = huge_pages.zeros((16,))
  large = huge_pages.zeros((1 << 10, 2))
  after = huge_pages.zeros((16,))
  assert after.ctypes.data == first.ctypes.data + first.nbytes
  assert not np.shares_memory(large, huge_pages._rest)
  assert large.shape == (1 << 10, 2)


def test_a_chunk_ends_with_its_arrays(monkeypatch):
  monkeypatch.setattr(huge_pages, '_rest', np.zeros(0, np.uint8))
  made = []
  allocate = huge_pages._allocate
  keep = lambda size: made.append(allocate(size)) or made[-1]
  monkeypatch.setattr(huge_pages, '_allocate', keep)
  array = huge_pages.zeros((1000,))
  chunk = weakref.ref(made.pop().base)
  huge_pages._rest = np.zeros(0, np.uint8)
  assert chunk() is not None
  del array
  assert chunk() is None


@pytest.mark.skipif(
  not pathlib.Path('/sys/kernel/mm/transparent_hugepage').exists(),
  reason='this system has no huge pages',
)
def test_small_arrays_ask_for_huge_pages(monkeypatch):
  monkeypatch.setattr(huge_pages, '_rest', np.zeros(0, np.uint8))
  address = huge_pages.zeros((1000,)).ctypes.data
  smaps = pathlib.Path('/proc/self/smaps').read_text()
  areas = re.finditer(r'^(\w+)-(\w+) (?:.*\n)*?VmFlags: (.*)$', smaps, re.M)
  flags = [
    area[3].split()
    for area in areas
    if int(area[1], 16) <= address < int(area[2], 16)
  ]
  assert 'hg' in flags[0]
