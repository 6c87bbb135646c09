"""Rejection verification in plain Python, with the randomness of `specdec`.

How that is keyed is spelled out here once more: streams that are not what they
should be, or used twice, are noticed. Every function also says by how small a
*margin* it decided, as the last figures of float32 are not those of float64.
"""

import functools

from enumeration import quick_jit
import jax
import jax.numpy as jnp
import numpy as np

from specdec.sampling import BEST
from specdec.sampling import WITH_REPLACEMENT
from specdec.sampling import WITHOUT_REPLACEMENT

ENOUGH = 1e-5
"""A margin below this decides nothing."""

# The last three of the numbers that `fold_in` takes as they are.
_DRAFTING, _ACCEPTANCE, _RESIDUAL = 2147483647, 2147483646, 2147483645


@functools.partial(quick_jit, static_argnames=('num_nodes', 'shape'))
def _randomness(keys, length, *, num_nodes, shape):
  """Of `[B]` rows that have `length [B]` tokens when the step begins."""

  def of_row(key, length):
    stream = lambda number: jax.random.fold_in(
      jax.random.fold_in(key, number), length
    )
    of_node = lambda node: jax.random.gumbel(
      jax.random.fold_in(stream(_DRAFTING), node), shape
    )
    return (
      jax.random.uniform(stream(_ACCEPTANCE), (num_nodes,)),
      jax.random.gumbel(stream(_RESIDUAL), shape[-1:]),
      jax.vmap(of_node)(jnp.arange(num_nodes)),
    )

  return jax.vmap(of_row)(keys, length)


def randomness(keys, length, *, num_nodes, vocab_size, children, number):
  """What a step of each row draws from.

  Args:
    keys: `[B]`.
    length: `[B]`, of the texts.
    num_nodes: N.
    vocab_size: V.
    children: as in `rejection`.
    number: of children of each node.

  Returns:
    `[B, N]` lots, `[B, V]` noise of the bonus token, and `[B, N, V]` noise of
    the children of each node, `[B, N, number, V]` with replacement.
  """
  shape = (vocab_size,)
  if children == WITH_REPLACEMENT:
    shape = (number, vocab_size)
  found = _randomness(keys, length, num_nodes=num_nodes, shape=shape)
  return [np.asarray(one, np.float64) for one in found]


def _best(scores, number=1):
  """The largest entries in order, as far as finite, and the margin."""
  order = np.argsort(-scores, kind='stable')
  order = order[: np.sum(scores > -np.inf)]
  gaps = -np.diff(scores[order])[:number]
  # Equal ones are meant to be equal: then it is the first.
  gaps = gaps[gaps > 0]
  return order[:number].tolist(), gaps.min() if gaps.size else np.inf


def _log(probs):
  return np.log(probs, out=np.full(len(probs), -np.inf), where=probs > 0)


def pick_children(probs, noise, number, *, hot, children):
  """Tokens of at most `number` children, and the margin.

  Args:
    probs: `[V]`, the draft's.
    noise: of the node, see `randomness`.
    number: K.
    hot: whether the temperature is above 0.
    children: as in `rejection`.
  """
  if children == BEST or not hot:
    return _best(_log(probs), number)
  if children == WITHOUT_REPLACEMENT:
    return _best(_log(probs) + noise, number)
  drawn = [_best(_log(probs) + one) for one in noise[:number]]
  return [one for [one], _ in drawn], min(margin for _, margin in drawn)


def _choose(probs, noise):
  [token], margin = _best(_log(probs) + noise)
  return token, margin


def walk(parent, token, target, draft, lots, noise, *, hot, children):
  """Down a tree, from sibling to sibling.

  Args:
    parent: `[N]`.
    token: `[N]`.
    target: `[N, V]`, the distributions.
    draft: `[N, V]`, likewise.
    lots: `[N]`.
    noise: `[V]`, of the bonus token.
    hot: whether the temperature is above 0.
    children: as in `rejection`.

  Returns:
    The tokens, the path of nodes, and the margin.
  """
  node, path, said, margin = 0, [0], [], np.inf
  wanted, left = target[0], draft[0]
  while True:
    for child in np.flatnonzero(parent == node):
      guess = token[child]
      given = left if hot and children != BEST else np.eye(len(wanted))[guess]
      chance = wanted[guess] / given[guess]
      if 0 < chance < 1 + ENOUGH:
        margin = min(margin, abs(lots[child] - chance))
      if lots[child] < chance:
        said.append(int(guess))
        path.append(int(child))
        node, wanted, left = child, target[child], draft[child]
        break
      rest = np.maximum(wanted - given, 0.0)
      if rest.sum() < 1e-6:  # by rounding alone
        margin = 0.0
        rest = wanted
      wanted = rest / rest.sum()
      if children == WITHOUT_REPLACEMENT:
        left = np.where(np.arange(len(left)) == guess, 0.0, left)
        left = left / max(left.sum(), 1e-300)
    else:
      bonus, gap = _choose(wanted, noise)
      return [*said, bonus], path, min(margin, gap)


def walk_block(token, target, draft, lots, noise, *, hot, children):
  """Along a chain; see `walk`. Literally algorithm 2 of arXiv 2403.10444."""
  number = len(token) - 1
  if not hot or children == BEST:
    draft = np.eye(target.shape[1])[[*token[1:], 0]]
  accepted, weight, margin = 0, 1.0, np.inf
  rest_of_0 = np.maximum(target[0] - draft[0], 0.0) if number else None
  for depth in range(1, number + 1):
    guess = token[depth]
    weight *= target[depth - 1, guess] / draft[depth - 1, guess]
    weight = min(weight, 1.0)
    if depth == number:
      chance = weight
    else:
      mass = np.maximum(weight * target[depth] - draft[depth], 0.0).sum()
      whole = mass + 1 - weight
      if 0 < whole < 1e-6:
        margin = 0.0
      chance = mass / whole if whole > 0 else 1.0
    if 0 < chance < 1 + ENOUGH:
      margin = min(margin, abs(lots[depth] - chance))
    if lots[depth] < chance:
      accepted, weight_there = depth, weight
  if accepted == number:
    wanted = target[number]
  elif accepted == 0:
    wanted = rest_of_0
  else:
    wanted = weight_there * target[accepted] - draft[accepted]
    wanted = np.maximum(wanted, 0.0)
  if wanted.sum() < 1e-6:
    margin, wanted = 0.0, target[accepted]
  bonus, gap = _choose(wanted / wanted.sum(), noise)
  said = [int(one) for one in token[1 : accepted + 1]]
  return [*said, bonus], list(range(accepted + 1)), min(margin, gap)
