"""The K likeliest next tokens of every context of a Katz model, as a table.

Candidates are the tokens seen in a context, and the 2 K likeliest of the
shorter context it backs off to. That can miss a token only where many seen
tokens were discounted below unseen ones. The few contexts where it might are
recognised, and all of their tokens compared.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specdec.ngram.katz import blocks
from specdec.ngram.katz import KatzModel
from specdec.ngram.katz import ngram_keys
from specdec.ngram.table import MISSING
from specdec.ngram.table import NGramTable

_BLOCK_NGRAMS = 1 << 19
_BLOCK_PROBS = 1 << 23


@dataclasses.dataclass(frozen=True)
class _Best:
  """The likeliest tokens of some contexts; 0 where missing.

  Attributes:
    tokens: `[contexts, k]` int32.
    probs: `[contexts, k]` float32.
  """

  tokens: np.ndarray
  probs: np.ndarray

  def __setitem__(self, contexts, other: '_Best'):
    self.tokens[contexts] = other.tokens
    self.probs[contexts] = other.probs


def _rank(rows, tokens, probs, shape) -> _Best:
  """The likeliest candidates of each row.

  Args:
    rows: `[n]`, the row of each candidate.
    tokens: `[n]`; ties go to the earlier candidate.
    probs: `[n]` float32, 0 for no candidate.
    shape: rows and K.

  Returns:
    `[rows, K]` each.
  """
  # One integer to sort by: the bits of a positive float are ascending.
  keys = (rows.astype(np.int64) << 32) - probs.view(np.int32)
  order = np.argsort(keys, kind='stable')
  rows, tokens, probs = rows[order], tokens[order], probs[order]
  starts = np.searchsorted(rows, np.arange(shape[0]))
  ranks = np.arange(len(rows)) - starts[rows]
  kept = (ranks < shape[1]) & (probs > 0)
  best = _Best(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
  best[rows[kept], ranks[kept]] = _Best(tokens[kept], probs[kept])
  return best


def _from_candidates(
  model: KatzModel, length: int, start: int, stop: int, shorter: _Best, k: int
) -> tuple[_Best, np.ndarray]:
  """The best tokens of a range of contexts, and which rows are not certain."""
  level = model.levels[length]
  parents = level.counts.parents[start:stop]
  backed_off = shorter.probs[parents] * level.backoff[start:stop, None]
  backed_off = backed_off.astype(np.float32)
  others = shorter.tokens[parents]
  keys = ngram_keys(level.counts, start, stop, model.vocab_size)
  wanted = np.arange(start, stop)[:, None] * model.vocab_size + others
  found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  unseen = np.where(keys[found] == wanted, np.float32(0), backed_off)
  ngrams = slice(level.counts.first[start], level.counts.first[stop])
  rows = np.repeat(np.arange(stop - start), others.shape[1])
  best = _rank(
    np.concatenate([keys // model.vocab_size - start, rows]),
    np.concatenate([level.counts.tokens[ngrams], others.ravel()]),
    np.concatenate([level.probs[ngrams].astype(np.float32), unseen.ravel()]),
    (stop - start, k),
  )
  # Tokens that were no candidates are not likelier than the last backed off to.
  return best, backed_off[:, -1] > best.probs[:, -1]


def _from_distributions(
  model: KatzModel, length: int, contexts: np.ndarray, k: int
) -> _Best:
  """The best tokens of some contexts, found among all."""
  probs = model.distributions(length, contexts).astype(np.float32)
  top = min(k, model.vocab_size)
  best = np.sort(np.argpartition(-probs, top - 1, axis=1)[:, :top], axis=1)
  return _rank(
    np.repeat(np.arange(len(contexts)), top),
    best.ravel(),
    np.take_along_axis(probs, best, axis=1).ravel(),
    (len(contexts), k),
  )


def _best_of_level(
  model: KatzModel, length: int, shorter: _Best | None, k: int
) -> _Best:
  """The k best tokens of every context of one length."""
  counts = model.levels[length].counts
  shape = (len(counts.parents), k)
  best = _Best(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
  uncertain = np.ones(len(counts.parents), bool)
  if shorter is not None:
    for start, stop in blocks(counts.first, _BLOCK_NGRAMS):
      best[start:stop], uncertain[start:stop] = _from_candidates(
        model, length, start, stop, shorter, k
      )
  rest = np.flatnonzero(uncertain)
  size = max(1, _BLOCK_PROBS // model.vocab_size)
  for contexts in np.split(rest, range(size, len(rest), size)):
    best[contexts] = _from_distributions(model, length, contexts, k)
  return best


def build_table(model: KatzModel, num_continuations: int) -> NGramTable:
  """The table a drafter reads.

  Args:
    model: of any order.
    num_continuations: K.

  Returns:
    The table on the default device.
  """
  tokens, probs, first_child = [], [], []
  best, num_contexts = None, 0
  for length, level in enumerate(model.levels):
    # Twice as many as the next level has use for.
    k = num_continuations << (len(model.levels) - 1 - length)
    best = _best_of_level(model, length, best, k)
    tokens.append(best.tokens[:, :num_continuations])
    probs.append(best.probs[:, :num_continuations])
    size = len(level.counts.parents)
    num_contexts += size
    if length + 1 < len(model.levels):
      parents = model.levels[length + 1].counts.parents
      starts = np.searchsorted(parents, np.arange(size))
    else:
      starts = np.zeros(size, np.int64)
    first_child.append(num_contexts + starts)
  with np.errstate(divide='ignore'):
    log_probs = np.maximum(np.log(np.concatenate(probs)), np.float32(MISSING))
  return NGramTable(
    edge_token=jnp.asarray(
      np.concatenate([level.counts.edge_token for level in model.levels])
    ),
    first_child=jnp.asarray(
      np.concatenate([*first_child, [num_contexts]]), jnp.int32
    ),
    next_tokens=jnp.asarray(np.concatenate(tokens)),
    next_log_probs=jnp.asarray(log_probs),
    order=len(model.levels),
    vocab_size=model.vocab_size,
  )
