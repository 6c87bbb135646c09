"""Training of an EAGLE-3 head for a target on its own states.

In step 0 the head reads the target's states, as of text. In step s it reads the
states that it gave in step s - 1 one token before, as of the s-th token below a
root (arXiv 2503.01840, section 3.2). With 4 tokens, a query of step 1 sees

    keys of     step 0: 0 1 2 3      step 1: 0 1 2 3
    query 1             x . . .              . x . .
    query 2             x x . .              . . x .
    query 3             x x x .              . . . x

Every step predicts the target's distribution after the same tokens.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec.models.checkpoints.heads import heads
from specdec.models.lab.training import loss as loss_lib
from specdec.models.lab.training import target_trainer
from specdec.models.nn import adapter
from specdec.models.nn import eagle
from specdec.models.nn import matrices as matrices_lib
from specdec.models.text import fields

# The weight of the loss of a step, over the weight of the step before.
_DECAY = 0.8


def _mask(length: int, step: int) -> np.ndarray:
  """`[L, (step + 1) L]` bool, see the top of the file."""
  query, key = np.arange(length)[:, None], np.arange(length)[None]
  blocks = [key == query - step + block for block in range(1, step + 1)]
  return np.concatenate([key <= query - step, *blocks], axis=1)


def _judge(
  logits: jax.Array,
  wanted: jax.Array,
  choices: jax.Array,
  ids: jax.Array | None,
  step: int,
) -> tuple[jax.Array, jax.Array]:
  """The loss of a step, and the fraction of tokens that are accepted."""
  rows = jnp.arange(logits.shape[1])[None] >= step  # The others lack a root.
  number = logits.shape[0] * max(logits.shape[1] - step, 1)
  mean = lambda values: jnp.sum(jnp.where(rows, values, 0)) / number
  best = jnp.argmax(logits, axis=-1)
  best = best if ids is None else jnp.asarray(ids, jnp.int32)[best]
  losses = optax.softmax_cross_entropy(logits, wanted)
  return mean(losses), mean(best == choices)


@functools.cache  # Equal losses share their compiled programs.
def loss_function(
  graph: nnx.GraphDef, config: eagle.HeadConfig, num_steps: int, dtype: str
) -> target_trainer.LossFunction:
  """Makes the loss of a batch, for `TargetTraining.begin`.

  Args:
    graph: of the module.
    config: its shape.
    num_steps: S, of training-time test.
    dtype: of the matrices.

  Returns:
    The function; `lm_head` is among its params if the head has one of its own.
    The loss is in nats per token, the mean over steps that count less and less.
    `accepted [S]` is how often the head's most likely token is the target's.
  """

  def loss(frozen, params, batch):
    embedding, lm_head, ids = frozen
    params = loss_lib.cast(params, jnp.dtype(dtype))
    params = dict(params)
    matrix = params.pop('lm_head', lm_head)
    module = nnx.merge(graph, params)
    tokens = jnp.asarray(batch['tokens'])[:, 1:]
    batch_size, length = tokens.shape
    embedded = matrices_lib.take_rows(embedding, tokens)
    widths = np.cumsum([config.target_width] * len(config.reads))[:-1]
    states = module.fuse(*jnp.split(batch['states'][:, :-1], widths, axis=-1))
    positions = jnp.broadcast_to(jnp.arange(1, length + 1)[None], tokens.shape)
    wanted = jax.nn.softmax(
      matrices_lib.matmul(batch['normed'][:, 1:], lm_head)
    )
    cache = target_trainer.growing_cache(config, batch_size, dtype)
    losses, accepted = [], []
    for step in range(num_steps):
      mask = jnp.asarray(_mask(length, step))[None]
      mask = jnp.broadcast_to(mask, (batch_size, *mask.shape[1:]))
      states, cache = module(embedded, positions, mask, cache, states)
      logits = matrices_lib.matmul(module.output(states), matrix)
      judged = jax.checkpoint(_judge, static_argnums=4)(
        logits, wanted, batch['choice'][:, 1:], ids, step
      )
      losses.append(judged[0])
      accepted.append(judged[1])
      states = jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    weights = _DECAY ** np.arange(num_steps)
    pairs = zip(weights, losses, strict=True)
    total = sum(weight * loss for weight, loss in pairs)
    return total / weights.sum(), jnp.stack(accepted)

  return loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTraining(target_trainer.TargetTraining):
  """Settings of the training of a head."""

  depth: int = fields.described(
    4,
    'how many tokens ahead it learns to draft from its own states',
    flag='head_depth',
  )

  def config(self, target: adapter.Config) -> eagle.HeadConfig:
    return eagle.HeadConfig(
      **self.of_layers(target),
      num_layers=1,
      reads=heads.default_reads(target.num_layers),
    )

  def begin(
    self,
    config: eagle.HeadConfig,
    lesson: target_trainer.Lesson,
    lm_head: jax.Array,
    ids: np.ndarray | None,
  ) -> tuple[Any, target_trainer.LossFunction, Callable[..., None]]:
    graph, variables = nnx.split(eagle.Head(config, rngs=nnx.Rngs(self.seed)))
    params = nnx.to_pure_dict(variables)
    # The output matrix is made for states that the target has normalised.
    norm = lesson.target.params.get('norm') or lesson.target.params['ln_f']
    params['norm']['scale'] = jnp.asarray(norm['scale'])
    if ids is not None:
      params['lm_head'] = lm_head  # To begin with.
    function = loss_function(graph, config, self.depth, self.dtype)

    def save(params: Any, folder: pathlib.Path, dtype: str) -> None:
      params = dict(params)
      matrix = params.pop('lm_head', None)
      module = nnx.merge(graph, params)
      heads.save(module, folder, lm_head=matrix, ids=ids, dtype=dtype)

    return params, function, save
