"""What the models here learn: the next token, or a teacher's distribution."""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A trained model whose distribution a draft is to imitate.

  Attributes:
    name: where it came from, for the record of the run.
    model: any module with the call signature of `models.gpt2.GPT2`.
  """

  name: str
  model: nnx.Module


def _logits(graph, params, tokens: jax.Array) -> jax.Array:
  batch_size, length = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
  causal = jnp.tril(jnp.ones((length, length), bool))
  mask = jnp.broadcast_to(causal[None], (batch_size, length, length))
  return nnx.merge(graph, params)(tokens, positions, mask)[0]


def make_loss(
  graph: nnx.GraphDef, *, dtype: jnp.dtype, teacher: Teacher | None = None
) -> Callable[[Any, jax.Array], jax.Array]:
  """Makes `loss(params, windows) -> nats per token`.

  Without a teacher: cross-entropy with the next token. With one: the
  cross-entropy with the teacher's next-token distribution, which has the
  gradient of the forward Kullback-Leibler divergence (DistillSpec, Zhou et al.
  2023, arXiv 2310.08461, section 4).

  Args:
    graph: of the module that `params` belong to.
    dtype: of the matrices during the forward and backward pass.
    teacher: see above.

  Returns:
    A function of float32 params and `[B, L + 1]` int32 windows.
  """

  def cast(params):
    is_matrix = lambda leaf: leaf.ndim == 2 and leaf.dtype != jnp.int8
    return jax.tree.map(
      lambda leaf: leaf.astype(dtype) if is_matrix(leaf) else leaf, params
    )

  if teacher is not None:
    teacher_graph, teacher_variables = nnx.split(teacher.model)
    teacher_params = cast(nnx.to_pure_dict(teacher_variables))

  def loss(params, windows):
    tokens, targets = windows[:, :-1], windows[:, 1:]
    logits = _logits(graph, cast(params), tokens)
    if teacher is None:
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    else:
      wanted = jax.nn.softmax(_logits(teacher_graph, teacher_params, tokens))
      losses = optax.softmax_cross_entropy(logits, wanted)
    return losses.mean()

  return loss
