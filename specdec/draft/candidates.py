"""A scorer that knows a few likely tokens instead of a distribution.

An n-gram table, matches in the text so far or a retrieval store have no cache
and cost little; each is a `Proposer`. Several merge into one scorer by backing
off: each proposer distributes the probability that those before it left.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec import carried as carried_lib
from specdec import context as context_lib
from specdec import sampling as sampling_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import ranking as ranking_lib
from specdec.tree import tree as tree_lib


class Query(flax.struct.PyTreeNode):
  """The nodes of one row after which tokens are proposed; unbatched."""

  tree: tree_lib.TokenTree  #: `[M]` per field.
  nodes: jax.Array  #: `[W]` int32.
  tokens: jax.Array  #: `[T]` int32, the text so far.
  length: jax.Array  #: `[]` int32, of the text; the root is the last token.

  def histories(self, number: int) -> jax.Array:
    """`[W, number]` int32, the tokens that end at each node, its own first.

    -1 before the start of the text.
    """
    index = self.length - 1 - jnp.arange(number)
    recent = jnp.where(index >= 0, self.tokens[index], -1)
    return tree_lib.histories(self.tree, self.nodes, recent)


class Proposer:
  """Base of proposers: pure functions, and a pytree of what they need.

  A subclass needs a `name` and `propose`. One that learns has a state, see
  `specdec.carried`. When new texts begin, only rows whose text does not
  continue the old one start again.
  """

  name: str  #: The name of the source of its tokens.

  @property
  def vocab_size(self) -> int | None:
    """V, or None if it has none of its own."""
    return None

  @property
  def bytes_per_node(self) -> int:
    """Bytes read from memory to look up one node."""
    return 0

  def start(self, texts: carried_lib.Texts) -> Any:
    """The state after texts; B is the first axis of each array in it."""
    del texts
    return ()

  def observe(self, state: Any, seen: carried_lib.Verified) -> Any:
    """Learns from a verification; by default the state stays as it is."""
    del seen
    return state

  def propose(self, state: Any, query: Query) -> tuple[jax.Array, jax.Array]:
    """Candidates after each node of a row.

    Args:
      state: of the row, without the axis B.
      query: the nodes.

    Returns:
      `[W, C]` int32 tokens, distinct where possible, and `[W, C]` float32, the
      logarithms of their probabilities, which add up to at most 1;
      `sampling.EXCLUDED` for entries that are no candidates.
    """
    raise NotImplementedError


class CandidateState(flax.struct.PyTreeNode):
  """The states of the proposers; `()` for one that does not learn."""

  length: jax.Array  #: `[B]` int32, of the texts that they learned from.
  learned: tuple[Any, ...]  #: One per proposer.


def scores_of_few(
  nodes: jax.Array,
  tokens: jax.Array,
  ranked: jax.Array,
  branching: int,
  sizes: Sequence[int] = (),
) -> drafter_lib.Scores:
  """Scores of nodes from a few candidates after each of them.

  Args:
    nodes: `[B, W]` int32.
    tokens: `[B, W, C]` int32, the candidates.
    ranked: `[B, W, C]` float32, their log-probabilities, at most 0; `EXCLUDED`
      for entries that are no candidates.
    branching: K, the most children of a node.
    sizes: how many of the C candidates each source has, in their order; by
      default all are of one source.
  """

  def log_prob_of(index: jax.Array, wanted: jax.Array) -> jax.Array:
    at = lambda array: jax.vmap(lambda row, nodes: row[nodes])(array, index)
    same = at(tokens) == wanted[:, :, None]
    return jnp.max(jnp.where(same, at(ranked), sampling_lib.EXCLUDED), axis=2)

  # Sorted with the keys, the tokens need no look-up.
  places = lax.broadcasted_iota(jnp.int32, ranked.shape, ranked.ndim - 1)
  in_order = lax.sort((-ranked, tokens, places), num_keys=1)
  negated, best, places = (array[..., :branching] for array in in_order)
  return drafter_lib.Scores(
    nodes=nodes,
    tokens=best,
    cond_log_probs=-negated,
    # As sums, since a look-up would be a kernel of a GPU.
    sources=sum(
      ((places >= end).astype(jnp.int32) for end in np.cumsum(sizes)[:-1]),
      start=jnp.zeros_like(places),
    ),
    log_prob_of=log_prob_of,
    slots_read=jnp.zeros(nodes.shape[0], jnp.int32),
    drawn_from=jnp.zeros((*nodes.shape, 0)),
  )


class CandidateScorer(flax.struct.PyTreeNode, drafter_lib.Scorer):
  """One or more proposers as a scorer; see `Scorer`."""

  #: The proposers, the most reliable first.
  proposers: tuple[Proposer, ...]

  @property
  def facts(self) -> drafter_lib.ScorerFacts:
    """The names of the proposers, and V of the first that has one."""
    sizes = (proposer.vocab_size for proposer in self.proposers)
    return drafter_lib.ScorerFacts(
      labels=tuple(proposer.name for proposer in self.proposers),
      vocab_size=next(filter(None, sizes), None),
      bytes_per_node=sum(
        proposer.bytes_per_node for proposer in self.proposers
      ),
    )

  def start(
    self, texts: carried_lib.Texts, num_scored: int
  ) -> CandidateState | tuple[()]:
    """The states of the proposers, if any has one."""
    del num_scored
    learned = tuple(proposer.start(texts) for proposer in self.proposers)
    has_states = jax.tree.leaves(learned)
    return CandidateState(texts.length, learned) if has_states else ()

  def restart(
    self, state: Any, texts: carried_lib.Texts, num_scored: int
  ) -> tuple[Any, jax.typing.ArrayLike]:
    """Rows whose text does not go on start again."""
    if not jax.tree.leaves(state):
      return state, 0
    new = self.start(texts, num_scored)
    assert isinstance(new, CandidateState)
    # The root may have been left out of what was kept.
    goes_on = (texts.length == 0) | (texts.kept >= state.length - 1)
    of_row = lambda array: goes_on.reshape(-1, *(1,) * (array.ndim - 1))
    learned = jax.tree.map(
      lambda old, new: jnp.where(of_row(old), old, new),
      state.learned,
      new.learned,
    )
    length = jnp.where(texts.length == 0, state.length, texts.length)
    return CandidateState(length, learned), 0

  def observe(self, state: Any, seen: carried_lib.Verified) -> Any:
    """Lets the proposers learn."""
    if not jax.tree.leaves(state):
      return state
    learned = tuple(
      proposer.observe(one, seen)
      for proposer, one in zip(self.proposers, state.learned, strict=True)
    )
    return state.replace(learned=learned)

  def keep(self, state: Any, added: carried_lib.Added) -> Any:
    """Counts the tokens of the texts."""
    if not jax.tree.leaves(state):
      return state
    return state.replace(length=state.length + added.count)

  def score(
    self,
    state: Any,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> tuple[drafter_lib.Scores, Any]:
    """Looks the nodes up."""
    learned = state.learned if state else ((),) * len(self.proposers)
    proposed, proposed_log_probs = jax.vmap(self._looked_up)(
      learned, Query(tree, nodes, ctx.tokens, ctx.length)
    )
    sizes = [tokens.shape[2] for tokens in proposed]
    tokens, log_probs = jax.vmap(_merged)(proposed, proposed_log_probs)
    log_probs = ctx.adjusted_few(log_probs, tree, nodes, tokens)
    depths = jax.vmap(tree_lib.pick)(tree.depth, nodes)
    ranked = ranking_lib.rank_candidates(
      log_probs,
      ctx.randomness.noise.at(depths).of_tokens(tokens),
      ctx.sampling,
      config.calibration,
      shares_noise=ctx.rule.shares_noise,
    )
    scores = scores_of_few(nodes, tokens, ranked, config.branching, sizes)
    return scores, state

  def _looked_up(
    self, learned: tuple[Any, ...], query: Query
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """By proposer, its candidates and their log-probabilities, `[W, n]`."""
    tokens, log_probs = [], []
    is_node = (query.nodes >= 0)[:, None]
    left = jnp.zeros(is_node.shape)  # log of what is left to distribute
    for proposer, state in zip(self.proposers, learned, strict=True):
      proposed, log_prob = proposer.propose(state, query)
      log_prob = jnp.where(
        is_node & (log_prob > sampling_lib.EXCLUDED),
        log_prob + left,
        sampling_lib.EXCLUDED,
      )
      tokens.append(proposed)
      log_probs.append(log_prob)
      taken = jnp.sum(jnp.exp(log_prob), axis=1, keepdims=True)
      left = jnp.log(jnp.maximum(jnp.exp(left) - taken, 1e-6))
    return tokens, log_probs


def _side_by_side(arrays: list[jax.Array]) -> jax.Array:
  """Arrays `[W, n]` of several sizes n as one.

  Pads and adds up: on a GPU a concatenation would be a separate kernel.
  """
  size = sum(array.shape[1] for array in arrays)
  place, start = jnp.arange(size)[None], arrays[0].shape[1]
  joined = jnp.pad(arrays[0], ((0, 0), (0, size - start)))
  for array in arrays[1:]:
    end = start + array.shape[1]
    padded = jnp.pad(array, ((0, 0), (start, size - end)))
    joined, start = jnp.where(place < start, joined, padded), end
  return joined


def _merged(
  proposed: list[jax.Array], log_probs: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """All candidates and their log-probabilities, `[W, C]` each.

  The first of equal tokens gets the probability of all.
  """
  tokens, joined = _side_by_side(proposed), _side_by_side(log_probs)
  possible = joined > sampling_lib.EXCLUDED
  same = tokens[:, :, None] == tokens[:, None]
  same &= possible[:, :, None] & possible[:, None]
  total = jnp.sum(jnp.where(same, jnp.exp(joined)[:, None], 0.0), axis=2)
  return tokens, jnp.where(
    possible & tree_lib.is_first(same),
    jnp.log(jnp.maximum(total, 1e-30)),
    sampling_lib.EXCLUDED,
  )
