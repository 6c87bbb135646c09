"""Set before anything else imports JAX: the platform, and strict shapes."""

import os

# An explicit choice wins, so the suite can be tried on an accelerator.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

# Silent broadcasting of a `[V]` or `[B]` array is how batches get mixed up.
jax.config.update('jax_numpy_rank_promotion', 'raise')
