"""Set before anything else imports JAX: the platform, and strict shapes."""

import collections
import gc
import os
import pathlib
import tempfile
from unittest import mock

# An explicit choice wins, so the suite can be tried on an accelerator.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

# Compiling takes long. What one process has compiled serves others that compile
# alike: workers, and one script after another.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _programs = tempfile.TemporaryDirectory(prefix='specdec-tests-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _programs.name
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.3'

import durations
import jax
import pytest

# Silent broadcasting of a `[V]` or `[B]` array is how batches get mixed up.
jax.config.update('jax_numpy_rank_promotion', 'raise')


# A process may have 65,530 memory mappings, and compiled programs need many.
_MAX_MAPPINGS = 25_000


@pytest.fixture(autouse=True)
def _few_mappings():
  """Forgets compiled programs before the process dies of them."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > _MAX_MAPPINGS:
    jax.clear_caches()
    gc.collect()


def pytest_configure(config):
  """Here programs run for moments; scripts and `--long` compile as users do."""
  if not config.getoption('--long'):
    flags = os.environ.get('XLA_FLAGS', '')
    flags += ' --xla_backend_optimization_level=0'
    with mock.patch.dict(os.environ, XLA_FLAGS=flags):
      jax.devices()  # XLA reads its flags once


def pytest_addoption(parser):
  parser.addoption(
    '--long', action='store_true', help='also run the tests that take minutes'
  )
  parser.addoption(
    '--fast',
    action='store_true',
    help=f'skip files that took over {durations.LIMIT:.0f} s the last time',
  )
  parser.addoption(
    '--update_limits',
    action='store_true',
    help='of counted_work_test.py: make the limits what is counted now',
  )


def _slow_files(config):
  cache = getattr(config, 'cache', None)  # as of `-p no:cacheprovider`
  return durations.slow_files(cache.get(durations.KEY, {}) if cache else {})


def pytest_report_header(config):
  if not config.getoption('--fast'):
    return None
  slow = _slow_files(config)
  if not slow:
    return '--fast: nothing is known to be slow yet, so everything runs'
  return f'--fast: without {len(slow)} files that were slow the last time'


def pytest_collection_modifyitems(config, items):
  if not config.getoption('--long'):
    for item in items:
      if item.get_closest_marker('long'):
        item.add_marker(pytest.mark.skip(reason='takes minutes; --long'))
  if config.getoption('--fast'):
    slow = _slow_files(config)
    file_of = lambda item: item.nodeid.split('::')[0]
    config.hook.pytest_deselected(
      items=[item for item in items if file_of(item) in slow]
    )
    items[:] = [item for item in items if file_of(item) not in slow]


_seconds = collections.Counter()


def pytest_runtest_logreport(report):
  _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session):
  cache = getattr(session.config, 'cache', None)
  # Of several processes the one that hears from all.
  if cache and _seconds and not hasattr(session.config, 'workerinput'):
    known = cache.get(durations.KEY, {})
    cache.set(durations.KEY, known | dict(_seconds))
