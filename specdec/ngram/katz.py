"""Katz back-off: from counts to the probability of any token in any context.

Katz, "Estimation of Probabilities from Sparse Data for the Language Model
Component of a Speech Recognizer", IEEE Transactions on Acoustics, Speech, and
Signal Processing 35(3), 1987. A token w seen r times in a context c seen N
times has the probability

    P(w | c) = d(r) r / N

with a discount d(r) that is 1 for frequent n-grams. What the discounts left
over goes to the tokens that were not seen in c, in proportion to their
probability in the shorter context c' (c without its first token):

    P(w | c) = alpha(c) P(w | c')

    alpha(c) = (1 - sum of P(w | c) over w seen)
             / (1 - sum of P(w | c') over w seen)

The context of no tokens backs off to the uniform distribution over the
vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses

import jax.numpy as jnp
import numpy as np

from specdec.ngram.counting import Level
from specdec.ngram.counting import NGramCounts
from specdec.ngram.table import MISSING
from specdec.ngram.table import NGramTable

# Below this the mass of the unseen tokens is rounding of one minus that of the
# seen ones.
_NO_MASS = 1e-8

_BLOCK_NGRAMS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Discounts:
  """What is taken off the counts of one order.

  Attributes:
    method: `good-turing`, `absolute` or `constant`.
    amounts: r (1 - d(r)) for r = 1, 2, ... k and, last, for all r above k.
  """

  method: str
  amounts: tuple[float, ...]

  def apply(self, counts: np.ndarray) -> np.ndarray:
    """Discounted counts, float64 of the shape of `counts` (positive)."""
    amounts = np.array(self.amounts)
    return counts - amounts[np.minimum(counts, len(amounts)) - 1]


def _good_turing(n: np.ndarray) -> np.ndarray | None:
  """Katz's d(1), ... d(k), if they are discounts at all.

  The correction term keeps d(r) at 1 above k and takes off as much in total as
  Good and Turing give to all unseen n-grams together, n(1) of N.
  """
  k = len(n) - 2
  r = np.arange(1, k + 1)
  if np.any(n[1 : k + 1] == 0):
    return None
  ratios = (r + 1) * n[2:] / (r * n[1 : k + 1])
  correction = (k + 1) * n[k + 1] / n[1]
  if correction == 1:
    return None
  discounts = (ratios - correction) / (1 - correction)
  return discounts if np.all((discounts > 0) & (discounts <= 1)) else None


def discounts_of(counts_of_counts: np.ndarray) -> Discounts:
  """Estimates the discounts of one order.

  Good-Turing as in Katz (1987), for counts up to k = 5. Small corpora do not
  give discounts in (0, 1]; then n1 / (n1 + 2 n2) is taken off every count, as
  in Ney, Essen and Kneser, "On structuring probabilistic dependences in
  stochastic language modelling", 1994. If that is 0 or 1 too, it is 1/2.

  Args:
    counts_of_counts: `[k + 2]`; entry r is how many n-grams were seen r times.

  Returns:
    The discounts.
  """
  k = len(counts_of_counts) - 2
  discounts = _good_turing(counts_of_counts)
  if discounts is not None:
    amounts = np.arange(1, k + 1) * (1 - discounts)
    return Discounts('good-turing', (*amounts.tolist(), 0.0))
  once, twice = counts_of_counts[1:3].tolist()
  if once and twice:
    return Discounts('absolute', (once / (once + 2 * twice),))
  return Discounts('constant', (0.5,))


@dataclasses.dataclass(frozen=True)
class KatzLevel:
  """The contexts of one length; see `specdec.ngram.counting.Level`.

  Attributes:
    counts: contexts, n-grams and how often they were seen.
    probs: `[N]` float64, of each n-gram's last token in its context.
    backoff: `[C]` float64, alpha of each context.
  """

  counts: Level
  probs: np.ndarray
  backoff: np.ndarray


def blocks(first: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
  """Ranges of contexts that have about `size` n-grams each.

  Args:
    first: `[C + 1]`, see `Level`.
    size: of a block, unless a single context has more.

  Yields:
    First context and end of each range.
  """
  start, end = 0, len(first) - 1
  while start < end:
    fitting = int(np.searchsorted(first, first[start] + size, 'right')) - 1
    stop = min(max(fitting, start + 1), end)
    yield start, stop
    start = stop


def ngram_keys(
  level: Level, start: int, stop: int, vocab_size: int
) -> np.ndarray:
  """N-grams of some contexts, `[n]` ascending int64: context V + token."""
  owners = np.repeat(
    np.arange(start, stop), np.diff(level.first[start : stop + 1])
  )
  ngrams = slice(level.first[start], level.first[stop])
  return owners * vocab_size + level.tokens[ngrams]


def _shorter_probs(level, start, stop, shorter: KatzLevel, vocab_size):
  """P(w | c') of every n-gram c w of a range of contexts."""
  parents = level.parents[start:stop]
  low, high = int(parents[0]), int(parents[-1]) + 1
  known = ngram_keys(shorter.counts, low, high, vocab_size)
  owners = np.repeat(parents, np.diff(level.first[start : stop + 1]))
  ngrams = slice(level.first[start], level.first[stop])
  keys = owners.astype(np.int64) * vocab_size + level.tokens[ngrams]
  # Whatever followed a context followed its end, so every key is known.
  found = np.searchsorted(known, keys)
  return shorter.probs[shorter.counts.first[low] + found]


def _estimate_level(
  level: Level,
  shorter: KatzLevel | None,
  discounts: Discounts,
  vocab_size: int,
) -> KatzLevel:
  probs = np.empty(len(level.tokens))
  backoff = np.empty(len(level.parents))
  for start, stop in blocks(level.first, _BLOCK_NGRAMS):
    ngrams = slice(level.first[start], level.first[stop])
    begins = level.first[start:stop] - level.first[start]
    sizes = np.diff(level.first[start : stop + 1])
    if shorter is None:
      shorter_probs = np.full(sizes.sum(), 1 / vocab_size)
    else:
      shorter_probs = _shorter_probs(level, start, stop, shorter, vocab_size)
    discounted = discounts.apply(level.counts[ngrams])
    total = np.add.reduceat(level.counts[ngrams], begins, dtype=np.int64)
    mass = np.add.reduceat(discounted, begins)
    # Were all counts too high for a discount, nothing would be left for the
    # unseen tokens; count one of them, as SRILM does.
    total = np.where(mass < total, total, total + 1)
    unseen = 1 - np.add.reduceat(shorter_probs, begins)
    # Nobody is left to give to: the seen tokens keep all.
    all_seen = unseen < _NO_MASS
    total = np.where(all_seen, mass, total)
    left = np.where(all_seen, 0, 1 - mass / total)
    backoff[start:stop] = left / np.where(all_seen, 1, unseen)
    probs[ngrams] = discounted / np.repeat(total, sizes)
  return KatzLevel(level, probs, backoff)


@dataclasses.dataclass(frozen=True)
class KatzModel:
  """A back-off model on the host.

  Attributes:
    levels: of the contexts of 0, 1, ... tokens.
    discounts: of the n-grams of each level.
    vocab_size: V.
  """

  levels: tuple[KatzLevel, ...]
  discounts: tuple[Discounts, ...]
  vocab_size: int

  def distributions(self, length: int, contexts: np.ndarray) -> np.ndarray:
    """The probabilities of all tokens in some known contexts.

    Args:
      length: of the contexts, in tokens.
      contexts: `[b]` integers, indices into `levels[length]`.

    Returns:
      `[b, V]` float64; rows sum to 1.
    """
    level = self.levels[length]
    if length == 0:
      shape = (len(contexts), self.vocab_size)
      probs = np.full(shape, 1 / self.vocab_size)
    else:
      parents = level.counts.parents[contexts]
      shorter, positions = np.unique(parents, return_inverse=True)
      probs = self.distributions(length - 1, shorter)[positions]
    probs *= level.backoff[contexts][:, None]
    first = level.counts.first[contexts]
    sizes = level.counts.first[contexts + 1] - first
    rows = np.repeat(np.arange(len(contexts)), sizes)
    # The n-grams of all the contexts, one context after the other.
    skipped = first - (np.cumsum(sizes) - sizes)
    ngrams = np.arange(len(rows)) + np.repeat(skipped, sizes)
    probs[rows, level.counts.tokens[ngrams]] = level.probs[ngrams]
    return probs

  def distribution(self, history: Sequence[int]) -> np.ndarray:
    """The probabilities of all tokens after any text.

    Args:
      history: the tokens of the text, the most recent first, as many as are
        known; -1 before its start.

    Returns:
      `[V]` float64, the distribution of the longest known context.
    """
    length, context = 0, 0
    for token in history[: len(self.levels) - 1]:
      level = self.levels[length + 1].counts
      start, stop = np.searchsorted(level.parents, [context, context + 1])
      child = start + np.searchsorted(level.edge_token[start:stop], token)
      if child == stop or level.edge_token[child] != token:
        break
      length, context = length + 1, int(child)
    return self.distributions(length, np.array([context]))[0]


def estimate(counts: NGramCounts) -> KatzModel:
  """Estimates all probabilities.

  Args:
    counts: of the n-grams.

  Returns:
    The model. Contexts that were left out of the counts take the distribution
    of their longest end that was not.
  """
  discounts = tuple(discounts_of(row) for row in counts.counts_of_counts)
  levels: list[KatzLevel] = []
  for level, discount in zip(counts.levels, discounts, strict=True):
    shorter = levels[-1] if levels else None
    levels.append(_estimate_level(level, shorter, discount, counts.vocab_size))
  return KatzModel(tuple(levels), discounts, counts.vocab_size)


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
