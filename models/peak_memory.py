"""The memory that a call needs beyond what was there before it."""

from collections.abc import Callable
import contextlib
import ctypes
import pathlib
import threading
import time
from typing import Any

import jax

_PROC = pathlib.Path('/proc/self')
_RESET_PEAK = '5'  # `man 5 proc`, clear_refs: the peak becomes what is resident
_SECONDS_BETWEEN_LOOKS = 1e-3


def _resident(key: str) -> int:
  """A size in `/proc/self/status`, in bytes."""
  for line in (_PROC / 'status').read_text().splitlines():
    name, _, value = line.partition(':')
    if name == key:
      return 1024 * int(value.removesuffix('kB'))
  raise OSError(f'/proc/self/status has no {key}')


def _host_peak(run: Callable[[], Any]) -> int:
  with contextlib.suppress(OSError, AttributeError):
    # What was freed but is still resident would hide that it is needed again.
    ctypes.CDLL(None).malloc_trim(0)
  (_PROC / 'clear_refs').write_text(_RESET_PEAK)
  before = _resident('VmRSS')
  run()
  return max(_resident('VmHWM') - before, 0)


def _in_use(device: jax.Device) -> int:
  return device.memory_stats()['bytes_in_use']


def _device_peak(run: Callable[[], Any], device: jax.Device) -> int:
  # The device's own high-water mark cannot be reset, so look often.
  before = peak = _in_use(device)
  done = threading.Event()

  def watch():
    nonlocal peak
    while not done.is_set():
      peak = max(peak, _in_use(device))
      time.sleep(_SECONDS_BETWEEN_LOOKS)

  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  try:
    run()
  finally:
    done.set()
    watcher.join()
  return peak - before


def peak_beyond(run: Callable[[], Any]) -> int | None:
  """The most memory in use during a call, beyond that before it.

  Args:
    run: done once before, so that it does not compile; not to be timed.

  Returns:
    Bytes: of the process on CPU, else those of the first device that JAX has in
    use. None where the platform does not say (CPU without Linux, or a container
    without `/proc/self/clear_refs`).
  """
  device = jax.devices()[0]
  try:
    if device.platform == 'cpu':
      return _host_peak(run)
    return _device_peak(run, device)
  except (OSError, TypeError, KeyError):
    return None
