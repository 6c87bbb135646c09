"""Training of a block drafter for a target on its own states and answers.

Every window of text has some *anchors*, each of which is the root of a block.
All blocks of a window are one forward. With blocks of 3 rows at the anchors 1
and 3, for the positions 1 2 3 and 3 4 5, a row sees

    keys of     text: 0 1 2 3 4 5      block of 1: 1 2 3    of 3: 3 4 5
    rows of 1         x . . . . .                  x x x          . . .
    rows of 3         x x x . . .                  . . .          x x x

The drafter learns the target's distribution after the true tokens, so that its
Markov term learns what the token before says.
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

from specdec import cache as cache_lib
from specdec.models.checkpoints.heads import block_drafters
from specdec.models.lab.training import loss as loss_lib
from specdec.models.lab.training import target_trainer
from specdec.models.nn import adapter
from specdec.models.nn import block_drafter
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.text import fields

# The weight of a token falls by e over this number of positions of a block.
_GAMMA = 4.0
# The weights of cross entropy, total variation and confidence (arXiv
# 2607.05147).
_CROSS_ENTROPY, _VARIATION, _CONFIDENCE = 0.1, 0.9, 1.0


def _masks(anchors: jax.Array, length: int, size: int) -> jax.Array:
  """`[B, N R, L + N R]` bool, see the top of the file; `anchors [B, N]`."""
  batch_size, num_anchors = anchors.shape
  roots = jnp.repeat(anchors, size, axis=1)[:, :, None]
  text = jnp.arange(length)[None, None] < roots
  block = np.repeat(np.arange(num_anchors), size)
  same = jnp.asarray(block[:, None] == block[None])[None]
  same = jnp.broadcast_to(same, (batch_size, *same.shape[1:]))
  return jnp.concatenate([text, same], axis=2)


def _anchors(
  draw: jax.Array, batch_size: int, num_anchors: int, first: int, last: int
) -> jax.Array:
  """`[B, N]`, at most N anchors of each window, from `first` to `last`."""
  keys = jax.random.split(jax.random.key(draw), batch_size)
  permute = lambda key: jax.random.permutation(key, last + 1 - first)
  return first + jax.vmap(permute)(keys)[:, :num_anchors]


def _judge(
  module: block_drafter.BlockDrafter,
  states: jax.Array,
  parents: jax.Array,
  wanted: jax.Array,
  lm_head: Any,
  ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """The loss of tokens, and which would be drafted first, `[B, W]` each.

  They follow `parents [B, W]`. The output matrix multiplies `states [B, W, H]`
  of the drafter, and `wanted [B, W, H]` of the target.
  """
  logits = nn_llama.scores(module.config, states, lm_head)
  if module.config.markov:
    head = module.markov_head
    matrix = head.markov_w2.weight.get_value()
    logits += matrices_lib.matmul(head.context(states, parents), matrix)
  probs = jax.nn.softmax(matrices_lib.matmul(wanted, lm_head))
  drafted = jax.nn.softmax(logits)
  variation = 0.5 * jnp.sum(jnp.abs(drafted - probs), axis=-1)
  loss = _CROSS_ENTROPY * optax.softmax_cross_entropy(logits, probs)
  loss += 2 * _VARIATION * variation
  if module.config.confidence:
    accepted = jax.lax.stop_gradient(1.0 - variation)
    confidence = module.confidence(states, parents)
    rated = optax.sigmoid_binary_cross_entropy(confidence, accepted)
    loss += _CONFIDENCE * rated
  best = jnp.argmax(logits, axis=-1)
  return loss, best if ids is None else jnp.asarray(ids, jnp.int32)[best]


@functools.cache  # Equal losses share their compiled programs.
def loss_function(
  graph: nnx.GraphDef,
  config: block_drafter.BlockDrafterConfig,
  first: int,
  num_anchors: int,
  dtype: str,
) -> target_trainer.LossFunction:
  """Makes the loss of a batch, for `TargetTraining.begin`.

  Args:
    graph: of the module.
    config: its shape.
    first: the first position of a window that may be an anchor.
    num_anchors: N, of a window, or fewer where it has no room for N.
    dtype: of the matrices.

  Returns:
    The function. `accepted [D]` is how often the token that would be drafted
    first at each position, after the true tokens, is the target's.
  """
  size, depth = config.block_size, config.depth
  weights = np.exp(-np.arange(depth) / _GAMMA)

  def loss(frozen, params, batch):
    embedding, lm_head, ids = frozen
    module = nnx.merge(graph, loss_lib.cast(params, jnp.dtype(dtype)))
    tokens = jnp.asarray(batch['tokens'])
    batch_size, length = tokens.shape
    at = jax.vmap(lambda row, index: row[index])
    # The tokens that a block drafts are in the window.
    last = length - 1 - depth
    anchors = _anchors(batch['draw'], batch_size, num_anchors, first, last)
    cache = target_trainer.growing_cache(config, batch_size, dtype)
    positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
    states = jnp.split(batch['states'], len(config.reads), axis=-1)
    cache = module.read(states, positions, cache)
    cache = cache_lib.advance(cache, jnp.full(batch_size, length))
    blocks = anchors[:, :, None] + jnp.arange(size)[None, None]
    is_root = (jnp.arange(size) == 0)[None, None]
    fed = jnp.where(is_root, at(tokens, anchors)[:, :, None], config.mask_token)
    states, _ = module(
      matrices_lib.take_rows(embedding, fed.reshape(batch_size, -1)),
      blocks.reshape(batch_size, -1),
      _masks(anchors, length, size),
      cache,
    )
    states = states.reshape(*anchors.shape, depth, -1)
    losses, accepted = [], []
    for place in range(depth):
      before = anchors + place
      loss_at, drafted = _judge(
        module,
        states[:, :, place],
        at(tokens, before),
        at(batch['normed'], before).astype(jnp.float32),
        lm_head,
        ids,
      )
      losses.append(loss_at.mean())
      accepted.append(jnp.mean(drafted == at(batch['choice'], before)))
    weighted = jnp.sum(jnp.stack(losses) * weights) / weights.sum()
    return weighted, jnp.stack(accepted)

  return loss


def _default_reads(num_layers: int) -> tuple[int, ...]:
  """Three hidden states of a target, without the state after its last layer.

  Some mean by that the state before the final norm, others the state after it.
  """
  last = num_layers - 1
  return tuple(
    sorted({*np.linspace(min(1, last), last, 3).round().astype(int).tolist()})
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTraining(target_trainer.TargetTraining):
  """Settings of the training of a block drafter.

  The R rows of a DSpark drafter draft R tokens, which it rates; those of a
  DFlash drafter draft R - 1.
  """

  answer_tokens: int = fields.described(192, target_trainer.ANSWER_TOKENS)
  block_size: int = fields.described(8, 'rows of a block')
  num_layers: int = fields.described(2, 'number of layers', flag='layers')
  markov_rank: int = fields.described(
    256,
    'the rank of the term for the token before, which makes it a DSpark'
    ' drafter; 0: none, a DFlash drafter',
  )
  num_anchors: int = fields.described(
    64, 'blocks that a window is cut into', flag='anchors'
  )

  def config(self, target: adapter.Config) -> block_drafter.BlockDrafterConfig:
    has_term = self.markov_rank > 0
    config = block_drafter.BlockDrafterConfig(
      **self.of_layers(target),
      num_layers=self.num_layers,
      qk_norm=True,
      reads=_default_reads(target.num_layers),
      block_size=self.block_size,
      # Tokenizers leave the last rows of a vocabulary unused, if any.
      mask_token=target.vocab_size - 1,
      samples_root=has_term,
      markov=block_drafter.VANILLA if has_term else None,
      markov_rank=self.markov_rank,
      confidence=has_term,
      confidence_with_markov=has_term,
    )
    if self._first + config.depth > self.length:
      raise ValueError(
        f'--block_size={self.block_size} does not fit after the prompt in a'
        f' window, --context={self.length}'
      )
    return config

  @property
  def _first(self) -> int:
    """The first anchor of a window: the last token of its prompt."""
    return self.length - self.answer_tokens if self.answer_tokens else 1

  def begin(
    self,
    config: block_drafter.BlockDrafterConfig,
    lesson: target_trainer.Lesson,
    lm_head: jax.Array,
    ids: np.ndarray | None,
  ) -> tuple[Any, target_trainer.LossFunction, Callable[..., None]]:
    module = block_drafter.BlockDrafter(
      config, self.vocabulary, rngs=nnx.Rngs(self.seed)
    )
    graph, variables = nnx.split(module)
    function = loss_function(
      graph, config, self._first, self.num_anchors, self.dtype
    )

    def save(params: Any, folder: pathlib.Path, dtype: str) -> None:
      module = nnx.merge(graph, params)
      block_drafters.save(
        module,
        folder,
        num_target_layers=lesson.num_layers,
        lm_head=None if ids is None else lm_head,
        ids=ids,
        dtype=dtype,
      )

    return nnx.to_pure_dict(variables), function, save
