"""What kernels of our own have in common: the GPUs that run them, and sizes."""

import jax

_OLDEST = 8.0  # Ampere; Triton compiles for no GPU before.


def runs_kernels() -> bool:
  """False on a GPU that Triton does not know.

  Programs are also compiled for GPUs that are not there, which are taken to be
  new enough.
  """
  if jax.default_backend() != 'gpu':
    return True
  return float(jax.devices()[0].compute_capability) >= _OLDEST


def power_of_two(number: int) -> int:
  """Arrays in a kernel have such sizes; what is beyond `number` is masked."""
  return 1 << (number - 1).bit_length()
