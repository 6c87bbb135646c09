"""Sums that cannot overflow where the device has no integers of 64 bits."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

_PRIME = 2**31 - 1
_INVERSE_OF_2_TO_32 = 2**30  # Modulo the prime.


class Total(flax.struct.PyTreeNode):
  """A sum below 2^62 of integers from 0 to 2^31 - 1.

  It is held as its remainders modulo 2^32 and modulo 2^31 - 1, which determine
  it (Chinese remainder theorem). A carry would join the two, and cost two
  kernels more, because neither could then be updated in place.
  """

  wrapped: jax.Array  #: `[...]` int32, the sum modulo 2^32.
  residue: jax.Array  #: `[...]` int32, the sum modulo 2^31 - 1.

  @classmethod
  def zeros(cls, *shape: int) -> 'Total':
    """Sums of nothing."""
    zeros = jnp.zeros(shape, jnp.int32)
    return cls(wrapped=zeros, residue=zeros)

  def __add__(self, amount: jax.typing.ArrayLike) -> 'Total':
    """The sum with `amount [...]`, an integer from 0 to 2^31 - 1."""
    residue = self.residue + amount
    # Below zero it is 2^32 less than the sum.
    residue = jnp.where(residue < 0, (residue & _PRIME) + 1, residue)
    return Total(wrapped=self.wrapped + amount, residue=residue)

  @property
  def value(self) -> np.ndarray:
    """The sum on the host, `[...]` int64."""
    wrapped = np.asarray(self.wrapped).astype(np.uint32).astype(np.int64)
    difference = (np.asarray(self.residue, np.int64) - wrapped) % _PRIME
    return wrapped + (difference * _INVERSE_OF_2_TO_32 % _PRIME << 32)
