"""Peak memory of a call beyond what was in use before."""

import pathlib

import numpy as np
import pytest

from models.lab.bench import machine

_MEGABYTE = 1 << 20


_on_linux = pytest.mark.skipif(
  not pathlib.Path('/proc/self/clear_refs').exists(), reason='Linux only'
)


@_on_linux
def test_the_peak_of_a_call_is_seen_every_time():
  there_before = np.ones(100 * _MEGABYTE, np.uint8)
  for size in (64, 16, 64):
    peak = machine.peak_beyond(
      lambda size=size: np.ones(size * _MEGABYTE, np.uint8).sum()
    )
    assert peak is not None
    assert abs(peak - size * _MEGABYTE) < 8 * _MEGABYTE
  assert there_before[0]


@_on_linux
def test_what_was_freed_but_kept_counts_again():
  pins = []

  def run():
    blocks = [np.ones(60_000, np.uint8) for _ in range(1000)]
    pins.append(np.ones(60_000, np.uint8))  # keeps the heap from shrinking
    del blocks

  for _ in range(2):
    assert (machine.peak_beyond(run) or 0) > 50_000_000


class _Device:
  """Says that memory is in use while a call lasts."""

  platform = 'gpu'
  looked, used = 0, 100

  def memory_stats(self):
    self.looked += 1
    return {'bytes_in_use': self.used}


def test_a_device_is_watched_during_a_call(monkeypatch):
  device = _Device()
  monkeypatch.setattr('jax.devices', lambda: [device])

  def run():
    device.used = 170
    seen = device.looked
    while device.looked < seen + 2:
      pass
    device.used = 100

  assert machine.peak_beyond(run) == 70
  device.memory_stats = lambda: None
  assert machine.peak_beyond(lambda: None) is None
