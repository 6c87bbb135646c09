"""Rules of verification in plain Python, one row at a time.

Randomness is data, which `randomness` and `child_noise` derive from the keys of
a step, independently of `specdec.sampling`. Every decision has a *margin*,
whose smallest is returned: the last digits of float32 are not float64's.
"""

import functools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np

from specdec import sampling as sampling_lib

ENOUGH = 1e-5
"""A decision with a smaller margin is not compared."""

# The last three of the numbers that `fold_in` takes as they are.
_DRAFTING, _ACCEPTANCE, _RESIDUAL = 2147483647, 2147483646, 2147483645


def randomness(keys, length, *, num_nodes, vocab_size):
  """The randomness of a step, by row keys `[B]` and lengths of the texts `[B]`.

  Keys for drawing children `[B]`, uniforms `[B, N]`, bonus noise `[B, V]`.
  """
  fold_in = jax.vmap(jax.random.fold_in)
  drafting, acceptance, residual = (
    fold_in(fold_in(keys, np.full(len(length), stream)), length)
    for stream in (_DRAFTING, _ACCEPTANCE, _RESIDUAL)
  )
  return (
    drafting,
    jax.vmap(lambda key: jax.random.uniform(key, (num_nodes,)))(acceptance),
    jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(residual),
  )


@functools.partial(
  enumeration.quick_jit, static_argnames=('num_nodes', 'shape')
)
def child_noise(keys, num_nodes, shape):
  """`[B, N, *shape]` of the children of each node, by keys `[B]` for drawing.

  The shape is `(V,)`, or `(K, V)` for K children drawn with replacement.
  """
  of_node = lambda key, node: jax.random.gumbel(
    jax.random.fold_in(key, node), shape
  )
  of_row = jax.vmap(of_node, (None, 0))
  return jax.vmap(of_row, (0, None))(keys, jnp.arange(num_nodes))


def _best(scores, number=1):
  """The largest entries in order, as far as finite, and the margin."""
  order = np.argsort(-scores, kind='stable')
  order = order[: np.sum(scores > -np.inf)]
  gaps = -np.diff(scores[order])[:number]
  # Entries that are equal are so on purpose: the first of them counts.
  return order[:number].tolist(), min(gaps[gaps > 0], default=np.inf)


def _log(probs):
  return np.log(probs, out=np.full(len(probs), -np.inf), where=probs > 0)


def _choose(probs, noise):
  [token], margin = _best(_log(probs / probs.sum()) + noise)
  return token, margin


def pick_children(probs, noise, number, stochastic, children):
  """Tokens of at most `number` children, and the margin.

  `probs [V]` are the draft's, `noise` that of the node, see `child_noise`.
  """
  if children == sampling_lib.BEST or not stochastic:
    return _best(_log(probs), number)
  if children == sampling_lib.WITHOUT_REPLACEMENT:
    return _best(_log(probs) + noise, number)
  drawn = [_choose(probs, of_child) for of_child in noise[:number]]
  return [token for token, _ in drawn], min(margin for _, margin in drawn)


def _is_accepted(uniform, prob):
  """Also the margin of that."""
  close = 0 < prob < 1 + ENOUGH
  return uniform < prob, abs(uniform - prob) if close else np.inf


def _without(left, token, children):
  if children != sampling_lib.WITHOUT_REPLACEMENT:
    return left
  left = np.where(np.arange(len(left)) == token, 0.0, left)
  return left / max(left.sum(), 1e-300)


def walk(parent, token, target, draft, uniforms, noise, stochastic, rule):
  """Goes down a tree, from sibling to sibling.

  `parent [N]` are places, `target [N, V]` and `draft [N, V]` distributions;
  `uniforms [N]`; `noise [V]` is of the bonus token. A rule that leaves nodes
  enters a child before it is accepted (traversal, arXiv 2505.12398). Returns
  the tokens, the places of the path, and the margin.
  """
  children, margins = rule.children, [np.inf]

  def passes(node, chance):
    accepted, gap = _is_accepted(uniforms[node], chance)
    margins.append(gap)
    return accepted

  def visit(node, weight):
    """The path from a node on and what is left at its end, or None."""
    wanted, left = target[node], draft[node]
    for child in np.flatnonzero(parent == node):
      proposed = token[child]
      is_drawn = stochastic and children != sampling_lib.BEST
      law = left if is_drawn else np.eye(len(left))[proposed]
      chance = weight * wanted[proposed] / law[proposed]
      below = None
      if rule.leaves_nodes:
        below = visit(child, min(1.0, chance))
      elif passes(child, chance):
        below = visit(child, 1.0)
      if below:
        return [node, *below[0]], below[1]
      rest = np.maximum(weight * wanted - law, 0.0)
      mass = rest.sum()
      if mass < 1e-6 and mass + 1.0 - weight < 1e-3:  # by rounding alone
        margins.append(0.0)
      weight = mass / max(mass + 1.0 - weight, 1e-300)
      wanted = rest / mass if mass > 1e-6 else wanted
      left = _without(left, proposed, children)
    accepted = not (node and rule.leaves_nodes) or passes(node, weight)
    return ([node], wanted) if accepted else None

  path, wanted = visit(0, 1.0)
  bonus, gap = _choose(wanted, noise)
  new = [*token[path[1:]].tolist(), bonus]
  return new, [*map(int, path)], min(*margins, gap)
