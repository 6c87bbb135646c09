"""What a target computes for a corpus, kept on disk for training a head.

Files have some dozens of windows each, so that a run that is killed goes on
with the next file, and a damaged file costs no more than its own windows.
Numbers are stored in 16 bits.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import time

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from models.lab.training import head_loss
from models.lab.training import kept
from models.nn import matrices as matrices_lib
from specdec import cache as cache_lib
from specdec import model as model_lib

_WINDOWS = 32  # In a file.
_ROWS = 128  # Rows of logits at once.
_LARGEST = 65504.0  # Of float16; residual streams may have a few larger ones.
_SECONDS = 30.0  # Between two reports.


def dtype_of_token(num_states: int, width: int) -> np.dtype:
  """What is stored of a token, with so many states that a head reads."""
  return np.dtype(
    [
      ('states', np.float16, (num_states * width,)),
      ('normed', np.float16, (width,)),
      ('choice', np.int32),
    ]
  )


def windows(tokens: np.ndarray, length: int, most: int) -> np.ndarray:
  """At most so many windows `[n, length + 1]`, from all of the corpus.

  Raises:
    ValueError: the tokens are fewer than a window.
  """
  number = min((len(tokens) - 1) // length, most)
  if number < 1:
    raise ValueError(
      f'there are {len(tokens)} tokens, and room for {most} windows; one has'
      f' {length + 1} tokens'
    )
  last = len(tokens) - length - 1
  starts = np.linspace(0, last, number).astype(np.int64)
  return np.asarray(tokens)[starts[:, None] + np.arange(length + 1)]


@functools.partial(jax.jit, static_argnames='reads')
def _compute(target, lm_head, tokens, reads):
  """The fields of `dtype_of_token`, each `[B, L, ...]`."""
  cache = target.spec.init_cache(*tokens.shape)
  _, cache = target.causal(tokens, cache)
  states = [cache.hidden[one][:, 0] for one in reads]
  normed = cache.hidden[cache_lib.AFTER_NORM][:, 0].astype(jnp.float32)
  rows = normed.reshape(-1, normed.shape[-1])
  padded = jnp.pad(rows, ((0, -len(rows) % _ROWS), (0, 0)))
  choose = lambda rows: jnp.argmax(matrices_lib.matmul(rows, lm_head), axis=-1)
  chosen = lax.map(choose, padded.reshape(-1, _ROWS, rows.shape[-1])).ravel()
  chosen = chosen[: len(rows)].reshape(tokens.shape).astype(jnp.int32)
  stored = lambda array: jnp.clip(
    array.astype(jnp.float32), -_LARGEST, _LARGEST
  ).astype(jnp.float16)
  return stored(jnp.concatenate(states, axis=-1)), stored(normed), chosen


@dataclasses.dataclass(frozen=True)
class Features:
  """Windows of text and what the target computes for them.

  Attributes:
    tokens: `[N, L + 1]` int32.
    files: the files, of some windows each.
  """

  tokens: np.ndarray
  files: Sequence[pathlib.Path]

  @property
  def num_windows(self) -> int:
    return len(self.tokens)

  @property
  def choices(self) -> np.ndarray:
    """`[N, L + 1]` int32, the most likely token after each."""
    return np.concatenate([part['choice'] for part in self._mapped])

  @functools.cached_property
  def _mapped(self) -> list[np.ndarray]:
    return [np.load(file, mmap_mode='r') for file in self.files]

  def batch(self, index: np.ndarray) -> head_loss.Batch:
    """The windows of these numbers."""
    rows = np.stack(
      [self._mapped[one // _WINDOWS][one % _WINDOWS] for one in index]
    )
    return head_loss.Batch(
      tokens=self.tokens[index],
      states=rows['states'],
      normed=rows['normed'],
      choices=rows['choice'],
    )

  def random_batch(self, step: int, size: int, seed: int) -> head_loss.Batch:
    """The batch of a step: windows in a new order for every epoch."""
    index = []
    for place in range(step * size, (step + 1) * size):
      epoch, within = divmod(place, self.num_windows)
      order = np.random.default_rng([seed, epoch]).permutation(self.num_windows)
      index.append(order[within])
    return self.batch(np.array(index))

  def batches_of(self, size: int) -> Iterator[head_loss.Batch]:
    """All windows; the last batch is filled up with the first ones."""
    rows = np.arange(-(-self.num_windows // size) * size) % self.num_windows
    yield from map(self.batch, rows.reshape(-1, size))


def compute(
  target: model_lib.LanguageModel,
  lm_head: object,
  tokens: np.ndarray,
  reads: tuple[int, ...],
  folder: pathlib.Path,
  *,
  width: int,
  batch_size: int,
  report: Callable[[str], None] = print,
) -> Features:
  """Computes the features of windows, or those that are still missing.

  Args:
    target: keeps the states `reads` and those after the norm.
    lm_head: its output matrix.
    tokens: `[N, L + 1]` int32.
    reads: see `KVCache.hidden`.
    folder: of the files.
    width: of the target.
    batch_size: windows of a forward.
    report: called now and then with a line.
  """
  files, clock, done = [], time.monotonic(), 0
  start = clock
  dtype = dtype_of_token(len(reads), width)
  for number in range(-(-len(tokens) // _WINDOWS)):
    file = folder / f'windows_{number:05d}.npy'
    files.append(file)
    if kept.is_whole(file, report):
      continue
    part = tokens[number * _WINDOWS : (number + 1) * _WINDOWS]
    size = min(batch_size, len(tokens))
    padded = np.resize(part, (-(-len(part) // size) * size, part.shape[1]))
    found = np.empty(padded.shape, dtype)
    for first in range(0, len(padded), size):
      rows = slice(first, first + size)
      fields = _compute(target, lm_head, padded[rows], reads)
      for name, values in zip(dtype.names or (), fields, strict=True):
        found[name][rows] = values
    kept.save(file, functools.partial(np.save, arr=found[: len(part)]))
    done += part.size
    if time.monotonic() - clock > _SECONDS:
      clock = time.monotonic()
      speed = done / (clock - start)
      left = tokens[(number + 1) * _WINDOWS :].size / speed
      report(
        f'features of {(number + 1) * _WINDOWS} of {len(tokens)} windows, '
        f'{speed:.0f} tokens/s, {left / 60:.0f} min left'
      )
  return Features(tokens, files)
