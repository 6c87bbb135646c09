"""Set before anything else imports JAX: the platform, and strict shapes."""

import os

# An explicit choice wins, so the suite can be tried on an accelerator.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import pytest

# Silent broadcasting of a `[V]` or `[B]` array is how batches get mixed up.
jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_addoption(parser):
  parser.addoption(
    '--long', action='store_true', help='also run the tests that take minutes'
  )


def pytest_collection_modifyitems(config, items):
  if not config.getoption('--long'):
    for item in items:
      if item.get_closest_marker('long'):
        item.add_marker(pytest.mark.skip(reason='takes minutes; --long'))
