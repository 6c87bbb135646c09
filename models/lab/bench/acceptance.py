"""Measures how often rules of verification accept, beside the most possible.

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
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import sys
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

import specdec
from specdec import arguments as arguments_lib
from specdec import mappings
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import exactness
from specdec.models.text import generator as generator_lib
from specdec.models.text import result as result_lib
from specdec.tree import topology as topology_lib

# The logarithms of the times of `_without_replacement`, and their distance.
_STEP = 0.3
_LOG_TIMES = np.arange(-33.0, 4.0, _STEP)
_MOST_DRAWN = 100  # tokens, as it takes the square of their number
_CHUNK = 256  # positions at a time


class Verification(NamedTuple):
  """Arguments of `specdec.generate`, and the `theory` for a single child."""

  verify: str
  children: str | None
  theory: str

  def __str__(self):
    return self.verify + (f', {self.children}' if self.children else '')


_RULES = (
  Verification('match', None, 'coupled'),
  Verification('rejection', sampling_lib.WITHOUT_REPLACEMENT, '1 - TV'),
  Verification('rejection', sampling_lib.WITH_REPLACEMENT, '1 - TV'),
  Verification('rejection', sampling_lib.BEST_AND_DRAWN, '1 - TV'),
  Verification('rejection', sampling_lib.BEST, 'p(best)'),
)


@mappings.jit()
def theory(target: jax.Array, draft: jax.Array) -> dict[str, jax.Array]:
  """Acceptance probabilities of a single draft token, at each of n positions.

  Args:
    target: `[n, V]`, distributions.
    draft: `[n, V]`, distributions.

  Returns:
    `[n]` each: `1 - TV`, rejection sampling; `coupled`, match, where draft and
    target choose with the same Gumbel noise (arXiv 2408.07978);
    `p(best)`, the draft's most likely token instead of a draw.
  """
  common = jnp.sum(jnp.minimum(target, draft), axis=1)
  best = jnp.argmax(draft, axis=1)
  # sum_j 1 / sum_i max(p_i / p_j, q_i / q_j): the maximum is the first term if
  # p_i / q_i >= p_j / q_j, so that sorting by that ratio gives all sums.
  ratio = jnp.where(draft > 0, target / jnp.maximum(draft, 1e-37), jnp.inf)
  order = jnp.argsort(ratio, axis=1)
  p, q = (jnp.take_along_axis(x, order, axis=1) for x in (target, draft))
  p_from = jnp.flip(jnp.cumsum(jnp.flip(p, 1), axis=1), 1)
  q_before = jnp.cumsum(q, axis=1) - q
  both = (p > 0) & (q > 0)
  share = lambda mass, prob: mass / jnp.where(both, prob, 1.0)
  coupled = jnp.where(both, 1 / (share(p_from, p) + share(q_before, q)), 0.0)
  return {
    '1 - TV': common,
    'coupled': jnp.sum(coupled, axis=1),
    'p(best)': jnp.take_along_axis(target, best[:, None], axis=1)[:, 0],
  }


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


def _acceptance(
  results: Iterable[result_lib.TextGeneration],
  probs_of: Any,
  number: int,
  rule: Verification,
) -> dict[str, Any]:
  """Acceptance of one of the first draft tokens of each target forward."""
  accepted: list[np.ndarray] = []
  expected: list[dict[str, np.ndarray]] = []
  for result in results:
    rows = zip(result.prompt_tokens, result.tokens, result.origins, strict=True)
    for prompt, tokens, origins in rows:
      # Origin 0 is the target, whose token is the last of its forward.
      first = np.concatenate([[0], origins[:-1]]) == 0
      accepted.append(np.asarray(origins)[first] > 0)
      positions = len(prompt) - 1 + np.flatnonzero(first)
      found: dict[str, np.ndarray] = {}
      target, draft = map(np.asarray, probs_of([*prompt, *tokens]))
      if number == 1:
        # Padded to a power of two, so that few shapes are compiled.
        padded = np.resize(positions, 1 << (positions.size - 1).bit_length())
        rates = jax.device_get(theory(target[padded], draft[padded]))
        found = {name: rate[: positions.size] for name, rate in rates.items()}
      if rule.children is not None:
        found['most'] = one_step(
          target[positions], draft[positions], number, rule.children
        )
      expected.append(found)
  pooled = np.concatenate(accepted)
  figures: dict[str, Any] = {
    'measured': float(pooled.mean()),
    'standard_error': float(pooled.std() / np.sqrt(pooled.size)),
    'forwards': pooled.size,
  }
  means = jax.tree.map(lambda *rows: np.concatenate(rows).mean(), *expected)
  figures['theory'] = {name: float(mean) for name, mean in means.items()}
  return figures


def _decode_batches(
  generator: generator_lib.Generator,
  draft: model_lib.LanguageModel,
  prompts: Sequence[str],
  number: int,
  rule: Verification,
  *,
  task: task_lib.Task,
) -> Iterable[result_lib.TextGeneration]:
  """Decodes with so many children; the last batch only if it is full."""
  scorer = specdec.LanguageModelScorer(draft)
  drafter = specdec.fixed_drafter(scorer, topology_lib.k_ary(number, 1))
  drafted = dataclasses.replace(generator, drafter=drafter)
  starts = range(0, len(prompts) - task.batch_size + 1, task.batch_size)
  title = f'{number}, {rule}'
  for start in tqdm.tqdm(starts, desc=title, unit='batch', file=sys.stderr):
    yield drafted.generate(
      prompts[start : start + task.batch_size],
      seed=task.seed + start,
      verify=rule.verify,
      children=rule.children,
      eos_ids=(),
      sampling=task.sampling,
      max_new_tokens=task.max_new_tokens,
    )


def measure(
  generator: generator_lib.Generator,
  prompts: Sequence[str],
  task: task_lib.Task,
  *,
  numbers_of_children: Sequence[int],
) -> dict[str, Any]:
  """Measures how often each rule of verification accepts.

  The drafter of the generator is not used: trees of depth 1 have the numbers of
  children. With children alone traversal is rejection. A last batch that is not
  full is left out. The seed of the batch from prompt i on is seed + i.

  Returns:
    By number of children and rule: `measured`, the share of target forwards
    that accepted a draft token, `standard_error`, `forwards` and `theory`,
    means over the same positions: `most`, see `one_step`, and for one
    child those of `theory`.

  Raises:
    ValueError: there is no draft, decoding is greedy, or there are too few
      prompts for a batch.
  """
  pair, draft = generator.pair, generator.pair.draft
  if not np.all(np.asarray(task.sampling.temperature) > 0):
    raise ValueError('acceptance of sampling needs --temperature above 0')
  if draft is None:
    raise ValueError('acceptance needs a draft; give --draft')
  if len(prompts) < task.batch_size:
    raise ValueError(
      f'--batch_size={task.batch_size} needs as many prompts, got'
      f' {len(prompts)}'
    )
  decode = functools.partial(
    _decode_batches, generator, draft, prompts, task=task
  )
  size = pair.target.spec.vocab_size
  sampling = arguments_lib.to_params(task.sampling, 1, size)
  probs_of = lambda ids: [
    exactness.distributions(model, exactness.padded(ids), sampling)
    for model in (pair.target, draft)
  ]
  accepted = lambda n, rule: _acceptance(decode(n, rule), probs_of, n, rule)
  return {
    str(n): {str(rule): accepted(n, rule) for rule in _RULES}
    for n in numbers_of_children
  }


def rows(figures: dict[str, Any]) -> list[dict[str, str]]:
  """The rows of a table of the figures of `measure`."""
  table = []
  for rule in _RULES:
    row = {'rule': str(rule), 'theory, 1 child': ''}
    for number, by_rule in figures.items():
      found = by_rule[str(rule)]
      shown = f'{found["measured"]:.3f} ± {found["standard_error"]:.3f}'
      row[f'measured, {number} children'] = shown
      most = found['theory'].get('most', np.nan)
      row[f'most, {number}'] = f'{most:.3f}' if np.isfinite(most) else ''
      if rule.theory in found['theory']:
        value = found['theory'][rule.theory]
        row['theory, 1 child'] = f'{rule.theory} = {value:.3f}'
    table.append(row)
  return table
