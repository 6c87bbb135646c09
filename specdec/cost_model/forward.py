"""What one forward costs: operations, bytes, seconds.

B rows of L tokens each, every row with C tokens in its cache. The weights are
read once for all rows, the caches once for all tokens of a row: that is all of
why batches, and speculation, pay.
"""

import dataclasses

from specdec.cost_model.hardware import Hardware
from specdec.cost_model.shapes import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardCost:
  """Of all layers of one forward.

  Attributes:
    matmul_flops: products with weights, two operations per multiplication and
      addition.
    attention_flops: scores and values.
    weight_bytes: read; of experts those that are expected to be needed.
    cache_read_bytes: what was in the caches before.
    cache_write_bytes: keys and values of the new tokens.
    activation_bytes: what the products read and write besides the weights, each
      once; a compiler that fuses more moves less.
  """

  matmul_flops: float
  attention_flops: float
  weight_bytes: float
  cache_read_bytes: float
  cache_write_bytes: float
  activation_bytes: float

  @property
  def flops(self) -> float:
    """All operations."""
    return self.matmul_flops + self.attention_flops

  @property
  def bytes(self) -> float:
    """All traffic."""
    return self.matmul_bytes + self.attention_bytes

  @property
  def read_bytes(self) -> float:
    """Weights and caches, which is what `relative_bandwidth` counts."""
    return self.weight_bytes + self.cache_read_bytes

  @property
  def matmul_bytes(self) -> float:
    """Of the products with weights."""
    return self.weight_bytes + self.activation_bytes

  @property
  def attention_bytes(self) -> float:
    """Of the cache."""
    return self.cache_read_bytes + self.cache_write_bytes

  @property
  def arithmetic_intensity(self) -> float:
    """FLOP per byte."""
    return self.flops / self.bytes


def forward_cost(
  shape: ModelShape,
  *,
  batch_size: int = 1,
  num_tokens: float = 1,
  context: float = 0,
) -> ForwardCost:
  """Counts a forward.

  Args:
    shape: of the model.
    batch_size: B.
    num_tokens: L, of each row; may be a mean.
    context: C, the tokens in each row's cache before; may be a mean.

  Raises:
    ValueError: B or L is below 1, or C below 0.
  """
  if batch_size < 1 or num_tokens < 1 or context < 0:
    raise ValueError(
      'batch_size and num_tokens must be at least 1, context at least 0, got'
      f' {batch_size}, {num_tokens} and {context}'
    )
  positions = batch_size * num_tokens
  weights = float(shape.shared_parameters)
  if shape.experts is not None:
    distinct = shape.experts.expected_distinct(
      num_tokens, batch_size=batch_size
    )
    weights += distinct * shape.routed_parameters
  # A token sees the others of its forward, too; masked ones cost the same.
  pairs = positions * (context + num_tokens) * shape.num_layers
  return ForwardCost(
    matmul_flops=2.0 * positions * shape.active_parameters,
    attention_flops=float(pairs * shape.flops_per_pair),
    weight_bytes=weights * shape.weight_bytes,
    cache_read_bytes=batch_size * context * shape.kv_bytes_per_token,
    cache_write_bytes=positions * shape.kv_bytes_per_token,
    activation_bytes=(
      positions * shape.activations_per_token * shape.activation_bytes
    ),
  )


def forward_seconds(
  shape: ModelShape,
  hardware: Hardware,
  *,
  batch_size: int = 1,
  num_tokens: float = 1,
  context: float = 0,
  overlap: bool = True,
) -> float:
  """The least that a forward takes on a machine (the model of roofs).

  The products with weights, then attention: kernels run one after the other,
  and each is bound by memory or by arithmetic (Williams et al. 2009).

  Args:
    shape: of the model.
    hardware: to run on.
    batch_size: see `forward_cost`.
    num_tokens: likewise.
    context: likewise.
    overlap: whether a kernel reads while it computes, so that the slower of
      both counts; otherwise their sum does.

  Raises:
    ValueError: a size is out of range, or the machine has no figure for the
      dtype.
  """
  cost = forward_cost(
    shape, batch_size=batch_size, num_tokens=num_tokens, context=context
  )
  peak = hardware.peak(shape.dtype)
  combine = max if overlap else lambda memory, arithmetic: memory + arithmetic
  kernels = (
    (cost.matmul_bytes, cost.matmul_flops),
    (cost.attention_bytes, cost.attention_flops),
  )
  return shape.num_layers * hardware.layer_seconds + sum(
    combine(moved / hardware.bytes_per_second, flops / peak)
    for moved, flops in kernels
  )
