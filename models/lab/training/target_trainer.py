"""Training of drafters that learn from the hidden states of a target.

What the target writes and computes is kept on disk, states in 16 bits. Files
have some dozens of windows each, so that a killed run continues with the next
file, and a damaged file costs no more than its own windows.
"""

import abc
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import tqdm

import specdec
from specdec import cache as cache_lib
from specdec import model as model_lib
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import heads
from specdec.models.lab.training import kept
from specdec.models.lab.training import trainer
from specdec.models.nn import adapter
from specdec.models.nn import dtypes
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import rope as rope_lib
from specdec.models.nn.cpu import build
from specdec.models.text import fields
from specdec.models.text import plan as plan_lib

_WINDOWS = 32  # In a file.
_ROWS = 128  # Rows of logits at once.
_LARGEST = 65504.0  # In float16; a few values of the states may be larger.
ANSWER_TOKENS = 'the last tokens of --context, which the target writes itself'

LossFunction = Callable[[Any, Any, dict[str, Any]], tuple[jax.Array, jax.Array]]
"""From what is not trained, params and a batch of `Features` to a loss.

The first are the embedding `[V, H]`, and `lm_head` and `ids` of `begin`; params
are float32, by their names in a module. The results are as of
`trainer.Trainee.loss`.
"""


def token_dtype(num_states: int, width: int) -> np.dtype:
  """The record that is kept for each token that a target reads.

  `states` are the hidden states that the drafter reads, joined; `normed` is the
  state after the final norm, and `choice` the most likely next token.
  """
  return np.dtype(
    [
      ('states', np.float16, (num_states * width,)),
      ('normed', np.float16, (width,)),
      ('choice', np.int32),
    ]
  )


def windows(tokens: np.ndarray, length: int, most: int) -> np.ndarray:
  """At most `most` windows `[n, length + 1]`, from all of the corpus.

  Raises:
    ValueError: the tokens are fewer than a window.
  """
  num_windows = min((len(tokens) - 1) // length, most)
  if num_windows < 1:
    raise ValueError(
      f'there are {len(tokens)} tokens, and room for {most} windows; a window'
      f' has {length + 1} tokens'
    )
  last = len(tokens) - length - 1
  starts = np.linspace(0, last, num_windows).astype(np.int64)
  return np.asarray(tokens)[starts[:, None] + np.arange(length + 1)]


@dataclasses.dataclass(frozen=True)
class Features:
  """Windows of text with what the target computes.

  A batch has `tokens` `[B, L + 1]` int32, the fields of `token_dtype`, and
  `draw`, a seed of what is drawn for it.

  Attributes:
    tokens: `[N, L + 1]` int32.
    files: arrays of `token_dtype` for `_WINDOWS` windows each.
  """

  tokens: np.ndarray
  files: Sequence[np.ndarray]

  def batch(self, index: np.ndarray, draw: int) -> dict[str, Any]:
    """The windows of these numbers."""
    rows = np.stack([self.files[at // _WINDOWS][at % _WINDOWS] for at in index])
    fields = {name: rows[name] for name in rows.dtype.names or ()}
    return {'tokens': self.tokens[index], 'draw': np.uint32(draw)} | fields

  def random_batch(self, step: int, size: int, seed: int) -> dict[str, Any]:
    """The batch of a step: windows in a new order for every epoch."""
    num_windows, index = len(self.tokens), []
    for place in range(step * size, (step + 1) * size):
      epoch, within = divmod(place, num_windows)
      order = np.random.default_rng([seed, epoch]).permutation(num_windows)
      index.append(order[within])
    return self.batch(np.array(index), step)

  def batches_of(self, size: int) -> Iterator[dict[str, Any]]:
    """All windows; the last batch is filled up with the first ones."""
    num_windows = len(self.tokens)
    rows = np.arange(-(-num_windows // size) * size) % num_windows
    for draw, index in enumerate(rows.reshape(-1, size)):
      yield self.batch(index, draw)


@functools.partial(jax.jit, static_argnames='reads')
def _compute(target, lm_head, tokens, reads):
  """The fields of `token_dtype`, each `[B, L, ...]`."""
  cache = target.spec.init_cache(*tokens.shape)
  _, cache = target.causal(tokens, cache)
  states = [cache.hidden[key][:, 0] for key in reads]
  normed = cache.hidden[cache_lib.AFTER_NORM][:, 0].astype(jnp.float32)
  rows = normed.reshape(-1, normed.shape[-1])
  padded = jnp.pad(rows, ((0, -len(rows) % _ROWS), (0, 0)))
  choose = lambda rows: jnp.argmax(matrices_lib.matmul(rows, lm_head), axis=-1)
  chosen = lax.map(choose, padded.reshape(-1, _ROWS, rows.shape[-1])).ravel()
  chosen = chosen[: len(rows)].reshape(tokens.shape).astype(jnp.int32)
  fields = jnp.concatenate(states, axis=-1).astype(jnp.float32), normed
  clipped = [jnp.clip(field, -_LARGEST, _LARGEST) for field in fields]
  return *(field.astype(jnp.float16) for field in clipped), chosen


@dataclasses.dataclass(frozen=True)
class Lesson:
  """A target, its embedding and output matrix, and what it computes.

  It keeps the states `reads` and the state after the norm (`KVCache.hidden`).
  """

  target: model_lib.LanguageModel
  embedding: Any
  lm_head: Any
  reads: tuple[int, ...]
  num_layers: int  # The number of layers of the target.

  def outputs(self, ids: np.ndarray | None) -> jax.Array:
    """Rows `[D, H]` float32 of the output matrix, of tokens; None: of all.

    There are no gradients of matrices that are packed for kernels.
    """
    rows = np.arange(self.target.spec.vocab_size) if ids is None else ids
    return matrices_lib.take_rows(self.lm_head, jnp.asarray(rows))

  def answers(
    self,
    tokens: np.ndarray,
    num_written: int,
    folder: pathlib.Path,
  ) -> np.ndarray:
    """Windows whose last tokens the target wrote; it writes missing ones.

    The temperatures of the rows of a file are spread from 0 to 1.

    Args:
      tokens: `[N, L + 1]` int32.
      num_written: how many tokens of each window it writes.
      folder: of the files.
    """
    temperature = np.linspace(0, 1, _WINDOWS, dtype=np.float32)

    def write(rows: np.ndarray) -> np.ndarray:
      shape = _WINDOWS, rows.shape[1] - num_written
      begun = np.resize(rows[:, :-num_written], shape)
      written = specdec.generate(
        self.target,
        jax.random.key(int(rows.sum())),  # The same in a resumed run.
        begun.tolist(),
        max_new_tokens=num_written,
        sampling=specdec.Sampling(temperature=temperature),
      )
      whole = np.concatenate([begun, np.array(written.tokens)], axis=1)
      return whole[: len(rows)].astype(np.int32)

    return np.concatenate(_in_files(tokens, write, folder))

  def features(
    self,
    tokens: np.ndarray,
    dtype: np.dtype,
    folder: pathlib.Path,
  ) -> Features:
    """Computes the features of windows, or those that are still missing.

    Args:
      tokens: `[N, L + 1]` int32.
      dtype: see `token_dtype`.
      folder: of the files.
    """
    size = min(max(1, 1024 // tokens.shape[1]), len(tokens))  # In a forward.

    def compute(rows: np.ndarray) -> np.ndarray:
      padded = np.resize(rows, (-(-len(rows) // size) * size, rows.shape[1]))
      features = np.empty(padded.shape, dtype)
      for first in range(0, len(padded), size):
        some = slice(first, first + size)
        fields = _compute(self.target, self.lm_head, padded[some], self.reads)
        for name, values in zip(dtype.names or (), fields, strict=True):
          features[name][some] = values
      return features[: len(rows)]

    return Features(tokens, _in_files(tokens, compute, folder))


def _in_files(
  tokens: np.ndarray,
  make: Callable[[np.ndarray], np.ndarray],
  folder: pathlib.Path,
) -> list[np.ndarray]:
  """The results of `make` for `_WINDOWS` windows at a time, kept in files."""
  files = []
  what = f'{folder.parent.name} for {folder.name}'
  for first in tqdm.tqdm(range(0, len(tokens), _WINDOWS), what):
    path = folder / f'windows_{first // _WINDOWS:05d}.npy'
    some = tokens[first : first + _WINDOWS]
    files.append(kept.array(path, functools.partial(make, some)))
  return files


def _joined(slots: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  del start
  return jnp.concatenate([slots, new], axis=2)


def growing_cache(
  config: nn_llama.LlamaConfig, batch_size: int, dtype: Any
) -> cache_lib.KVCache:
  """A cache to which a write appends, so that gradients pass through it."""
  cache = cache_lib.init_cache(
    batch_size,
    0,
    num_heads=config.num_kv_heads,
    head_widths=config.cache_widths,
    dtype=dtype,
  )
  return cache.replace(ops=cache_lib.SlotOps(write=_joined))


def _rotation(target: adapter.Config) -> rope_lib.Rope:
  """The rotation of a drafter: as in the target's last layer that rotates."""
  of_layers = getattr(target, 'of_layers', lambda field: ())
  ropes = of_layers('rope')
  rope = next((rope for rope in reversed(ropes) if rope), rope_lib.Rope())
  # No file of a head can say that queries grow, and it learns without it.
  return dataclasses.replace(rope, query_growth=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTraining(trainer.Training):
  """Settings of training that learns from a target.

  A kind of drafter is a subclass with two methods: `config` gives the shape of
  a drafter, a record with the hidden states that it `reads`; `begin` draws the
  weights.
  """

  target: str = fields.described(
    'demo', 'demo, a model folder, a GGUF file or a hub id'
  )
  target_dtype: str = fields.described(dtypes.AUTO, 'the dtype of the target')
  length: int = fields.described(
    256, 'tokens that it learns from at once, a window', flag='context'
  )
  answer_tokens: int = fields.described(0, ANSWER_TOKENS)
  num_heads: int | None = fields.described(
    None, 'attention heads; default: as the target', flag='heads'
  )
  num_kv_heads: int | None = fields.described(
    None,
    'heads of keys and values; default: as --heads, else as the target',
    flag='kv_heads',
  )
  inner_width: int | None = fields.described(
    None, 'width of the feed-forward layer; default: as the target'
  )
  vocabulary: int | None = fields.described(
    None,
    'tokens that it may draft, the most frequent ones, with an output matrix of'
    ' its own; default: all, with the matrix of the target',
    flag='head_vocabulary',
  )
  feature_gigabytes: float = fields.described(
    10.0, 'the most disk space in --workdir for what the target computes'
  )
  eval_windows: int = 64  # At most.
  eval_every: int = 50
  learning_rate: float = fields.described(
    2e-3, 'peak learning rate; decays to zero'
  )

  def __post_init__(self):
    if not 1 <= self.length <= self.batch_tokens:
      raise ValueError(
        f'--batch_tokens={self.batch_tokens} is less than a window,'
        f' --context={self.length}'
      )
    if self.answer_tokens >= self.length:
      raise ValueError(
        f'--answer_tokens={self.answer_tokens} leaves no prompt in a window,'
        f' --context={self.length}'
      )

  @abc.abstractmethod
  def config(self, target: adapter.Config) -> Any:
    """The shape for a target; ValueError if a number does not fit."""

  def of_layers(self, target: adapter.Config) -> dict[str, Any]:
    """The fields of every shape; raises ValueError as `config` does."""
    num_heads = self.num_heads or target.num_heads
    kv_heads = self.num_kv_heads or (
      num_heads if self.num_heads else target.num_kv_heads
    )
    if num_heads % kv_heads:
      raise ValueError(f'--kv_heads={kv_heads} must divide --heads={num_heads}')
    if target.width % (2 * num_heads):
      raise ValueError(
        f'--heads={num_heads} must divide the width {target.width} of the'
        ' target into heads of even width'
      )
    # Layers may differ.
    inner_width = np.max(getattr(target, 'inner_width', None) or 0).item()
    return {
      'vocab_size': target.vocab_size,
      'num_positions': target.num_positions,
      'width': target.width,
      'num_heads': num_heads,
      'num_kv_heads': kv_heads,
      'head_width': target.width // num_heads,
      'inner_width': self.inner_width or inner_width or 8 * target.width // 3,
      'rope': _rotation(target),
      'target_width': target.width,
    }

  def most_frequent(self, features: Features, size: int) -> np.ndarray | None:
    """The ids of `vocabulary`, which the target chooses most, ascending."""
    if self.vocabulary is None:
      return None
    chosen = [file['choice'].ravel() for file in features.files]
    counts = sum(np.bincount(tokens, minlength=size) for tokens in chosen)
    return np.sort(np.argsort(-counts, kind='stable')[: self.vocabulary])

  @abc.abstractmethod
  def begin(
    self,
    config: Any,
    lesson: Lesson,
    lm_head: jax.Array,
    ids: np.ndarray | None,
  ) -> tuple[Any, LossFunction, Callable[..., None]]:
    """Makes `params`, the loss and `save` of `trainer.Trainee`.

    `lm_head` `[D, H]` float32 is the output matrix of the target for the tokens
    that are drafted, `ids` `[D]`, which are None for all.
    """

  def window_length(self, step: int) -> int:
    """The tokens of a window, in all steps."""
    del step
    return self.length

  def prepare(
    self, claim: trainer.Claim, report: trainer.Report
  ) -> trainer.Trainee:
    checkpoint = hub.locate(self.target)
    if checkpoint.tokenizer is None:
      raise ValueError(f'--target={self.target} has no tokenizer')
    config = self.config(checkpoint.config)
    form = checkpoint_lib.resolve_dtype(self.target_dtype, checkpoint)
    module, _ = hub.load_network(
      checkpoint, checkpoint_lib.Placement(form, build.is_available())
    )
    hidden = (*config.reads, cache_lib.AFTER_NORM)
    target = adapter.as_model(module, hidden=hidden)
    matrices = heads.matrices_of(target, checkpoint.config)
    of_target = checkpoint.config.num_layers
    lesson = Lesson(target, *matrices, config.reads, of_target)
    workdir = claim(target_blake2b=plan_lib.model_digest(checkpoint))
    splits = self.corpus.splits(workdir, checkpoint.tokenizer)
    token = token_dtype(len(config.reads), checkpoint.config.width)
    each = (self.length + 1) * token.itemsize
    room = max(int(self.feature_gigabytes * 1e9) // each - self.eval_windows, 0)
    num_windows = min((len(splits[0]) - 1) // self.length, room)
    report(
      f'features: {num_windows} training windows of {self.length} tokens take'
      f' {num_windows * each / 1e9:.2f} GB in {workdir}, of'
      f' {self.feature_gigabytes:.2f} GB that they may'
    )
    sets = []
    for name, tokens, most in zip(
      ('train', 'held_out'),
      splits,
      (num_windows, self.eval_windows),
      strict=True,
    ):
      chosen = windows(tokens, self.length, most)
      if self.answer_tokens:
        chosen = lesson.answers(
          chosen, self.answer_tokens, workdir / 'answers' / name
        )
      folder = workdir / 'features' / name
      sets.append(lesson.features(chosen, token, folder))
    train_set, held_out = sets
    ids = self.most_frequent(train_set, config.vocab_size)
    lm_head = lesson.outputs(ids)
    params, function, save = self.begin(config, lesson, lm_head, ids)
    frozen = lesson.embedding, lm_head.astype(self.dtype), ids
    loss = jax.tree_util.Partial(function, frozen)
    size = self.batch_size(0)
    return trainer.Trainee(
      params=params,
      loss=loss,
      held_out_loss=loss,
      batch=lambda step: train_set.random_batch(step, size, self.seed),
      held_out=lambda _: held_out.batches_of(size),
      save=save,
    )
