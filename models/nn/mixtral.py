"""Mixtral and related models: Llamas with experts as feed-forward layers.

One module serves Mixtral (arXiv 2401.04088), gpt-oss, Qwen's mixtures and
Granite's. A forward computes only the experts that its tokens are routed to:

    token    0 1 2 3        experts of each token: 1,3  0,1  3,1  1,0
    sorted   1 3 | 0 1 2 3 | | 0 2        rows of expert 0 | 1 | 2 | 3

Tokens are sorted by expert. Each expert multiplies its own rows in blocks; the
weights of an expert without rows are not read.

The weights of each expert are separate arrays with a loop of their own. XLA's
CPU backend copies the slices of a stacked array `[experts, out, in]` and misses
its fast products for them: two of eight experts on 16 bfloat16 rows take 107 ms
instead of 1.6 ms, and `jax.lax.ragged_dot`, which computes all experts there,
188 ms (throw-away program, AMD EPYC Zen 4).
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple
from typing import Unpack

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from specdec.models.nn import contraction
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib
from specdec.models.nn.cpu import ops

_MAX_BLOCK = 128  # Rows computed at once, at most.
_BLOCK_STEP = 16

# From the weights of an expert (any pytree) and rows `[n, width]` to its
# outputs `[n, width]`.
Expert = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(nn_llama.LlamaConfig):
  """Shape of a Mixtral: the shape of a Llama, and its experts."""

  # Fields without a default, where a Llama has constants.
  num_experts: int = dataclasses.field()  # E, in every layer.
  experts_per_token: int = dataclasses.field()  # k.
  renormalize: bool = True  # Whether the weights of the k experts sum to 1.
  shared_width: int | None = None  # The shared expert's width (Qwen2-MoE),
  clamped: bool = False  # Whether experts have the gate of gpt-oss.
  shared_gate: bool = True  # and whether that has a gate (not in Granite 4).

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.experts_per_token > self.num_experts:
      raise ValueError(
        'experts_per_token must lie between 1 and'
        f' num_experts={self.num_experts}, got {self.experts_per_token}'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(MixtralConfig):
  """Shape of a gpt-oss (arXiv 2508.10925). Its router has biases as well.

  A class of its own, because checkpoints store experts in another layout.
  """


class Routing(NamedTuple):
  """Assignment of the tokens of one layer to experts.

  Attributes:
    experts: `[..., k]` int32, distinct, the most probable first.
    weights: `[..., k]` float32, weights of the experts' outputs in the sum.
  """

  experts: jax.Array
  weights: jax.Array


def route(logits: jax.Array, count: int, *, renormalize: bool) -> Routing:
  """Routing of each token to its most probable experts (arXiv 2401.04088, 2.1).

  Args:
    logits: `[..., E]` float32.
    count: k, experts per token.
    renormalize: whether the weights of the k experts sum to 1.
  """
  if contraction.backend().kernels:
    return Routing(*ops.route(logits, count, renormalize=renormalize))
  probs = jax.nn.softmax(logits, axis=-1)
  weights, experts = lax.top_k(probs, count)
  if renormalize:
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
  return Routing(experts, weights)


def _block_size(num_tokens: int, per_token: int, num_experts: int) -> int:
  """Rows per block: the mean share of an expert, rounded up."""
  steps = -(-num_tokens * per_token // (num_experts * _BLOCK_STEP))
  return min(num_tokens, steps * _BLOCK_STEP, _MAX_BLOCK)


def _apply(
  expert: Expert,
  block: int,
  weights: Sequence[Any],
  x: jax.Array,
  counts: jax.Array,
) -> jax.Array:
  """Applies each expert to its own of the rows `x [P + block, width]`.

  Rows are sorted by expert, `counts [E]` of each, then padding. A last block
  extends into the rows of the next expert; that expert overwrites them later.
  """
  out = jnp.zeros(x.shape, jnp.float32)
  starts = jnp.cumsum(counts) - counts
  for expert_weights, begin, count in zip(weights, starts, counts, strict=True):

    def compute(
      index: jax.Array,
      out: jax.Array,
      expert_weights: Any = expert_weights,
      begin: jax.Array = begin,
    ) -> jax.Array:
      start = begin + index * block
      result = expert(expert_weights, lax.dynamic_slice_in_dim(x, start, block))
      return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    out = lax.fori_loop(0, (count + block - 1) // block, compute, out)
  return out


def mix(
  expert: Expert,
  weights: Sequence[Any],
  x: jax.Array,
  routing: Routing,
) -> jax.Array:
  """Weighted sum of the outputs of each token's experts.

  The terms of a token are added in the order of its own choices, so its sum
  does not depend on the other tokens; nor on their number, with the kernels.

  Args:
    expert: the function that all experts compute.
    weights: weights of each of the E experts.
    x: `[T, width]` float32.
    routing: routing of the T tokens.

  Returns:
    `[T, width]` float32.
  """
  num_tokens, per_token = routing.experts.shape
  chosen = routing.experts.reshape(-1)
  order = jnp.argsort(chosen, stable=True)
  block = _block_size(num_tokens, per_token, len(weights))
  rows = jnp.pad(x[order // per_token], ((0, block), (0, 0)))
  is_chosen = chosen[:, None] == jnp.arange(len(weights))[None]
  counts = jnp.sum(is_chosen, axis=0, dtype=jnp.int32)
  out = _apply(expert, block, tuple(weights), rows, counts)
  back = jnp.argsort(order).reshape(num_tokens, per_token)
  return weighted_sum(out, back, routing.weights)


def weighted_sum(
  rows: jax.Array, index: jax.Array, weights: jax.Array
) -> jax.Array:
  """Weighted sums `[T, width]` of rows, see `ops.sum_rows`."""
  if contraction.backend().kernels:
    return ops.sum_rows(rows, index, weights)
  return jnp.sum(rows[index] * weights[..., None], axis=1)


def _swiglu(
  activation: str,
  weights: Iterable[tuple[matrices_lib.Weight, jax.Array | None]],
  x: jax.Array,
) -> jax.Array:
  gate, up, down = weights
  inner = layers.project(x, [gate, up], activation=activation, gated=True)
  return layers.project(inner, [down])


class Experts(nnx.Module):
  """Router and experts of one block."""

  def __init__(self, config: MixtralConfig, **new: Unpack[layers.New]):
    self.config = config
    width, count = config.width, config.num_experts
    make = functools.partial(layers.Linear, width, **new)
    self.gate = make(count, use_bias=config.mlp_bias)
    self.experts = nnx.List(
      [nn_llama.FeedForward(config, **new) for _ in range(count)]
    )
    if config.shared_width:
      shape = dataclasses.replace(config, inner_width=config.shared_width)
      self.shared_expert = nn_llama.FeedForward(shape, **new)
      if config.shared_gate:
        self.shared_expert_gate = make(1, use_bias=False)

  def __call__(
    self, x: jax.Array, norm: layers.Norm | None, residual: jax.Array | None
  ) -> jax.Array:
    rows = norm(x) if norm else x
    routing = route(
      self.gate(rows),
      self.config.experts_per_token,
      renormalize=self.config.renormalize,
    )
    # The last biases are added once, not by each device.
    weights = [
      (
        expert.gate_proj.parameters,
        expert.up_proj.parameters,
        (expert.down_proj.weight.get_value(), None),
      )
      for expert in self.experts
    ]
    activation = 'clamped_swiglu' if self.config.clamped else None
    expert = functools.partial(
      _swiglu, activation or self.experts[0].activation
    )
    flat = lambda array: array.reshape(-1, array.shape[-1])
    out = sharding_lib.sum_of_experts(
      functools.partial(mix, expert),
      weights,
      self.config.of_layers('inner_width')[0],
      flat(rows),
      jax.tree.map(flat, routing),
    )
    biases = [expert.down_proj.parameters[1] for expert in self.experts]
    if biases := [bias for bias in biases if bias is not None]:
      rows_of = jnp.stack(biases).astype(jnp.float32)
      chosen = map(flat, (routing.experts, routing.weights))
      out += weighted_sum(rows_of, *chosen)
    out = out.reshape(x.shape)
    if self.config.shared_width:
      shared = self.shared_expert(rows, None, None)
      if self.config.shared_gate:
        shared *= jax.nn.sigmoid(self.shared_expert_gate(rows))
      out += shared
    return out if residual is None else residual + out


class Mixtral(nn_llama.Llama):
  """Mixtral language model; see `llama.Llama`."""

  config: MixtralConfig
  feed_forward = Experts
