"""Drafters of every kind for the tiny models, few programs for many kinds.

A program depends on the shape of a drafter alone, so how good its models and
tables are can vary without compiling again.
"""

import bisect
import collections
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import tiny

import specdec
from specdec import cache as cache_lib
from specdec import sampling as sampling_lib
from specdec.draft import block as block_lib
from specdec.ngram import table as table_lib
from specdec.tree import topology as topology_lib

# How good a table is: it knows the text by heart, says what no target says, or
# says nothing.
TABLES = ('perfect', 'wrong', 'empty')


def ngram_table(
  texts: Sequence[Sequence[int]],
  vocab_size: int,
  *,
  order: int,
  num_continuations: int,
) -> table_lib.NGramTable:
  """Counts of texts as a table, made slowly."""
  counts = collections.defaultdict[tuple, Any](collections.Counter)
  for text in texts:
    for end, token in enumerate(text):
      for length in range(min(order - 1, end) + 1):
        # A context is read backwards, so that its parent is its prefix.
        counts[tuple(reversed(text[end - length : end]))][token] += 1
  # Breadth first, so that the children of a context lie side by side.
  by_depth = lambda context: (len(context), context)
  contexts = sorted(counts, key=by_depth)
  parents = [by_depth(context[:-1]) for context in contexts[1:]]
  size = len(contexts)
  edge_token = np.zeros(size, np.int32)
  first_child = np.full(size + 1, size, np.int32)
  tokens = np.zeros((size, num_continuations), np.int32)
  log_probs = np.full(
    (size, num_continuations), sampling_lib.EXCLUDED, np.float32
  )
  for number, context in enumerate(contexts):
    edge_token[number] = context[-1] if context else 0
    first_child[number] = 1 + bisect.bisect_left(parents, by_depth(context))
    total = counts[context].total()
    best = counts[context].most_common(num_continuations)
    for rank, (token, count) in enumerate(best):
      tokens[number, rank] = token
      log_probs[number, rank] = np.log(0.95 * count / total)
  return table_lib.NGramTable.make(
    edge_token=edge_token,
    first_child=first_child,
    next_tokens=tokens,
    next_log_probs=log_probs,
    order=order,
    vocab_size=vocab_size,
  )


def table_of(texts: Sequence[Sequence[int]], kind: str) -> specdec.NGram:
  """Table of texts of the tiny models; all kinds of `TABLES` have one shape."""
  table = ngram_table(texts, tiny.VOCAB_SIZE, order=5, num_continuations=3)
  if kind != 'perfect':
    shape = table.next_tokens.shape
    log_probs = np.full(shape, sampling_lib.EXCLUDED, np.float32)
    if kind == 'wrong':
      log_probs[:, 0] = np.log(0.95)
    table = table.replace(
      next_tokens=jnp.full(shape, tiny.TABOO, jnp.int32),
      next_log_probs=jnp.asarray(log_probs),
    )
  return specdec.NGram(table)


class BigramTable(flax.struct.PyTreeNode, specdec.Proposer):
  """A proposer that is given for each token what follows it."""

  tokens: jax.Array  # `[V, C]` int32
  log_probs: jax.Array  # `[V, C]` float32
  name: str = flax.struct.field(pytree_node=False, default='bigram')

  @property
  def vocab_size(self) -> int:
    return self.tokens.shape[0]

  def propose(self, state, query):
    del state
    last = query.tree.token[query.nodes]
    return self.tokens[last], self.log_probs[last]


def exact(logits: np.ndarray, name: str = 'bigram') -> BigramTable:
  """All that a `table_model` with these `[V, V]` logits says."""
  tokens = np.broadcast_to(np.arange(logits.shape[1]), logits.shape)
  return BigramTable(
    tokens=jnp.asarray(tokens, jnp.int32),
    log_probs=jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)),
    name=name,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Settings of a stage, and of the tree if it is the outermost one."""

  num_nodes: int = 32
  width: int = 8
  branching: int = 4
  rounds: int = 4
  max_depth: int = 16
  capacity: int = 256
  calibration: float = 1.0
  cost_ratio: float | None = None
  topology: specdec.Topology | None = None

  def drafter(self, scorer: Any) -> specdec.Drafter:
    if self.topology is not None:
      return specdec.fixed_drafter(
        scorer, self.topology, calibration=self.calibration
      )
    of = lambda record: {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(record)
    }
    stage = specdec.Stage(
      scorer, specdec.StageConfig(**of(specdec.StageConfig))
    )
    return specdec.Drafter((stage,), specdec.TreeShape(**of(specdec.TreeShape)))


def model(
  draft: specdec.LanguageModel, config: Settings, name: str = 'draft'
) -> specdec.Drafter:
  """A language model that drafts."""
  return config.drafter(specdec.LanguageModelScorer(draft, name))


def candidates(*proposers, config: Settings) -> specdec.Drafter:
  """Proposers that draft."""
  return config.drafter(specdec.CandidateScorer(proposers))


# `cost_ratio` 0: a draft as large as its target would rarely pay.
TREE = Settings(
  num_nodes=12, width=4, branching=3, rounds=3, capacity=48, cost_ratio=0
)
INNER = Settings(width=4, branching=2, rounds=2, cost_ratio=0)


def simple(
  kind: str, draft: specdec.LanguageModel, *proposers: Any, length: int = 3
) -> specdec.Drafter:
  """Plain decoding, or a draft: a chain, a tree, or a tree around proposers."""
  chain_of_it = Settings(topology=topology_lib.chain(length))
  proposers = proposers or (specdec.PromptLookup((0.5,)),)
  return {
    'plain': lambda: specdec.PLAIN,
    'chain': lambda: model(draft, chain_of_it),
    'tree': lambda: model(draft, TREE),
    'staged': lambda: specdec.staged(
      model(draft, TREE), candidates(*proposers, config=INNER)
    ),
  }[kind]()


def target() -> specdec.LanguageModel:
  """A target of one layer; it compiles fast."""
  return tiny.gpt2(num_layers=1)


# Block drafters that are tables, and targets whose states they read. Such a
# drafter has marginals of each depth and an edge term. It knows a target by
# heart if the term is the target's table without its mean. A fault in what it
# is fed shows in what it drafts.


def _target_apply(params, tokens, positions, mask, cache):
  logits = params['logits'][tokens]
  return logits, cache_lib.write_hidden(cache, 0, logits)


def keeping_states(target: specdec.LanguageModel) -> specdec.LanguageModel:
  """A `table_model` that keeps its logits as hidden states."""
  init_cache = _init_hidden(target.spec.vocab_size)
  spec = dataclasses.replace(
    target.spec, apply=_target_apply, init_cache=init_cache, hidden=(0,)
  )
  return target.replace(spec=spec)


# Equal targets share their compiled programs, and equal drafters, too.


@functools.cache
def _init_hidden(size):
  def init_cache(batch_size, num_slots):
    empty = cache_lib.init_empty_cache(batch_size, num_slots)
    return cache_lib.with_hidden(empty, {0: size}, jnp.float32)

  return init_cache


@functools.cache
def _init_cache(size):
  return lambda rows, slots: cache_lib.init_cache(
    rows, slots, num_heads=1, head_widths=(size,), dtype=jnp.float32
  )


def _read(params, states, positions, cache):
  """Keys of text are the states, so that a wrong position shows."""
  del params, positions
  new = states[0][:, None]
  return cache_lib.write(cache, 0, new, new)


def _propose(params, tokens, positions, mask, cache):
  """The marginals; `states` are zeros.

  Where the last state of the text does not lead to the root, as it does in
  greedy text, the marginals are turned around.
  """
  del mask
  rows, root = len(tokens), tokens[:, :1]
  depth, size = params['marginals'].shape
  last = jnp.maximum(positions[:, 0] - 1, 0)[:, None, None]
  state = jnp.take_along_axis(cache.keys[0][:, 0], last, axis=1)[:, 0]
  leads = (jnp.argmax(state, axis=1, keepdims=True) == root)[:, :, None]
  marginals = params['marginals'][None]
  logits = jnp.where(leads, marginals, -4 * marginals)
  fed = jnp.zeros((rows, 1, tokens.shape[1], size))
  cache = cache_lib.write(cache, 0, fed, fed)
  return logits, jnp.zeros((rows, depth, 1)), cache


def _edges(params, states, parents, tokens):
  del states
  rows = params['edges'][parents]
  return jnp.take_along_axis(rows, tokens, axis=-1)


def block_table(
  marginals: np.ndarray, edges: np.ndarray | None = None, **changes
) -> block_lib.BlockScorer:
  """A drafter of marginals `[D, V]` and what a parent adds, `[V, V]`."""
  depth, size = marginals.shape
  params = {'marginals': jnp.float32(marginals)}
  if edges is not None:
    params['edges'] = jnp.float32(edges)
  spec = block_lib.BlockSpec(
    init_cache=_init_cache(size),
    vocab_size=size,
    max_positions=1000,
    weight_bytes=4 * size**2,
    cache_bytes_per_slot=4,
    read=_read,
    propose=_propose,
    edges=None if edges is None else _edges,
    reads=(0,),
    block_size=depth + 1,
    depth=depth,
    width=1,
    mask_token=0,
    num_outputs=size,
  )
  drafter = block_lib.BlockDrafter(params=params, spec=spec)
  return block_lib.BlockScorer(drafter, **changes)
