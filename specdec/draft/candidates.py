"""A scorer that knows a few likely tokens instead of a distribution.

An n-gram table, matches in the text so far or a retrieval store have no cache
and cost little; each is a `Proposer`. Several merge into one scorer by backing
off: each proposer distributes the probability that those before it left.
"""

from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specdec import context as context_lib
from specdec import sampling as sampling_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import ranking as ranking_lib
from specdec.tree import tree as tree_lib


class Proposer(Protocol):
  """A pure function from a node to likely next tokens, and what it needs."""

  @property
  def name(self) -> str:
    """The name of the source of its tokens."""

  @property
  def vocab_size(self) -> int | None:
    """V, or None if it has none of its own."""

  @property
  def bytes_per_node(self) -> int:
    """Bytes read from memory to look up one node."""

  def propose(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """Candidates after each node of one tree; unbatched.

    Args:
      tree: `[M]` per field.
      nodes: `[W]` int32.
      tokens: `[T]` int32, the text so far.
      length: `[]` int32, of the text; the root is the last token.

    Returns:
      `[W, C]` int32 tokens, distinct where possible, and `[W, C]` float32, the
      logarithms of their probabilities, which add up to at most 1;
      `sampling.EXCLUDED` for entries that are no candidates.
    """


def scores_of_few(
  nodes: jax.Array,
  tokens: jax.Array,
  ranked: jax.Array,
  sources: jax.Array,
  branching: int,
) -> drafter_lib.Scores:
  """Scores of nodes from a few candidates after each of them.

  Args:
    nodes: `[B, W]` int32.
    tokens: `[B, W, C]` int32, the candidates.
    ranked: `[B, W, C]` float32, their log-probabilities, at most 0; `EXCLUDED`
      for entries that are no candidates.
    sources: `[B, W, C]` int32, see `Scores.sources`.
    branching: K, the most children of a node.
  """

  def log_prob_of(index: jax.Array, wanted: jax.Array) -> jax.Array:
    at = lambda array: jax.vmap(lambda row, one: row[one])(array, index)
    same = at(tokens) == wanted[:, :, None]
    return jnp.max(jnp.where(same, at(ranked), sampling_lib.EXCLUDED), axis=2)

  best_log_probs, best = jax.lax.top_k(ranked, min(branching, ranked.shape[-1]))
  at_best = lambda array: jnp.take_along_axis(array, best, axis=-1)
  return drafter_lib.Scores(
    nodes=nodes,
    tokens=at_best(tokens),
    cond_log_probs=best_log_probs,
    sources=at_best(sources),
    log_prob_of=log_prob_of,
    slots_read=jnp.zeros(nodes.shape[0], jnp.int32),
    drawn_from=jnp.zeros((*nodes.shape, 0)),
  )


class CandidateScorer(flax.struct.PyTreeNode, drafter_lib.Scorer):
  """One or more proposers as a scorer; see `Scorer`."""

  proposers: tuple[Proposer, ...]  #: The proposers, the most reliable first.

  @property
  def facts(self) -> drafter_lib.ScorerFacts:
    """The names of the proposers, and V of the first that has one."""
    sizes = (proposer.vocab_size for proposer in self.proposers)
    return drafter_lib.ScorerFacts(
      labels=tuple(proposer.name for proposer in self.proposers),
      vocab_size=next(filter(None, sizes), None),
      bytes_per_node=sum(one.bytes_per_node for one in self.proposers),
    )

  def score(
    self,
    state: tuple[()],
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> tuple[drafter_lib.Scores, tuple[()]]:
    """Looks the nodes up."""
    tokens, log_probs, sources = jax.vmap(self._merged)(
      tree, nodes, ctx.tokens, ctx.length
    )
    log_probs = ctx.adjusted_few(log_probs, tree, nodes, tokens)
    depths = jax.vmap(lambda tree, nodes: tree.depth[nodes])(tree, nodes)
    ranked = ranking_lib.rank_candidates(
      log_probs,
      ctx.randomness.noise.at(depths).of_tokens(tokens),
      ctx.sampling,
      config.calibration,
      shares_noise=ctx.rule.shares_noise,
    )

    scores = scores_of_few(nodes, tokens, ranked, sources, config.branching)
    return scores, state

  def _merged(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All candidates, their log-probabilities and sources, `[W, C]` each."""
    found, log_probs, sources = [], [], []
    left = jnp.zeros((nodes.shape[0], 1))  # log of what is left to distribute
    for source, proposer in enumerate(self.proposers):
      proposed, log_prob = proposer.propose(tree, nodes, tokens, length)
      log_prob = jnp.where(
        (nodes >= 0)[:, None] & (log_prob > sampling_lib.EXCLUDED),
        log_prob + left,
        sampling_lib.EXCLUDED,
      )
      found.append(proposed)
      log_probs.append(log_prob)
      sources.append(jnp.full(proposed.shape, source, jnp.int32))
      taken = jnp.sum(jnp.exp(log_prob), axis=1, keepdims=True)
      left = jnp.log(jnp.maximum(jnp.exp(left) - taken, 1e-6))
    return _without_duplicates(
      jnp.concatenate(found, axis=1),
      jnp.concatenate(log_probs, axis=1),
      jnp.concatenate(sources, axis=1),
    )


def _without_duplicates(
  tokens: jax.Array, log_probs: jax.Array, sources: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The first of equal tokens gets the probability of all; `[W, C]` each."""
  possible = log_probs > sampling_lib.EXCLUDED
  same = tokens[:, :, None] == tokens[:, None]
  same &= possible[:, :, None] & possible[:, None]
  total = jnp.sum(jnp.where(same, jnp.exp(log_probs)[:, None], 0.0), axis=2)
  is_first = jnp.argmax(same, axis=2) == jnp.arange(tokens.shape[1])[None]
  log_probs = jnp.where(
    possible & is_first,
    jnp.log(jnp.maximum(total, 1e-30)),
    sampling_lib.EXCLUDED,
  )
  return tokens, log_probs, sources
