"""The most that any lossless rule of verification can accept in one step.

Children of a node are a random set S, and the target wants a random token. A
rule is a coupling of both, which accepts if the token is in S. By max-flow and
min-cut (arXiv 2502.18779) the best coupling accepts with the probability

    1 + min over sets H of tokens of ( p(H) - P(S is within H) )

where p is the target's distribution. The minimum is at a set of the tokens
with the least p/q, q being the draft's distribution.

On a tree that does not depend on the target's noise, such as one of the best
children, no rule accepts more tokens than the sum over the nodes of the
target's probabilities of the paths to them: rejection reaches that.
"""

from collections.abc import Callable

import numpy as np

from specdec import sampling as sampling_lib

# The logarithms of the times of `_without_replacement`, and their distance.
_STEP = 0.3
_LOG_TIMES = np.arange(-33.0, 4.0, _STEP)
_MOST_DRAWN = 100  # tokens, as it takes the square of their number
_CHUNK = 256  # positions at a time


def _apart(p: np.ndarray, q: np.ndarray, number: int) -> np.ndarray:
  """How often rejection accepts the best children and one drawn, `[n]`."""
  order = np.argsort(-q, axis=1, kind='stable')
  p, q = (np.take_along_axis(array, order, axis=1) for array in (p, q))
  best, rest = p[:, : number - 1].sum(1), q[:, number - 1 :]
  total = rest.sum(1, keepdims=True)
  rest = np.where(total > 0, rest / np.where(total > 0, total, 1.0), 0.0)
  # Where nothing is left to draw, the best children are all there are.
  return best + np.minimum(p[:, number - 1 :], rest).sum(1)


def _best(p: np.ndarray, q: np.ndarray, number: int) -> np.ndarray:
  """The target's probability of the best children together, `[n]`."""
  order = np.argsort(-q, axis=1, kind='stable')[:, :number]
  possible = np.take_along_axis(q, order, axis=1) > 0
  return (np.take_along_axis(p, order, axis=1) * possible).sum(1)


def _with_replacement(q: np.ndarray, number: int) -> np.ndarray:
  """`[n, V]`, the probability that all draws are among the first tokens."""
  return np.minimum(np.cumsum(q, axis=1), 1.0) ** number


def _without_replacement(q: np.ndarray, number: int) -> np.ndarray:
  """As `_with_replacement`; fewer are drawn if there are fewer.

  Draws without replacement are the order in which clocks of rates q ring. So
  this is the probability that K of the clocks of the first tokens ring before
  any other, whose first one rings at the rate r of what they have left: the
  integral of x exp(-x) P(K have rung at the time x / r) over log(x). By the
  trapezoid rule it is exact except for rounding.
  """
  x = np.exp(_LOG_TIMES)
  weights = _STEP * x * np.exp(-x)
  mass = np.cumsum(q, axis=1)
  found = np.ones(q.shape)
  for last in range(q.shape[1]):
    rate = 1.0 - mass[:, last]
    inner = rate > 1e-12  # or all that can be drawn is in H
    times = x / np.where(inner, rate, 1.0)[:, None]
    rung = -np.expm1(-q[:, : last + 1, None] * times[:, None])
    fewer = np.zeros((number, *times.shape))  # by how many have rung
    fewer[0] = 1.0
    for prob in np.moveaxis(rung, 1, 0):
      fewer[1:] = fewer[1:] * (1.0 - prob) + fewer[:-1] * prob
      fewer[0] *= 1.0 - prob
    enough = (1.0 - fewer.sum(0)) @ weights
    found[:, last] = np.where(inner, enough, 1.0)
  return found


_WITHIN: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
  sampling_lib.WITH_REPLACEMENT: _with_replacement,
  sampling_lib.WITHOUT_REPLACEMENT: _without_replacement,
}


def one_step(
  target: np.ndarray, draft: np.ndarray, number: int, children: str
) -> np.ndarray:
  """The most that is accepted of K children of one node.

  Args:
    target: `[n, V]`, distributions.
    draft: `[n, V]`, distributions.
    number: K.
    children: one of `sampling.CHILDREN`.

  Returns:
    `[n]` float64, probabilities; NaN for several draws without replacement
    among more than 100 tokens.
  """
  starts = range(0, len(target), _CHUNK)
  rows = [slice(start, start + _CHUNK) for start in starts]
  found = [
    _one_step(
      np.asarray(target[some]), np.asarray(draft[some]), number, children
    )
    for some in rows
  ]
  return np.concatenate([np.zeros(0), *found])


def _one_step(
  target: np.ndarray, draft: np.ndarray, number: int, children: str
) -> np.ndarray:
  p, q = target.astype(np.float64), draft.astype(np.float64)
  if number == 1 and children == sampling_lib.WITHOUT_REPLACEMENT:
    children = sampling_lib.WITH_REPLACEMENT
  if children == sampling_lib.BEST:
    return _best(p, q, number)
  if children == sampling_lib.BEST_AND_DRAWN:
    return _apart(p, q, number)
  # Tokens that are never drawn come last; their order does not matter.
  ratio = np.where(q > 0, p / np.where(q > 0, q, 1.0), np.inf)
  order = np.argsort(ratio, axis=1)
  p, q = (np.take_along_axis(array, order, axis=1) for array in (p, q))
  num_drawn = int((q > 0).sum(1).max())
  p, q = p[:, :num_drawn], q[:, :num_drawn]
  if children == sampling_lib.WITHOUT_REPLACEMENT and num_drawn > _MOST_DRAWN:
    return np.full(len(p), np.nan)
  spare = np.cumsum(p, axis=1) - _WITHIN[children](q, number)
  return 1.0 + np.minimum(spare.min(1), 0.0)
