"""Set before anything else imports JAX: the platform, and strict shapes."""

import gc
import os
import pathlib

# An explicit choice wins, so the suite can be tried on an accelerator.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

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


def pytest_addoption(parser):
  parser.addoption(
    '--long', action='store_true', help='also run the tests that take minutes'
  )
  parser.addoption(
    '--update_limits',
    action='store_true',
    help='of counted_work_test.py: make the limits what is counted now',
  )


def pytest_collection_modifyitems(config, items):
  if not config.getoption('--long'):
    for item in items:
      if item.get_closest_marker('long'):
        item.add_marker(pytest.mark.skip(reason='takes minutes; --long'))
