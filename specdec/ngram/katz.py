"""Katz back-off: counts of n-grams, probabilities and tables of them.

Katz, "Estimation of Probabilities from Sparse Data for the Language Model
Component of a Speech Recognizer", IEEE Transactions on Acoustics, Speech, and
Signal Processing 35(3), 1987. If a token w occurs r times in a context c that
occurs N times, its probability is

    P(w | c) = (r - D) / N

with a discount D of the order (`discount_of`), in place of Katz's discounts by
count. The probability mass that discounts free goes to the tokens that do not
occur in c, in proportion to their probability in the shorter context c' (c
without its first token):

    P(w | c) = alpha(c) P(w | c')

    alpha(c) = (1 - sum of P(w | c) over the w that occur in c)
             / (1 - sum of P(w | c') over the w that occur in c)

The empty context backs off to the uniform distribution over the vocabulary.

An n-gram is a context and the token after it. Contexts are numbered along the
backward trie of `specdec.ngram.table`: a context is its parent, the context
without its first token, and that token. All is counted in memory: about 60
bytes per counted token, and 8 per distinct n-gram kept.
"""

from collections.abc import Sequence
import dataclasses
import functools
import os

import numpy as np

from specdec.ngram import table as table_lib
from specdec.text import whole_files

_NO_TOKEN = -1

# A smaller mass of the tokens that do not occur is a rounding error.
_NO_MASS = 1e-8

# How many probabilities of whole distributions are held in memory at once.
_BLOCK_PROBS = 1 << 23

# Candidates for the next token; probability 0 where there is none.
_CANDIDATE = np.dtype([('token', np.int32), ('prob', np.float32)])


@dataclasses.dataclass(frozen=True)
class Level:
  """The C contexts of one length, and the N n-grams that extend them."""

  # `[C]` int32, ascending, the index of each context without its first token,
  # in the level of that length; 0 at the root, which has no parent.
  parents: np.ndarray
  edge_token: np.ndarray  # `[C]` int32, that token, ascending among siblings.
  sizes: np.ndarray  # `[C]` int64, the number of n-grams, at least 1.
  tokens: np.ndarray  # `[N]` int32, last tokens, ascending in a context.
  counts: np.ndarray  # `[N]` int32, the number of occurrences of each n-gram.

  @functools.cached_property
  def first(self) -> np.ndarray:
    """`[C + 1]` int64; context c has the n-grams `first[c] : first[c + 1]`."""
    return np.concatenate([[0], np.cumsum(self.sizes)])


@dataclasses.dataclass(frozen=True)
class NGramCounts:
  """The result of `count_ngrams`."""

  levels: tuple[Level, ...]  # By context length: 0, 1, ... order - 1.
  # `[order, 2]` int64, the numbers of n-grams of each order that occur once and
  # twice, in all contexts.
  seldom: np.ndarray
  vocab_size: int
  num_tokens: int


def _read(
  shards: Sequence[str | os.PathLike[str]], gap: int, vocab_size: int
) -> np.ndarray:
  """All tokens, int32, with `gap` times -1 before each shard."""
  parts = []
  for shard in shards:
    with whole_files.reading(shard, 'it must be a .npy file of tokens'):
      tokens: np.ndarray = np.load(shard)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
      raise ValueError(
        f'{shard} must hold integers of shape [tokens], got {tokens.dtype} of'
        f' shape {tokens.shape}'
      )
    known = tokens[tokens != _NO_TOKEN]
    low, high = known.min(initial=0), known.max(initial=0)
    if low < 0 or high >= vocab_size:
      raise ValueError(
        f'{shard} has token {low if low < 0 else high}, outside the vocabulary'
        f' of {vocab_size}'
      )
    parts += [np.full(gap, _NO_TOKEN, np.int32), tokens.astype(np.int32)]
  return np.concatenate([np.zeros(0, np.int32), *parts])


def count_ngrams(
  shards: Sequence[str | os.PathLike[str]],
  *,
  order: int,
  vocab_size: int,
  min_count: int = 1,
) -> NGramCounts:
  """Counts all n-grams of up to `order` tokens.

  Args:
    shards: `.npy` files of token ids, `[tokens]` of any integer type. No n-gram
      spans two shards, or a -1, which ends a text and is not counted.
    order: n, at least 1.
    vocab_size: V.
    min_count: contexts with fewer occurrences are left out of the levels.

  Raises:
    ValueError: a file cannot be used, or there are no tokens or 2^31 or more.
  """
  text = _read(shards, order - 1, vocab_size)
  # The last tokens of n-grams, and the context of each, by number.
  places = np.flatnonzero(text != _NO_TOKEN)
  if not 0 < (num_tokens := len(places)) < 1 << 31:
    raise ValueError(
      f'the shards have {num_tokens} tokens; between 1 and {(1 << 31) - 1} can'
      ' be counted'
    )
  contexts, keys = np.zeros(num_tokens, np.int64), np.zeros(1, np.int64)
  levels: list[Level] = []
  seldom = np.zeros((order, 2), np.int64)
  new_number = np.zeros(1, np.int64)  # Each context has one if it is kept.
  for length in range(order):
    if length:
      before = text[places - length]
      # Texts that are too short have no context of this length.
      places, contexts = places[before >= 0], contexts[before >= 0]
      longer = contexts * vocab_size + before[before >= 0]
      keys, contexts = np.unique(longer, return_inverse=True)
    keys_of_ngrams = contexts * vocab_size + text[places]
    ngrams, counts = np.unique(keys_of_ngrams, return_counts=True)
    seldom[length] = np.sum(counts == 1), np.sum(counts == 2)
    # A context that ends in a shorter one occurs at most as often.
    kept = np.bincount(contexts, minlength=len(keys)) >= min_count
    kept |= length == 0
    parents, edge_token = np.divmod(keys[kept], vocab_size)
    parents, new_number = new_number[parents], np.cumsum(kept) - 1
    owners, tokens = np.divmod(ngrams, vocab_size)
    rows = kept[owners]
    levels.append(
      Level(
        parents=parents.astype(np.int32),
        edge_token=edge_token.astype(np.int32),
        sizes=np.bincount(new_number[owners[rows]], minlength=kept.sum()),
        tokens=tokens[rows].astype(np.int32),
        counts=counts[rows].astype(np.int32),
      )
    )
  return NGramCounts(tuple(levels), seldom, vocab_size, num_tokens)


def discount_of(once: int, twice: int) -> float:
  """D of one order, n1 / (n1 + 2 n2), or 1/2 if that is 0 or 1.

  Ney, Essen and Kneser, "On structuring probabilistic dependences in stochastic
  language modelling", 1994. n1 and n2 are the numbers of n-grams that occur
  `once` and `twice`.
  """
  return once / (once + 2 * twice) if once and twice else 0.5


@dataclasses.dataclass(frozen=True)
class KatzLevel:
  """The probabilities of one `Level` of C contexts and N n-grams."""

  counts: Level
  probs: np.ndarray  # [N] float64, of each n-gram's last token in its context.
  backoff: np.ndarray  # [C] float64, alpha of each context.


def _ngram_keys(
  level: Level, owners: np.ndarray, vocab_size: int
) -> np.ndarray:
  """Owner * V + token of each n-gram, int64; `[C]` are owners of contexts."""
  repeated = np.repeat(owners, level.sizes).astype(np.int64)
  return repeated * vocab_size + level.tokens


def _estimate_level(
  level: Level,
  shorter: list[KatzLevel],
  discount: float,
  vocab_size: int,
) -> KatzLevel:
  """The probabilities of a level; `shorter` holds all shorter levels."""
  begins = level.first[:-1]
  below = np.full(len(level.tokens), 1 / vocab_size)
  if shorter:
    above = shorter[-1]
    owners = np.arange(len(above.counts.parents))
    known = _ngram_keys(above.counts, owners, vocab_size)
    # A token after a context also follows its parent: every key is known.
    keys = _ngram_keys(level, level.parents, vocab_size)
    below = above.probs[np.searchsorted(known, keys)]
  discounted = level.counts - discount
  total = np.add.reduceat(level.counts, begins, dtype=np.int64)
  mass = np.add.reduceat(discounted, begins)
  unseen = 1 - np.add.reduceat(below, begins)
  # If all tokens occur, none can receive mass: the discounts have no effect.
  all_seen = unseen < _NO_MASS
  total = np.where(all_seen, mass, total)
  free = np.where(all_seen, 0, 1 - mass / total)
  backoff = free / np.where(all_seen, 1, unseen)
  return KatzLevel(level, discounted / np.repeat(total, level.sizes), backoff)


@dataclasses.dataclass(frozen=True)
class KatzModel:
  """A back-off model on the host; has a level for each context length."""

  levels: tuple[KatzLevel, ...]
  discounts: tuple[float, ...]  # D by order.
  vocab_size: int

  def distributions(self, length: int, contexts: np.ndarray) -> np.ndarray:
    """The distributions `[b, V]` float64 after contexts `[b]` of one length."""
    level = self.levels[length]
    if length == 0:
      shape = (len(contexts), self.vocab_size)
      probs = np.full(shape, 1 / self.vocab_size)
    else:
      parents = level.counts.parents[contexts]
      shorter, positions = np.unique(parents, return_inverse=True)
      probs = self.distributions(length - 1, shorter)[positions]
    probs *= level.backoff[contexts][:, None]
    sizes = level.counts.sizes[contexts]
    rows = np.repeat(np.arange(len(contexts)), sizes)
    # The indices of the n-grams of all contexts, one context after the other.
    skipped = level.counts.first[contexts] - (np.cumsum(sizes) - sizes)
    ngrams = np.arange(len(rows)) + np.repeat(skipped, sizes)
    probs[rows, level.counts.tokens[ngrams]] = level.probs[ngrams]
    return probs


def estimate(counts: NGramCounts) -> KatzModel:
  """Estimates all probabilities.

  Contexts left out by `min_count` have the distribution of their longest suffix
  that was not.
  """
  discounts = tuple(discount_of(*row) for row in counts.seldom.tolist())
  levels: list[KatzLevel] = []
  for level, discount in zip(counts.levels, discounts, strict=True):
    levels.append(_estimate_level(level, levels, discount, counts.vocab_size))
  return KatzModel(tuple(levels), discounts, counts.vocab_size)


def _rank(
  rows: np.ndarray,
  tokens: np.ndarray,
  probs: np.ndarray,
  shape: tuple[int, int],
) -> np.ndarray:
  """The K most probable of n candidates for each row, of shape `[rows, K]`.

  `rows`, `tokens` and `probs` (float32) are `[n]`; ties keep their order, and
  candidates of probability 0 are dropped.
  """
  # One integer sort key: the bits of positive floats ascend as the floats do.
  keys = (rows.astype(np.int64) << 32) - probs.view(np.int32)
  order = np.argsort(keys, kind='stable')
  rows, tokens, probs = rows[order], tokens[order], probs[order]
  starts = np.searchsorted(rows, np.arange(shape[0]))
  ranks = np.arange(len(rows)) - starts[rows]
  kept = (ranks < shape[1]) & (probs > 0)
  best = np.zeros(shape, _CANDIDATE)
  best['token'][rows[kept], ranks[kept]] = tokens[kept]
  best['prob'][rows[kept], ranks[kept]] = probs[kept]
  return best


def _from_candidates(
  model: KatzModel, length: int, shorter: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
  """The k best of the tokens that occur and of the shorter contexts' best.

  The second result is `[contexts]` bool: another token may be more probable.
  """
  level, vocab_size = model.levels[length], model.vocab_size
  parents = level.counts.parents
  backed_off = shorter['prob'][parents] * level.backoff[:, None]
  backed_off = backed_off.astype(np.float32)
  others = shorter['token'][parents]
  contexts = np.arange(len(parents))
  keys = _ngram_keys(level.counts, contexts, vocab_size)
  other_keys = contexts[:, None] * vocab_size + others
  places = np.minimum(np.searchsorted(keys, other_keys), len(keys) - 1)
  unseen = np.where(keys[places] == other_keys, np.float32(0), backed_off)
  best = _rank(
    np.concatenate([keys // vocab_size, np.repeat(contexts, others.shape[1])]),
    np.concatenate([level.counts.tokens, others.ravel()]),
    np.concatenate([level.probs.astype(np.float32), unseen.ravel()]),
    (len(parents), k),
  )
  # No other token is more probable than the last of the shorter context.
  return best, backed_off[:, -1] > best['prob'][:, -1]


def _from_distributions(
  model: KatzModel, length: int, contexts: np.ndarray, k: int
) -> np.ndarray:
  """The best of all tokens after some contexts."""
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
  model: KatzModel, length: int, shorter: np.ndarray, k: int
) -> np.ndarray:
  """The k best tokens of every context of one length, given the `shorter`."""
  size = len(model.levels[length].counts.parents)
  best, uncertain = np.zeros((size, k), _CANDIDATE), np.ones(size, bool)
  if length > 0:
    best, uncertain = _from_candidates(model, length, shorter, k)
  rest = np.flatnonzero(uncertain)
  step = max(1, _BLOCK_PROBS // model.vocab_size)
  for contexts in np.split(rest, range(step, len(rest), step)):
    best[contexts] = _from_distributions(model, length, contexts, k)
  return best


def build_table(
  model: KatzModel, num_continuations: int
) -> table_lib.NGramTable:
  """The table of the `num_continuations` (K) most probable next tokens."""
  counts = [level.counts for level in model.levels]
  # The parents of the contexts of the next level; none after the last level.
  parents = [*(level.parents for level in counts[1:]), np.zeros(0, np.int32)]
  parts, first_child, num_contexts = [], [], 0
  best = np.zeros((0, 0), _CANDIDATE)
  for length, level in enumerate(counts):
    # Each level has twice as many candidates as the level after it.
    k = num_continuations << (len(counts) - 1 - length)
    best = _best_of_level(model, length, best, k)
    parts.append(best[:, :num_continuations])
    contexts = np.arange(len(level.parents))
    num_contexts += len(contexts)
    first_child.append(
      num_contexts + np.searchsorted(parents[length], contexts)
    )
  candidates = np.concatenate(parts)
  with np.errstate(divide='ignore'):
    log_probs = np.log(candidates['prob'])
  first_child.append(np.array([num_contexts]))
  return table_lib.NGramTable.make(
    edge_token=np.concatenate([x.edge_token for x in counts]),
    first_child=np.concatenate(first_child),
    next_tokens=candidates['token'],
    next_log_probs=log_probs,
    order=len(counts),
    vocab_size=model.vocab_size,
  )
