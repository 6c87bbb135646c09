"""Scorers that know a few likely tokens instead of a distribution.

An n-gram table, matches in the text so far or a retrieval store have no cache
and cost next to nothing; each is a `Proposer`. Several merge into one scorer by
backing off: a proposer shares out the probability that those before it left.
"""

from typing import Any
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specdec.draft.drafter import Scores
from specdec.draft.drafter import Step
from specdec.draft.drafter import TreeConfig
from specdec.draft.ranking import IMPOSSIBLE
from specdec.draft.ranking import rank_candidates
from specdec.tree.tree import TokenTree


class Proposer(Protocol):
  """A pure function from a node to likely next tokens, and what it needs.

  Attributes:
    name: for the origin of tokens.
    vocab_size: V, or None if it has none of its own.
    bytes_per_node: read from memory to look one node up.
  """

  name: str
  vocab_size: int | None
  bytes_per_node: int

  def propose(
    self,
    tree: TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """Unbatched.

    Args:
      tree: `[M]` per field.
      nodes: `[W]` int32.
      tokens: `[T]` int32, the text so far.
      length: `[]` int32, of the text; the root is the token before.

    Returns:
      `[W, C]` int32 tokens, distinct where possible, and `[W, C]` float32, the
      logarithms of their probabilities, which add up to at most 1;
      `ranking.IMPOSSIBLE` for entries that are no guess.
    """


class CandidateScorer(flax.struct.PyTreeNode):
  """See `specdec.drafter.Scorer`.

  Attributes:
    proposers: one or more, those to be trusted first in front.
  """

  proposers: tuple[Any, ...]

  max_positions = None
  needs_ancestors = False
  can_draw = False
  bytes_per_slot = 0

  @property
  def labels(self) -> tuple[str, ...]:
    """The proposers."""
    return tuple(one.name for one in self.proposers)

  @property
  def vocab_size(self) -> int | None:
    """Of the first proposer that has one."""
    sizes = [one.vocab_size for one in self.proposers]
    return next((size for size in sizes if size is not None), None)

  def bytes_per_forward(self, width: int) -> int:
    """Of all look-ups."""
    return width * sum(one.bytes_per_node for one in self.proposers)

  def init(self, prompt, prompt_length, **sizes) -> tuple[()]:
    """There is no state."""
    del prompt, prompt_length, sizes
    return ()

  def catch_up(
    self, state: tuple[()], tokens: jax.Array, length: jax.Array
  ) -> tuple[tuple[()], int]:
    """There is no state."""
    del tokens, length
    return state, 0

  def score(
    self,
    state: tuple[()],
    tree: TokenTree,
    step: Step,
    nodes: jax.Array,
    config: TreeConfig,
  ) -> tuple[Scores, tuple[()]]:
    """Looks the nodes up."""
    tokens, log_probs, sources = jax.vmap(self._merged)(
      tree, nodes, step.tokens, step.length
    )
    noise = None
    if step.noise is not None:
      depths = jax.vmap(lambda tree, nodes: tree.depth[nodes])(tree, nodes)
      noise = jax.vmap(lambda one, depth, token: one[depth[:, None], token])(
        step.noise, depths, tokens
      )
    ranked = rank_candidates(
      log_probs, noise, step.sampling, config.calibration
    )
    branching = min(config.branching, ranked.shape[-1])
    edges, best = jax.lax.top_k(ranked, branching)
    pick = lambda array: jnp.take_along_axis(array, best, axis=-1)
    return Scores(
      nodes=nodes,
      tokens=pick(tokens),
      edges=edges,
      sources=pick(sources),
      given=jax.vmap(_given)(tree, nodes, tokens, ranked),
      slots_read=jnp.zeros(nodes.shape[0], jnp.int32),
    ), state

  def commit(
    self, state: tuple[()], path: jax.Array, num_kept: jax.Array
  ) -> tuple[()]:
    """There is no state."""
    del path, num_kept
    return state

  def _merged(self, tree, nodes, tokens, length):
    """All proposals, `[W, C]` each; unbatched."""
    found, log_probs, sources = [], [], []
    left = jnp.zeros((nodes.shape[0], 1))  # logarithm of what is left to share
    for source, proposer in enumerate(self.proposers):
      proposed, log_prob = proposer.propose(tree, nodes, tokens, length)
      log_prob = jnp.where(
        (nodes >= 0)[:, None] & (log_prob > IMPOSSIBLE / 2),
        log_prob + left,
        IMPOSSIBLE,
      )
      found.append(proposed)
      log_probs.append(log_prob)
      sources.append(jnp.full(proposed.shape, source, jnp.int32))
      shared = jnp.sum(jnp.exp(log_prob), axis=1, keepdims=True)
      rest = jnp.maximum(jnp.exp(left) - shared, 1e-6)
      left = jnp.log(rest)
    return _without_duplicates(
      jnp.concatenate(found, axis=1),
      jnp.concatenate(log_probs, axis=1),
      jnp.concatenate(sources, axis=1),
    )


def _without_duplicates(tokens, log_probs, sources):
  """The first of equal tokens gets the probability of all; `[W, C]` each."""
  possible = log_probs > IMPOSSIBLE / 2
  same = tokens[:, :, None] == tokens[:, None]
  same &= possible[:, :, None] & possible[:, None]
  total = jnp.sum(jnp.where(same, jnp.exp(log_probs)[:, None], 0.0), axis=2)
  is_first = jnp.argmax(same, axis=2) == jnp.arange(tokens.shape[1])[None]
  log_probs = jnp.where(
    possible & is_first, jnp.log(jnp.maximum(total, 1e-30)), IMPOSSIBLE
  )
  return tokens, log_probs, sources


def _given(tree, nodes, tokens, ranked):
  """The numbers of children in the tree; none of the candidates is impossible.

  Unbatched.
  """
  of_parent = (tree.parent[:, None] == nodes[None]) & (nodes >= 0)[None]
  parent = jnp.argmax(of_parent, axis=1)
  same = tokens[parent] == tree.token[:, None]
  return jnp.max(jnp.where(same, ranked[parent], IMPOSSIBLE), axis=1)
