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

import numpy as np

from specdec.ngram.counting import Level
from specdec.ngram.counting import NGramCounts

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
