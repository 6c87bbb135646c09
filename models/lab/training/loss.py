"""Losses: the next token, or the distribution of a teacher."""

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec import mappings
from specdec import model as model_lib
from specdec.models.lab.training import corpus as corpus_lib
from specdec.models.nn import adapter


def _logits(graph, params, tokens: jax.Array) -> jax.Array:
  """Causal logits."""
  batch_size, length = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
  causal = jnp.tril(jnp.ones((length, length), bool))
  mask = jnp.broadcast_to(causal[None], (batch_size, length, length))
  return nnx.merge(graph, params)(tokens, positions, mask)[0]


def cast(params: Any, dtype: jnp.dtype) -> Any:
  """Parameters with their matrices in a dtype of floats."""
  is_matrix = lambda leaf: (
    leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.floating)
  )
  return jax.tree.map(
    lambda leaf: leaf.astype(dtype) if is_matrix(leaf) else leaf, params
  )


def make_loss(
  graph: nnx.GraphDef,
  *,
  dtype: jnp.dtype,
  teacher: adapter.Module | None = None,
) -> jax.tree_util.Partial:
  """Makes `(params, windows) -> (nats per token, ())`.

  Without a teacher it is the cross-entropy with the next token, with a teacher
  the cross-entropy with its next-token distribution, which has the gradient of
  the forward Kullback-Leibler divergence (DistillSpec, Zhou et al. 2023,
  arXiv 2310.08461, section 4).

  Args:
    graph: the graph of the module that `params` belong to.
    dtype: of the matrices, during the forward and backward pass.
    teacher: the model whose distribution is learned, if any.

  Returns:
    A function of float32 params and `[B, L + 1]` int32 windows. It is a pytree
    of the teacher's weights, so a compiled program that gets it as an argument
    does not have them as constants.
  """
  teacher_graph, teacher_params = None, None
  if teacher is not None:
    teacher_graph, teacher_variables = nnx.split(teacher)
    teacher_params = cast(nnx.to_pure_dict(teacher_variables), dtype)
  function = _loss_function(graph, teacher_graph, dtype)
  return jax.tree_util.Partial(function, teacher_params)


@functools.cache  # Equal losses share their compiled programs.
def _loss_function(graph, teacher_graph, dtype):
  def loss(teacher_params, params, windows):
    tokens, targets = windows[:, :-1], windows[:, 1:]
    logits = _logits(graph, cast(params, dtype), tokens)
    if teacher_graph is None:
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    else:
      theirs = _logits(teacher_graph, teacher_params, tokens)
      losses = optax.softmax_cross_entropy(logits, jax.nn.softmax(theirs))
    return losses.mean(), ()

  return loss


@mappings.jit()
def _mean_loss(model: model_lib.LanguageModel, windows: jax.Array) -> jax.Array:
  """The loss of `[B, L + 1]` int32 windows, `[]` float32."""
  logits = model.logits(windows[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, windows[:, 1:]
  ).mean()


def held_out_loss(
  model: model_lib.LanguageModel, tokens: np.ndarray, *, length: int
) -> float:
  """Mean loss over consecutive windows, in nats per token.

  The forwards have the dtypes and kernels of decoding. `tokens` are `[tokens]`
  int32, see `Corpus.tokens`. Windows have `length` tokens. The logits of a
  batch of windows take at most 2 GiB. The first windows fill up the last batch,
  so they count twice.

  Raises:
    ValueError: a window is longer than the context or than the tokens.
  """
  context = model.spec.max_positions
  if not 1 <= length <= context:
    raise ValueError(
      f'windows must have between 1 and {context} tokens, the context of the'
      f' model; got {length}'
    )
  batch_tokens = min(8192, 2**29 // model.spec.vocab_size)
  batches = corpus_lib.held_out_batches(
    tokens,
    batch_size=max(1, batch_tokens // length),
    length=length,
    limit=len(tokens),
  )
  return float(np.mean([_mean_loss(model, batch) for batch in batches]))
