"""Cost of one forward on a machine: FLOP, bytes and seconds (the roofline).

Only matrices count. Norms, biases and learned positions are below 1 % of every
preset.
"""

from collections.abc import Mapping
import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
  """Sizes of a decoder-only transformer, dense or a mixture of experts.

  Raises:
    ValueError: the numbers of heads or of experts do not fit together.
  """

  name: str  #: Shown in tables.
  num_layers: int  #: Number of transformer blocks.
  width: int  #: The residual stream's.
  num_heads: int  #: Number of query heads.
  num_kv_heads: int  #: Number of key and value heads.
  head_width: int  #: A query, key or value head's.
  mlp_width: int  #: Hidden width of the MLP, or of an expert.
  vocab_size: int  #: V.
  gated: bool = True  #: Whether an MLP has 3 matrices (SwiGLU) instead of 2.
  tied: bool = False  #: Whether the output head is the token embedding.
  num_experts: int = 1  #: E, per layer; a dense model has no router.
  experts_per_token: int = 1  #: k, the number of experts of a token.
  weight_bytes: float = 2.0  #: Bytes per weight.
  cache_bytes: float = 2.0  #: Bytes per element of the KV cache.
  activation_bytes: float = 2.0  #: Bytes per element of an activation.
  #: The matrix products', a key of `Hardware.flops_per_second`.
  dtype: str = 'bfloat16'

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} must be a multiple of'
        f' num_kv_heads={self.num_kv_heads}'
      )
    if not 1 <= self.experts_per_token <= self.num_experts:
      raise ValueError(
        f'experts_per_token={self.experts_per_token} must be between 1 and'
        f' num_experts={self.num_experts}'
      )

  @property
  def shared_parameters(self) -> int:
    """Weights that every token is multiplied with, the head included."""
    heads = self.num_heads + self.num_kv_heads
    attention = 2 * self.width * heads * self.head_width
    router = self.width * self.num_experts if self.num_experts > 1 else 0
    in_layers = self.num_layers * (attention + router)
    return in_layers + self.width * self.vocab_size

  @property
  def expert_parameters(self) -> int:
    """Weights of one expert (or of the MLP) of every layer."""
    matrices = 3 if self.gated else 2
    return self.num_layers * matrices * self.width * self.mlp_width

  @property
  def active_parameters(self) -> int:
    """Weights that one token is multiplied with; no embedding table."""
    experts = self.experts_per_token * self.expert_parameters
    return self.shared_parameters + experts

  @property
  def parameters(self) -> int:
    """All weights."""
    embedding = 0 if self.tied else self.vocab_size * self.width
    experts = self.num_experts * self.expert_parameters
    return embedding + self.shared_parameters + experts

  @property
  def activations_per_token(self) -> int:
    """Elements of the inputs and outputs of all products of one token."""
    heads = self.num_heads + self.num_kv_heads
    attention = 4 * self.width + 2 * heads * self.head_width
    router = self.width + self.num_experts if self.num_experts > 1 else 0
    expert = (3 if self.gated else 2) * (self.width + self.mlp_width)
    in_layer = attention + router + self.experts_per_token * expert
    return self.num_layers * in_layer + self.width + self.vocab_size

  @property
  def kv_bytes_per_token(self) -> float:
    """Bytes of keys and values that one token has in the cache."""
    in_layer = 2 * self.num_kv_heads * self.head_width
    return self.num_layers * in_layer * self.cache_bytes

  def expected_experts(self, num_tokens: float) -> float:
    """Expected number of different experts of a layer that n tokens use.

    n, `num_tokens`, is that of all rows and may be a mean. For a router that
    chooses uniformly and independently: E (1 - (1 - k / E)^n), an upper bound,
    because a trained router prefers some experts and chooses alike for
    neighbouring tokens (Mixtral, arXiv 2401.04088, section 5).
    """
    share = self.experts_per_token / self.num_experts
    return self.num_experts * (1 - (1 - share) ** num_tokens)

  def dense_baseline(self) -> 'ModelShape':
    """The dense model with as many active parameters, except for routers."""
    return dataclasses.replace(
      self,
      name=f'dense baseline of {self.name}',
      mlp_width=self.experts_per_token * self.mlp_width,
      num_experts=1,
      experts_per_token=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """Peak rates and memory of a machine with one device or several alike.

  Several devices share weights and caches evenly, as the heads, hidden units
  and vocabulary of a layer are distributed. Rates are those of one device.
  """

  name: str  #: Shown in tables.
  bytes_per_second: float  #: Peak bandwidth of the main memory.
  #: Peak rate of dense matrix products by dtype; a multiplication and an
  #: addition count as two.
  flops_per_second: Mapping[str, float]
  memory_bytes: float = math.inf  #: Size of the main memory of one device.
  link_bytes_per_second: float = math.inf  #: That a device sends to others.
  collective_seconds: float = 0.0  #: Least time of a collective operation.
  devices: int = 1  #: Number of devices.

  def peak(self, dtype: str) -> float:
    """Peak FLOP per second; ValueError if the dtype has no known rate."""
    if dtype not in self.flops_per_second:
      raise ValueError(
        f'dtype={dtype!r} has no peak rate on {self.name}; choose from'
        f' {", ".join(sorted(self.flops_per_second))}'
      )
    return self.flops_per_second[dtype]

  def times(self, devices: int) -> 'Hardware':
    """Several of this device."""
    if devices < 1:
      raise ValueError(f'devices must be at least 1, got {devices}')
    name = f'{devices} x {self.name}' if devices > 1 else self.name
    return dataclasses.replace(self, name=name, devices=devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardCost:
  """FLOP and bytes of one forward, summed over all layers."""

  matmul_flops: float  #: For products with weights.
  attention_flops: float  #: For scores and weighted sums of values.
  weight_bytes: float  #: Read; of the experts, those expected to be used.
  cache_read_bytes: float  #: Keys and values that were in the cache before.
  cache_write_bytes: float  #: Keys and values of the new tokens.
  #: Inputs and outputs of the products with weights; a compiler that fuses more
  #: moves fewer.
  activation_bytes: float
  #: Collectives of a forward on several devices: sums of the embeddings, and of
  #: the outputs of attention and of the MLP in every layer.
  reductions: int
  reduced_bytes: float  #: Size of what these sum up.
  gathered_bytes: float  #: Size of the logits, which are gathered once.
  dtype: str  #: The products'.

  @property
  def num_bytes(self) -> float:
    """All bytes moved."""
    cache_bytes = self.cache_read_bytes + self.cache_write_bytes
    return self.weight_bytes + cache_bytes + self.activation_bytes

  def communication_seconds(self, hardware: Hardware) -> float:
    """Time of the collectives; 0 on one device.

    Of n devices each sends and receives the (n - 1) / n of a gathered array
    that others need, and twice as much of one that is summed up. A collective
    takes at least `Hardware.collective_seconds`.
    """
    if hardware.devices == 1:
      return 0.0
    sent = (1 - 1 / hardware.devices) / hardware.link_bytes_per_second
    latency = hardware.collective_seconds
    summing = max(self.reductions * latency, 2 * sent * self.reduced_bytes)
    return summing + max(latency, sent * self.gathered_bytes)

  def seconds(self, hardware: Hardware) -> float:
    """Lower bound of the time of the forward, by the roofline model.

    Products with weights and attention run one after the other, and each is
    limited by memory or by arithmetic (Williams et al. 2009). Devices wait for
    the collectives.
    """
    peak = hardware.peak(self.dtype)
    cache_bytes = self.cache_read_bytes + self.cache_write_bytes
    kernels = (
      (self.num_bytes - cache_bytes, self.matmul_flops),
      (cache_bytes, self.attention_flops),
    )
    seconds = sum(
      max(moved / hardware.bytes_per_second, flops / peak)
      for moved, flops in kernels
    )
    return seconds / hardware.devices + self.communication_seconds(hardware)


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
  reductions = 1 + 2 * shape.num_layers
  return ForwardCost(
    matmul_flops=2.0 * positions * shape.active_parameters,
    attention_flops=4.0 * pairs * shape.num_heads * shape.head_width,
    weight_bytes=weights * shape.weight_bytes,
    cache_read_bytes=batch_size * context * shape.kv_bytes_per_token,
    cache_write_bytes=positions * shape.kv_bytes_per_token,
    activation_bytes=activations * shape.activation_bytes,
    reductions=reductions,
    # In float32, as the logits.
    reduced_bytes=4.0 * reductions * positions * shape.width,
    gathered_bytes=4.0 * positions * shape.vocab_size,
    dtype=shape.dtype,
  )
