"""Gemma: shapes of Gemma 1, 2 and 3 (text), and the module of Gemma 4 (text).

`models/nn/llama` computes the first three, and most of the fourth: its layers
differ in the widths of heads and MLPs, and the last ones read keys and values
of others. This file adds the embeddings per layer
(github.com/huggingface/transformers, models/gemma4).
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import ClassVar
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(nn_llama.LlamaConfig):
  """Shape of a Gemma (arXiv 2503.19786, section 2).

  A class of its own, because checkpoints store the scales of norms minus one.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    self._set('embedding_scale', math.sqrt(self.width))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
  """Shape of a Gemma 4. Its checkpoints store the scales of norms."""

  looked_up: ClassVar[str | None] = 'embed_tokens_per_layer'

  layer_width: int = 0  # The width of the embeddings per layer; 0: none.

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.layer_width < 0:
      raise ValueError(f'layer_width must not be below 0: {self.layer_width}')


class Layer(nn_llama.Layer):
  """A block that ends with its own embedding of the token, and with a factor.

  The stream opens a gate for the embedding; the projection of the embedding is
  added to the stream.
  """

  def __init__(
    self,
    config: Gemma4Config,
    *args: Any,
    mixers: Mapping[str, Any],
    **new: Unpack[layers.New],
  ):
    super().__init__(config, *args, mixers=mixers, **new)
    self.layer_scalar = nnx.Param(jnp.ones(1, jnp.float32))
    if config.layer_width:
      make = functools.partial(layers.Linear, use_bias=False, **new)
      self.per_layer_input_gate = make(config.width, config.layer_width)
      self.per_layer_projection = make(config.layer_width, config.width)
      self.post_per_layer_input_norm = layers.RMSNorm(
        config.width, config.norm_epsilon
      )

  def __call__(
    self, x: jax.Array, *args: Any, embedded: jax.Array | None = None
  ) -> tuple[jax.Array, Any]:
    """As the block of a Llama; `embedded` is `[B, L, layer_width]` float32."""
    x, cache = super().__call__(x, *args)
    if embedded is not None:
      activation = self.config.activation
      gate = self.per_layer_input_gate(x, activation=activation)
      out = self.per_layer_projection(gate * embedded)
      x += self.post_per_layer_input_norm(out)
    return x * self.layer_scalar[...][None, None], cache


class Gemma4(nn_llama.Llama):
  """Gemma 4 language model."""

  config: Gemma4Config
  layer = Layer

  def __init__(
    self,
    config: Gemma4Config,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(config, dtype=dtype, rngs=rngs)
    if not config.layer_width:
      return
    width = config.num_layers * config.layer_width
    self.embed_tokens_per_layer = nnx.Embed(
      config.vocab_size,
      width,
      embedding_init=jax.nn.initializers.normal(0.02),
      param_dtype=dtype,
      rngs=rngs,
    )
    self.per_layer_model_projection = layers.Linear(
      config.width, width, dtype=dtype, rngs=rngs, use_bias=False
    )
    self.per_layer_projection_norm = layers.RMSNorm(
      config.layer_width, config.norm_epsilon
    )

  def layer_inputs(
    self, tokens: jax.Array, x: jax.Array
  ) -> Sequence[dict[str, jax.Array]]:
    config = self.config
    if not config.layer_width:
      return super().layer_inputs(tokens, x)
    table = self.embed_tokens_per_layer.embedding.get_value()
    of_tokens = matrices_lib.take_rows(table, tokens)
    of_tokens *= math.sqrt(config.layer_width)
    of_stream = self.per_layer_model_projection(x) / math.sqrt(config.width)
    split = lambda rows: rows.reshape(
      *rows.shape[:2], config.num_layers, config.layer_width
    )
    of_stream = self.per_layer_projection_norm(split(of_stream))
    embedded = (split(of_tokens) + of_stream) / math.sqrt(2)
    return [
      {'embedded': embedded[:, :, layer]} for layer in range(config.num_layers)
    ]
