"""Predicted cost of decoding, from the shapes of models and peak rates alone.

A step of speculative decoding runs some draft forwards in sequence and a target
forward over N nodes of every row, and emits tau tokens per row:

    speedup = tau * plain / (draft forwards * draft + target over N)

Only matrices count, in 16 bits; layers have one shape.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import numpy as np

from specdec.models.nn import llama as nn_llama
from specdec.models.nn import mixtral
from specdec.tree import topology as topology_lib

_BYTES = 2  # Per weight, element of a cache, and activation.


def _llama(*sizes: int) -> nn_llama.LlamaConfig:
  vocab_size, width, layers, heads, kv_heads, head_width, inner_width = sizes
  return nn_llama.LlamaConfig(
    vocab_size=vocab_size,
    num_positions=131_072,
    width=width,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_width=head_width,
    inner_width=inner_width,
  )


def _mixture(
  experts: int, per_token: int, *sizes: int
) -> mixtral.MixtralConfig:
  return mixtral.MixtralConfig(
    num_experts=experts,
    experts_per_token=per_token,
    **nn_llama.fields_of(_llama(*sizes)),
  )


MODELS = {
  'llama-2-70b': _llama(32_000, 8192, 80, 64, 8, 128, 28_672),
  'tinyllama-1.1b': _llama(32_000, 2048, 22, 32, 4, 64, 5632),
  'llama-3-8b': _llama(128_256, 4096, 32, 32, 8, 128, 14_336),
  'llama-3-70b': _llama(128_256, 8192, 80, 64, 8, 128, 28_672),
  'mixtral-8x7b': _mixture(8, 2, 32_000, 4096, 32, 32, 8, 128, 14_336),
  'qwen3-30b-a3b': _mixture(128, 8, 151_936, 2048, 48, 32, 4, 128, 768),
}
"""Published shapes, by name; of other models `hub.locate(name).config`."""


@dataclasses.dataclass(frozen=True)
class Hardware:
  """Peak rates of a machine with one device, or with several equal devices.

  Several devices share weights and caches evenly. Rates are per device.
  """

  bytes_per_second: float  #: The rate of the main memory.
  flops_per_second: float  #: The rate of dense products in bfloat16.
  link_bytes_per_second: float = math.inf  #: Rate of sending to other devices.
  collective_seconds: float = 0.0  #: Least time of a collective operation.
  devices: int = 1

  def times(self, devices: int) -> 'Hardware':
    """Several of this device."""
    if devices < 1:
      raise ValueError(f'devices must be at least 1, got {devices}')
    return dataclasses.replace(self, devices=devices)


# Data sheets; half of the bidirectional bandwidth. Collectives among eight
# GPUs: NCCL 2.12 (src/graph/tuning.cc), ring, LL: 3.6 + 14 hops of 0.47 us. Two
# by four TPUs: 8 hops of a microsecond (Austin et al. 2025, How to Scale Your
# Model), and at a corner half of the ports have a neighbour.
HARDWARE = {
  'h100': Hardware(3350e9, 989.4e12, 450e9, 10.2e-6),
  'h200': Hardware(4800e9, 989.4e12, 450e9, 10.2e-6),
  'v5e': Hardware(819e9, 197e12, 100e9, 8e-6),
}
"""Single devices by name; use `Hardware.times` for several."""


def _sums(matrices: Iterable[tuple[int, int]]) -> np.ndarray:
  """`[2]`: the elements of some matrices, and their inputs with outputs."""
  return np.sum([(a * b, a + b) for a, b in matrices], axis=0, dtype=float)


def _matrices(config: nn_llama.LlamaConfig) -> tuple[np.ndarray, ...]:
  """`_sums` of what all tokens multiply, and of all experts."""
  width, inner, layers = config.width, config.inner_width, config.num_layers
  if not isinstance(config.head_width, int) or not isinstance(inner, int):
    raise ValueError('the cost model is for layers of one shape')
  queries = config.num_heads * config.head_width
  keys = config.num_kv_heads * config.head_width
  experts = config.num_experts
  attention = [(width, queries), (width, keys), (width, keys), (queries, width)]
  router = [(width, experts)] if experts > 1 else []
  head = _sums([(width, config.vocab_size)])
  mlp = _sums([(width, inner), (width, inner), (inner, width)])
  return layers * _sums(attention + router) + head, layers * experts * mlp


def expected_experts(config: nn_llama.LlamaConfig, num_tokens: float) -> float:
  """Expected number of different experts of a layer that n tokens use.

  For a router that chooses uniformly and independently: E (1 - (1 - k / E)^n).
  This is an upper bound, because a trained router prefers some experts and
  chooses alike for neighbouring tokens (Mixtral, arXiv 2401.04088, section 5).
  """
  experts = config.num_experts
  share = config.experts_per_token / experts
  return experts * (1 - (1 - share) ** num_tokens)


def dense_baseline(config: mixtral.MixtralConfig) -> nn_llama.LlamaConfig:
  """The dense model with as many active parameters, except for routers."""
  fields = nn_llama.fields_of(config)
  fields['inner_width'] *= config.experts_per_token
  return nn_llama.LlamaConfig(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardCost:
  """FLOP and bytes of one forward, summed over all layers."""

  matmul_flops: float  #: For products with weights.
  attention_flops: float  #: For scores and weighted sums of values.
  weight_bytes: float  #: Read; of the experts, those expected to be used.
  cache_bytes: float  #: Keys and values that are read and written.
  activation_bytes: float  #: Inputs and outputs of the products with weights.
  #: Collectives of several devices: sums of the embeddings, and of the outputs
  #: of attention and MLP of every layer; their size in float32.
  reductions: int
  reduced_bytes: float
  gathered_bytes: float  #: The logits, gathered once.

  @property
  def num_bytes(self) -> float:
    """All bytes moved."""
    return self.weight_bytes + self.cache_bytes + self.activation_bytes

  def seconds(self, hardware: Hardware) -> float:
    """Lower bound of the time of the forward.

    Products with weights and attention run one after the other, and each is
    limited by memory or by arithmetic (Williams et al. 2009). Then devices wait
    for collectives: each of n sends the (n - 1) / n of a gathered array that
    others need, and twice as much of one that is summed up.
    """
    seconds = sum(
      max(
        num_bytes / hardware.bytes_per_second,
        flops / hardware.flops_per_second,
      )
      for num_bytes, flops in (
        (self.weight_bytes + self.activation_bytes, self.matmul_flops),
        (self.cache_bytes, self.attention_flops),
      )
    )
    if hardware.devices == 1:
      return seconds
    sent = (1 - 1 / hardware.devices) / hardware.link_bytes_per_second
    least = hardware.collective_seconds
    summing = max(self.reductions * least, 2 * sent * self.reduced_bytes)
    gathering = max(least, sent * self.gathered_bytes)
    return seconds / hardware.devices + summing + gathering


def forward_cost(
  config: nn_llama.LlamaConfig,
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
  positions, (shared, experts) = batch_size * num_tokens, _matrices(config)
  of_token = config.experts_per_token / config.num_experts
  used = expected_experts(config, positions) / config.num_experts
  active, sides = shared + of_token * experts
  head_widths = sum(config.cache_widths)  # One head of each layer, together.
  entry = 2 * config.num_kv_heads * head_widths * _BYTES
  # All pairs of a forward are computed, also pairs that the mask removes.
  pairs = positions * (context + num_tokens)
  reductions = 1 + 2 * config.num_layers
  return ForwardCost(
    matmul_flops=2.0 * positions * active,
    attention_flops=4.0 * pairs * config.num_heads * head_widths,
    weight_bytes=_BYTES * (shared + used * experts)[0],
    cache_bytes=(batch_size * context + positions) * entry,
    activation_bytes=_BYTES * positions * sides,
    reductions=reductions,
    reduced_bytes=4.0 * reductions * positions * config.width,
    gathered_bytes=4.0 * positions * config.vocab_size,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
  """A target on a machine, with a fixed tree: one draft forward per level.

  B (`batch_size`) rows do not wait for each other; `context` is the number of
  tokens in the cache of each row. ValueError if `acceptance` does not fit.
  """

  target: nn_llama.LlamaConfig  #: The model that verifies.
  draft: nn_llama.LlamaConfig | None  #: None if drafting costs nothing.
  hardware: Hardware  #: The machine that runs both.
  topology: topology_lib.Topology  #: The tree; a chain of n is `chain(n)`.
  #: The probability that the target emits the candidate of each rank.
  acceptance: Sequence[float]

  def __post_init__(self):
    if len(self.acceptance) < self.topology.branching:
      raise ValueError(
        f'acceptance has {len(self.acceptance)} ranks, but the tree has'
        f' {self.topology.branching}'
      )
    if not (min(self.acceptance) >= 0 and sum(self.acceptance) <= 1 + 1e-6):
      raise ValueError(
        'acceptance must be probabilities by rank, each at least 0 and together'
        f' at most 1, got {self.acceptance}'
      )

  @property
  def tokens(self) -> float:
    """tau, expected tokens of a step; of a chain 1 + a + ... + a^n."""
    paths = self.topology.paths
    return 1.0 + sum(
      math.prod(self.acceptance[rank] for rank in path) for path in paths
    )

  @property
  def draft_width(self) -> float:
    """Mean number of tokens of a draft forward."""
    scored = self.topology.schedule >= 0
    return float(scored.sum()) / self.topology.max_depth

  def plain_seconds(self, *, batch_size: int = 1, context: float = 0) -> float:
    """Time of a step of plain decoding, which emits a token per row."""
    cost = forward_cost(self.target, batch_size=batch_size, context=context)
    return cost.seconds(self.hardware)

  def seconds(self, *, batch_size: int = 1, context: float = 0) -> float:
    """Time of a step.

    Of several devices each runs the whole draft if that is faster.
    """
    cost = functools.partial(
      forward_cost, batch_size=batch_size, context=context
    )
    verify = cost(self.target, num_tokens=self.topology.num_nodes)
    if self.draft is None:
      return verify.seconds(self.hardware)
    drafting = cost(self.draft, num_tokens=self.draft_width)
    machines = self.hardware, self.hardware.times(1)
    draft_seconds = min(map(drafting.seconds, machines))
    depth = self.topology.max_depth
    return verify.seconds(self.hardware) + depth * draft_seconds

  def speedup(self, **sizes: Any) -> float:
    """Speed over plain decoding of the same batch."""
    return self.tokens * self.plain_seconds(**sizes) / self.seconds(**sizes)

  def break_even_batch_size(
    self, *, context: float = 0, limit: int = 1024
  ) -> int | None:
    """The batch size from which on plain decoding is at least as fast.

    It is the last crossing of speedup 1, which a mixture of experts may cross
    several times; 1 if speculation is faster at no batch size, and None if it
    is still faster at `limit`, the largest that is tried.
    """
    for batch_size in range(limit, 0, -1):
      if self.speedup(batch_size=batch_size, context=context) > 1:
        return None if batch_size == limit else batch_size + 1
    return 1
