"""Held-out loss of a finished model."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.family import Module
from models.training import corpus
from models.training.loss import make_loss


def held_out_loss(
  module: Module, tokens: np.ndarray, *, length: int, batch_tokens: int = 8192
) -> float:
  """The mean loss over consecutive windows, in float32.

  Args:
    module: whose loss it is.
    tokens: `[tokens]` int32, see `Corpus.tokens`.
    length: of a window, in tokens; at most the context of the model.
    batch_tokens: evaluated at once.

  Returns:
    Nats per token.

  Raises:
    ValueError: a window is longer than the context or than the tokens.
  """
  context = module.config.num_positions
  if not 1 <= length <= context:
    raise ValueError(
      f'windows must have between 1 and {context} tokens, the context of the'
      f' model; got {length}'
    )
  graph, variables = nnx.split(module)
  params = nnx.to_pure_dict(variables)
  loss = jax.jit(make_loss(graph, dtype=jnp.dtype(jnp.float32)))
  batches = corpus.held_out_batches(
    tokens,
    batch_size=max(1, batch_tokens // length),
    length=length,
    limit=len(tokens),
  )
  return float(np.mean([loss(params, batch) for batch in batches]))
