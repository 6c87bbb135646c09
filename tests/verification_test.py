"""What the target says about a tree, and the rule by which tokens are emitted.

The logits of every node must be those of its path alone.
"""

import jax
import jax.numpy as jnp
from list_trees import child
from list_trees import match_context
from list_trees import Node
from list_trees import shared_noise
from list_trees import stack
from list_trees import to_arrays
from list_trees import up
import numpy as np
import pytest
import tiny

from specdec import KVCache
from specdec import Sampling
from specdec.checks import check_sampling
from specdec.model import commit
from specdec.model import forward_nodes
from specdec.model import ModelState
from specdec.model import prefill
from specdec.sampling import choose
from specdec.tree.topology import TreeShape
from specdec.tree.tree import NO_NODE
from specdec.verify.accept import count_emitted
from specdec.verify.accept import count_valid
from specdec.verify.accept import emitted_origins
from specdec.verify.accept import EOS
from specdec.verify.accept import LIMIT
from specdec.verify.accept import NOT_FINITE
from specdec.verify.accept import RUNNING
from specdec.verify.accept import STOP
from specdec.verify.accept import Verdict
from specdec.verify.match import MatchRule

NUM_NODES = 16
MAX_DEPTH = 6
TEXT_LENGTH = 12
NUM_SLOTS = TEXT_LENGTH + NUM_NODES


@jax.jit
def _count_emitted(accepted, chosen, room, is_eos, is_stop, valid):
  verdict = Verdict(place=None, accepted=accepted, chosen=chosen)
  ends = jnp.where(is_eos, EOS, jnp.where(is_stop, STOP, RUNNING))
  return count_emitted(verdict, ends, valid, room)


@jax.jit
def _verify_with_logits(target, tokens, length, tree, noise, sampling):
  ctx = match_context(tokens, length, noise, sampling, shape=TreeShape())
  state = prefill(
    target,
    tokens,
    length - 1,
    num_slots=TEXT_LENGTH,
    window_size=NUM_NODES,
  )
  used = jnp.arange(NUM_NODES)[None] < tree.size[:, None]
  nodes = jnp.where(used, jnp.arange(NUM_NODES)[None], NO_NODE)
  scores, state = forward_nodes(target, state, tree, nodes, ctx, may_lag=False)
  logits = scores.logits
  verdict = MatchRule()(tree, nodes, logits, None, ctx.randomness, sampling)
  return verdict, logits, state.cache


@jax.jit
def _logits_of_sequences(target, tokens):
  """`[n, T]`, each alone."""
  return jax.lax.map(lambda row: target.logits(row[None])[0], tokens)


def _random_nodes(rng, root, size):
  nodes = [Node(root)]
  while len(nodes) < size:
    parent = int(
      rng.integers(max(0, len(nodes) - rng.integers(1, 8)), len(nodes))
    )
    if nodes[parent].depth < MAX_DEPTH:
      token = int(rng.integers(tiny.VOCAB_SIZE))
      nodes.append(child(nodes, parent, token, -1.0, 1))
  return nodes


def _case(seed):
  """Texts of three lengths, and a tree below each: full, ragged, root alone."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(tiny.VOCAB_SIZE, size=(3, TEXT_LENGTH))
  length = np.array([TEXT_LENGTH, 1, 7])
  sizes = (NUM_NODES, int(rng.integers(2, NUM_NODES)), 1)
  lists = [
    _random_nodes(rng, int(tokens[row, length[row] - 1]), size)
    for row, size in enumerate(sizes)
  ]
  noise = rng.gumbel(size=(3, MAX_DEPTH + 1, tiny.VOCAB_SIZE))
  return (
    tokens.astype(np.int32),
    length.astype(np.int32),
    lists,
    noise.astype(np.float32),
  )


def _logits_of_paths(target, tokens, length, lists):
  """`[B, N, V]`; a path at a time, behind its text."""
  batch_size = len(lists)
  sequences = np.zeros((batch_size, NUM_NODES, NUM_SLOTS), np.int32)
  last = np.zeros((batch_size, NUM_NODES), int)
  for row, nodes in enumerate(lists):
    for index in range(len(nodes)):
      path = [nodes[one].token for one in reversed(up(nodes, index))]
      text = [*tokens[row, : length[row] - 1], *path]
      sequences[row, index, : len(text)] = text
      last[row, index] = len(text) - 1
  flat = sequences.reshape(-1, NUM_SLOTS)
  logits = np.asarray(_logits_of_sequences(target, flat))
  logits = logits[np.arange(len(flat)), last.reshape(-1)]
  return logits.reshape(batch_size, NUM_NODES, -1)


def test_logits_in_a_tree_are_those_of_each_path_alone():
  target = tiny.gpt2()
  sampling = check_sampling(
    Sampling(temperature=[0.0, 1.0, 0.7]), 3, tiny.VOCAB_SIZE
  )
  depths_seen = set()
  for seed in range(3):
    tokens, length, lists, noise = _case(seed)
    tree = stack([to_arrays(nodes, NUM_NODES) for nodes in lists])
    verdict, logits, cache = _verify_with_logits(
      target, tokens, length, tree, noise, sampling
    )
    expected = _logits_of_paths(target, tokens, length, lists)
    scale = np.abs(expected).max()
    for row, nodes in enumerate(lists):
      size = len(nodes)
      np.testing.assert_allclose(
        logits[row, :size], expected[row, :size], rtol=0, atol=2e-6 * scale
      )
    # The noise is that of the depth, so the choice is that of the path.
    depths = np.asarray(tree.depth)
    by_node = np.stack([one[at] for one, at in zip(noise, depths, strict=True)])
    chosen = np.asarray(choose(expected, by_node, sampling))
    path = np.asarray(verdict.place)
    on_path = path >= 0
    np.testing.assert_array_equal(
      np.asarray(verdict.chosen)[on_path],
      np.take_along_axis(chosen, np.maximum(path, 0), axis=1)[on_path],
    )
    np.testing.assert_array_equal(cache.length, length - 1)
    depths_seen |= set(depths.ravel().tolist())
  assert depths_seen == set(range(MAX_DEPTH + 1))


def test_origins_by_hand():
  """Whoever proposed the next node of the path; nobody the bonus token."""
  nodes = [
    Node(0),
    Node(1, 0, 1, 0, 0, 3),
    Node(2, 0, 1, 0, 0, 1),
    Node(3, 2, 2, 0, 0, 2),
  ]
  tree = stack([to_arrays(nodes, 6)] * 3)
  verdict = Verdict(
    place=jnp.array([[0, 2, 3], [0, 1, NO_NODE], [0, NO_NODE, NO_NODE]]),
    accepted=jnp.array([2, 1, 0]),
    chosen=jnp.zeros((3, 3), jnp.int32),
  )
  nodes = jnp.tile(jnp.arange(6), (3, 1))
  assert emitted_origins(tree, nodes, verdict).tolist() == [
    [1, 2, 0],
    [3, 0, 0],
    [0, 0, 0],
  ]


@jax.jit
def _commit(state, path, num_kept):
  return commit(state, path, num_kept).cache


_COMMITS = [
  # Of nodes r, a, b, c, d, scored in this order, the path is r, b, d.
  ([0, 1, 2, 3, 4], 0, ['', 'r', 'rb', 'rbd']),
  # In another order; behind two tokens of text that were read late.
  ([-1, -1, 4, 0, 2], 2, ['xx', 'xxr', 'xxrb', 'xxrbd']),
  # The last was not scored in time.
  ([2, 0, 3, 1, -1], 0, ['', 'r', 'rb', 'rb']),
]


def test_commit_by_hand():
  """Of a path of three nodes 0 to 3 are emitted."""
  for window, read, kept in _COMMITS:
    _check_commit(window, read, kept)


def _check_commit(window, read, kept):
  slots = ''.join('x' if node < 0 else 'rabcd'[node] for node in window)
  letters = jnp.array([[ord(one) for one in f'text{slots}..']] * 4)
  array = letters[:, None, :, None].astype(jnp.float32)
  cache = KVCache(
    keys=(array,),
    values=(-array,),
    length=jnp.full(4, 4, jnp.int32),
    num_slots=array.shape[2],
  )
  state = ModelState(
    cache=cache,
    num_text=jnp.full(4, read, jnp.int32),
    window=jnp.tile(jnp.array(window), (4, 1)),
    used=jnp.array(len(window)),
  )
  after = _commit(state, jnp.array([[0, 2, 4]] * 4), jnp.array([-1, 0, 1, 2]))
  found = [
    ''.join(chr(int(one)) for one in row[0, :length, 0])
    for row, length in zip(after.keys[0], after.length, strict=True)
  ]
  assert found == [f'text{one}' for one in kept]
  np.testing.assert_array_equal(after.values[0], -after.keys[0])


def test_match_by_hand():
  """A path of two; choices depend on logits at 0, else on the depth's noise."""
  nodes = [Node(0), Node(1, 0, 1), Node(2, 0, 1), Node(3, 2, 2), Node(3, 1, 2)]
  tree = stack([to_arrays(nodes, 6)] * 2)
  # The choice after each node by its logits, and at each depth by noise.
  logits = 9 * jax.nn.one_hot(jnp.array([[2, 3, 3, 1, 5, 0]] * 2), 6)
  noise = 99 * jax.nn.one_hot(jnp.array([[0] * 3, [1, 3, 5]]), 6)
  verdict = MatchRule()(
    tree,
    jnp.tile(jnp.array([0, 1, 2, 3, 4, NO_NODE]), (2, 1)),
    logits,
    None,
    shared_noise(noise.at[0].set(0.0)),
    check_sampling(Sampling(temperature=[0.0, 1.0]), 2, 6),
  )
  assert verdict.accepted.tolist() == [2, 2]
  assert verdict.place.tolist() == [[0, 2, 3], [0, 1, 4]]
  assert verdict.chosen.tolist() == [[2, 3, 1], [1, 3, 5]]


def _slow_step(accepted, valid, room, tokens):
  """How many are emitted, and why the row ends; `tokens` are (eos, stop)."""
  for emitted, (is_eos, is_stop) in enumerate(tokens[: accepted + 1]):
    if emitted == room:
      return emitted, LIMIT
    if emitted == valid:
      return emitted, NOT_FINITE
    if is_eos:
      return emitted + 1, EOS
    if is_stop:
      return emitted + 1, STOP
  return accepted + 1, LIMIT if accepted + 1 == room else RUNNING


@pytest.mark.parametrize('ends', [0.0, 0.1])
@pytest.mark.parametrize('max_depth', [0, 1, 2, 5])
def test_the_stop_rule_against_a_loop(max_depth, ends):
  rng = np.random.default_rng(max_depth)
  num_rows = 4000
  shape = (num_rows, max_depth + 1)
  accepted = rng.integers(max_depth + 1, size=num_rows).astype(np.int32)
  room = rng.integers(max_depth + 4, size=num_rows).astype(np.int32)
  valid = rng.integers(2 * max_depth + 3, size=num_rows).astype(np.int32)
  is_eos, is_stop = rng.random(shape) < ends, rng.random(shape) < ends
  emitted, reason = _count_emitted(
    accepted, np.zeros(shape, np.int32), room, is_eos, is_stop, valid
  )
  expected = [
    _slow_step(*row, list(zip(eos, stop, strict=True)))
    for *row, eos, stop in zip(
      accepted.tolist(),
      valid.tolist(),
      room.tolist(),
      is_eos.tolist(),
      is_stop.tolist(),
      strict=True,
    )
  ]
  # Not as lists: pytest would explain how two of 4,000 differ for hours.
  np.testing.assert_array_equal(np.stack([emitted, reason], 1), expected)
  # The cases that matter were among them.
  assert {case[0] for case in expected} == set(range(max_depth + 2))
  reasons = {RUNNING, LIMIT, NOT_FINITE} | ({EOS, STOP} if ends else set())
  assert {case[1] for case in expected} == reasons


def test_the_stop_rule_by_hand():
  rows = [  # accepted, room, position of an EOS; emitted, why it ends
    (3, 9, None, 4, RUNNING),
    (2, 9, None, 3, RUNNING),
    (0, 9, None, 1, RUNNING),
    (1, 9, 1, 2, EOS),  # as the bonus token
    (3, 9, 1, 2, EOS),  # within the block
    (3, 2, None, 2, LIMIT),  # within the block
    (3, 0, None, 0, LIMIT),  # a row that is done
    (3, 9, 3, 4, EOS),  # the last token of a full block
    (1, 9, 2, 2, RUNNING),  # behind the bonus token: never said
    (3, 3, 2, 3, EOS),  # the last that there was room for
  ]
  accepted, room, eos, emitted, reason = zip(*rows, strict=True)
  at = np.array([-1 if one is None else one for one in eos])
  is_eos = np.arange(4)[None] == at[:, None]
  result = _count_emitted(
    np.array(accepted, np.int32),
    np.zeros((len(rows), 4), np.int32),
    np.array(room, np.int32),
    is_eos,
    np.zeros_like(is_eos),
    np.full(len(rows), 4, np.int32),
  )
  assert result[0].tolist() == list(emitted)
  assert result[1].tolist() == list(reason)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_logits_count_as_far_as_they_are_numbers(bad):
  logits = np.zeros((5, 4, 6), np.float32)
  logits[:, :, 2] = -np.inf  # a token that is never chosen
  logits[1, 0, 3] = bad  # the root
  logits[2, 3, 5] = bad  # the last of the path
  logits[3, 1, 0] = bad  # off the path
  logits[4, 2] = -np.inf  # no token can be chosen
  path = np.array([[0, 2, 3]] * 5)
  verdict = Verdict(
    place=path, accepted=np.full(5, 2), chosen=np.zeros((5, 3), np.int32)
  )
  assert count_valid(logits, verdict).tolist() == [3, 0, 2, 3, 1]
  # Where the path has ended, nothing is asked of the logits.
  short = np.array([[0, NO_NODE, NO_NODE]] * 5)
  valid = count_valid(logits, verdict.replace(place=short))
  assert valid.tolist() == [3, 0, 3, 3, 3]
