"""Mixtral and related models: Llamas with experts as feed-forward layers.

One module serves Mixtral (arXiv 2401.04088), gpt-oss, Qwen's mixtures and
Granite's. A forward computes only the experts that its tokens are routed to
(`models/nn/experts`).
"""

from collections.abc import Iterable
import dataclasses
import functools
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from specdec.models.nn import experts as experts_lib
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib


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
    kernels = self.gate.is_packed
    rows = layers.normalize(x, norm, kernels=kernels)
    routing = experts_lib.route(
      self.gate(rows),
      self.config.experts_per_token,
      renormalize=self.config.renormalize,
      kernels=kernels,
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
      functools.partial(experts_lib.mix, expert, kernels=kernels),
      weights,
      self.config.of_layers('inner_width')[0],
      flat(rows),
      jax.tree.map(flat, routing),
    )
    biases = [expert.down_proj.parameters[1] for expert in self.experts]
    if biases := [bias for bias in biases if bias is not None]:
      rows_of = jnp.stack(biases).astype(jnp.float32)
      chosen = map(flat, (routing.experts, routing.weights))
      out += experts_lib.weighted_sum(rows_of, *chosen, kernels=kernels)
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
