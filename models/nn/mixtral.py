"""Mixtral and its relatives: Llamas with experts for feed-forward layers.

One module for Mixtral (arXiv 2401.04088) and Qwen 3's mixtures. A forward
computes only the experts that its tokens were routed to; `models.experts` has
how, `models.expert_counts` how many that are.
"""

import dataclasses
import functools

from flax import nnx
import jax

from models.nn.experts import mix
from models.nn.experts import route
from models.nn.experts import Routing
from models.nn.layers import Linear
from models.nn.llama import Block
from models.nn.llama import FeedForward
from models.nn.llama import Llama
from models.nn.llama import LlamaConfig
from models.nn.matmul import matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
  """The shape of a Mixtral: a Llama's, and its experts.

  Attributes:
    num_experts: E, in every layer.
    experts_per_token: k.
    renormalize: whether the weights of the k add up to one.
  """

  num_experts: int
  experts_per_token: int
  renormalize: bool = True

  def __post_init__(self):
    super().__post_init__()
    if not 1 <= self.experts_per_token <= self.num_experts:
      raise ValueError(
        'experts_per_token must lie between 1 and'
        f' num_experts={self.num_experts}, got {self.experts_per_token}'
      )
    if self.mlp_bias:
      raise ValueError('mlp_bias=True: experts have no biases')


def _swiglu(activation, weights, x):
  gate, up, down = weights
  return matmul(activation(matmul(x, gate)) * matmul(x, up), down)


class Experts(nnx.Module):
  """The router and the experts of one block."""

  def __init__(self, config: MixtralConfig, *, dtype, rngs):
    self.config = config
    self.gate = Linear(
      config.width,
      config.num_experts,
      stddev=0.02,
      dtype=dtype,
      rngs=rngs,
      use_bias=False,
    )
    self.experts = nnx.List(
      [
        FeedForward(config, dtype=dtype, rngs=rngs)
        for _ in range(config.num_experts)
      ]
    )

  def routed(self, x: jax.Array) -> tuple[jax.Array, Routing]:
    """The sum `[B, L, width]` of what the experts make of `x`, and who did."""
    routing = route(
      self.gate(x),
      self.config.experts_per_token,
      renormalize=self.config.renormalize,
    )
    weights = [
      tuple(
        layer.weight.get_value()
        for layer in (expert.gate_proj, expert.up_proj, expert.down_proj)
      )
      for expert in self.experts
    ]
    flat = lambda array: array.reshape(-1, array.shape[-1])
    expert = functools.partial(_swiglu, self.experts[0].activation)
    out = mix(expert, weights, flat(x), jax.tree.map(flat, routing))
    return out.reshape(x.shape), routing

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.routed(x)[0]


class MixtureBlock(Block):
  """A transformer block with experts."""

  def make_mlp(self, config, *, dtype, rngs) -> Experts:
    """The experts."""
    return Experts(config, dtype=dtype, rngs=rngs)

  def routed(self, x, rotation, mask, cache):
    """The block, and where its tokens went."""
    x, cache = self.attend(x, rotation, mask, cache)
    mixed, routing = self.mlp.routed(self.post_attention_layernorm(x))
    return x + mixed, cache, routing


class Mixtral(Llama):
  """A Mixtral language model; see `models.llama.Llama`."""

  config: MixtralConfig
  block = MixtureBlock

  def with_routing(self, tokens, positions, mask, cache=None):
    """One forward, and the `Routing` of each layer, of shapes `[B, L, ...]`."""
    x, rotation = self.embed(tokens, positions)
    routings = []
    for layer, block in enumerate(self.layers):
      with jax.named_scope(f'layer_{layer}'):
        x, cache, routing = block.routed(x, rotation, mask, cache)
      routings.append(routing)
    return self.head(x), cache, tuple(routings)
