"""Cost of one forward on a machine: FLOP, bytes and seconds (the roofline)."""

from collections.abc import Mapping
import dataclasses
import math

from specdec.cost_model.shapes import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """Peak rates and memory of one machine.

  Attributes:
    name: shown in tables.
    bytes_per_second: peak bandwidth of the main memory.
    flops_per_second: peak rate of dense matrix products by dtype; a
      multiplication and an addition count as two.
    memory_bytes: size of the main memory.
  """

  name: str
  bytes_per_second: float
  flops_per_second: Mapping[str, float]
  memory_bytes: float = math.inf

  def peak(self, dtype: str) -> float:
    """Peak FLOP per second; ValueError if the dtype has no known rate."""
    if dtype not in self.flops_per_second:
      raise ValueError(
        f'dtype={dtype!r} has no peak rate on {self.name}; choose from'
        f' {", ".join(sorted(self.flops_per_second))}'
      )
    return self.flops_per_second[dtype]

  def ridge(self, dtype: str) -> float:
    """FLOP per byte above which arithmetic is the limit instead of memory."""
    return self.peak(dtype) / self.bytes_per_second

  def times(self, devices: int) -> 'Hardware':
    """Several devices with ideal sharding; communication is ignored."""
    if devices < 1:
      raise ValueError(f'devices must be at least 1, got {devices}')
    return dataclasses.replace(
      self,
      name=f'{devices} x {self.name}' if devices > 1 else self.name,
      bytes_per_second=devices * self.bytes_per_second,
      flops_per_second={
        dtype: devices * rate for dtype, rate in self.flops_per_second.items()
      },
      memory_bytes=devices * self.memory_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardCost:
  """FLOP and bytes of one forward, summed over all layers.

  Attributes:
    matmul_flops: of the products with weights.
    attention_flops: of scores and of weighted sums of values.
    weight_bytes: read; of the experts, those expected to be used.
    cache_read_bytes: keys and values that were in the cache before.
    cache_write_bytes: keys and values of the new tokens.
    activation_bytes: inputs and outputs of the products with weights; a
      compiler that fuses more moves fewer.
    dtype: of the products.
  """

  matmul_flops: float
  attention_flops: float
  weight_bytes: float
  cache_read_bytes: float
  cache_write_bytes: float
  activation_bytes: float
  dtype: str

  @property
  def flops(self) -> float:
    """All FLOP."""
    return self.matmul_flops + self.attention_flops

  @property
  def read_bytes(self) -> float:
    """Bytes of weights and caches, which the relative bandwidth compares."""
    return self.weight_bytes + self.cache_read_bytes

  @property
  def bytes(self) -> float:
    """All bytes moved."""
    return self.read_bytes + (self.cache_write_bytes + self.activation_bytes)

  def seconds(self, hardware: Hardware, *, overlap: bool = True) -> float:
    """Lower bound of the time of the forward, by the roofline model.

    Products with weights and attention run one after the other, and each is
    limited by memory or by arithmetic (Williams et al. 2009). Without `overlap`
    a kernel does not compute while it reads, so both times add up.
    """
    peak = hardware.peak(self.dtype)
    cache_bytes = self.cache_read_bytes + self.cache_write_bytes
    kernels = (
      (self.bytes - cache_bytes, self.matmul_flops),
      (cache_bytes, self.attention_flops),
    )
    combine = max if overlap else lambda memory, arithmetic: memory + arithmetic
    return sum(
      combine(moved / hardware.bytes_per_second, flops / peak)
      for moved, flops in kernels
    )


def forward_cost(
  shape: ModelShape,
  *,
  batch_size: int = 1,
  num_tokens: float = 1,
  context: float = 0,
) -> ForwardCost:
  """Counts a forward over B rows of L tokens with C tokens in each row's cache.

  The weights are read once for all rows, a cache once for all tokens of its
  row. B is `batch_size`, L `num_tokens`, C `context`; L and C may be means.

  Raises:
    ValueError: B or L is less than 1, or C is negative.
  """
  if batch_size < 1 or num_tokens < 1 or context < 0:
    raise ValueError(
      'batch_size and num_tokens must be at least 1 and context at least 0, got'
      f' {batch_size}, {num_tokens} and {context}'
    )
  positions = batch_size * num_tokens
  experts = shape.expected_experts(positions)
  weights = shape.shared_parameters + experts * shape.expert_parameters
  # All pairs of a forward are computed, also those that the mask removes.
  pairs = positions * (context + num_tokens) * shape.num_layers
  activations = positions * shape.activations_per_token
  return ForwardCost(
    matmul_flops=2.0 * positions * shape.active_parameters,
    attention_flops=4.0 * pairs * shape.num_heads * shape.head_width,
    weight_bytes=weights * shape.weight_bytes,
    cache_read_bytes=batch_size * context * shape.kv_bytes_per_token,
    cache_write_bytes=positions * shape.kv_bytes_per_token,
    activation_bytes=activations * shape.activation_bytes,
    dtype=shape.dtype,
  )
