"""How often guesses stand, by rule, beside what theory says.

One token is guessed at a time (trees of depth 1), so that every target forward
tries one position, with all children there. Theory is computed at those very
positions, from the distributions of target and draft there.
"""

from collections.abc import Sequence
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from models.generator import Generator
import specdec
from specdec import law
from specdec.arguments import check_sampling
from specdec.topology import chain
from specdec.topology import k_ary
from specdec.topology import Topology
from specdec.verification.rejection import BEST
from specdec.verification.rejection import WITH_REPLACEMENT
from specdec.verification.rejection import WITHOUT_REPLACEMENT


@dataclasses.dataclass(frozen=True)
class Rule:
  """A way to verify, see `specdec.request.DecodeConfig`."""

  verify: str
  children: str | None = None

  def __str__(self):
    return self.verify + (f', {self.children}' if self.children else '')


RULES = (
  Rule('match'),
  Rule('rejection', WITHOUT_REPLACEMENT),
  Rule('rejection', WITH_REPLACEMENT),
  Rule('rejection', BEST),
)
BLOCK = Rule('block', WITHOUT_REPLACEMENT)


@jax.jit
def theory(target: jax.Array, draft: jax.Array) -> dict[str, jax.Array]:
  """Chances that one guess stands, at each of some positions.

  Args:
    target: `[n, V]`, distributions.
    draft: `[n, V]`, likewise.

  Returns:
    `[n]` each: `1 - TV`, rejection of a draw; `coupled`, match, draft and
    target choosing with the same Gumbel noise (arXiv 2408.07978), and its
    lower bound `(1 - TV)/(1 + TV)`; `sum p q`, were their noises independent;
    `p(best)`, the draft's likeliest token taken as it is.
  """
  common = jnp.sum(jnp.minimum(target, draft), axis=1)
  best = jnp.argmax(draft, axis=1)
  # sum_j 1 / sum_i max(p_i / p_j, q_i / q_j): the greater of the two is the
  # first where p_i / q_i >= p_j / q_j, so sorting by that ratio gives all sums.
  ratio = jnp.where(draft > 0, target / jnp.maximum(draft, 1e-37), jnp.inf)
  order = jnp.argsort(ratio, axis=1)
  p = jnp.take_along_axis(target, order, axis=1)
  q = jnp.take_along_axis(draft, order, axis=1)
  p_from = jnp.flip(jnp.cumsum(jnp.flip(p, 1), axis=1), 1)
  q_before = jnp.cumsum(q, axis=1) - q
  both = (p > 0) & (q > 0)
  share = lambda mass, own: mass / jnp.where(both, own, 1.0)
  coupled = jnp.where(both, 1 / (share(p_from, p) + share(q_before, q)), 0.0)
  return {
    '1 - TV': common,
    'coupled': jnp.sum(coupled, axis=1),
    '(1 - TV)/(1 + TV)': common / (2 - common),
    'sum p q': jnp.sum(target * draft, axis=1),
    'p(best)': jnp.take_along_axis(target, best[:, None], axis=1)[:, 0],
  }


def _with_topology(generator: Generator, topology: Topology) -> Generator:
  draft = generator.pair.draft
  if draft is None:
    raise ValueError('acceptance needs a draft; give --draft')
  drafter = specdec.Drafter(
    specdec.LanguageModelScorer(draft), specdec.TreeConfig(topology=topology)
  )
  return dataclasses.replace(generator, drafter=drafter)


def _tried(origins: Sequence[int]) -> np.ndarray:
  """Which of a row's tokens were the first that a target forward tried."""
  # After a token of the target itself a new forward begins.
  before = np.concatenate([[0], origins[:-1]])
  return before == 0


def measure(
  generator: Generator,
  prompts: Sequence[str],
  *,
  sampling: specdec.Sampling,
  seed: int,
  batch_size: int,
  max_new_tokens: int,
  numbers_of_children: Sequence[int],
  chain_length: int,
) -> dict[str, Any]:
  """Decodes all prompts by every rule.

  Args:
    generator: with a draft; its drafter is not used.
    prompts: texts; a last batch that would not be full is left out.
    sampling: not greedy, where all rules are one.
    seed: of the first batch; the next has the next.
    batch_size: prompts decoded together.
    max_new_tokens: the limit per row.
    numbers_of_children: of the trees of depth 1.
    chain_length: of the chains that block efficiency is measured on.

  Returns:
    `acceptance` by number of children and rule: `measured`, the share of target
    forwards in which a guess stood, `standard_error` and `forwards`; for one
    child also `theory`, the means of `theory` over the positions that were
    tried. And `block_efficiency` of the chain by rule.

  Raises:
    ValueError: there is no draft, or decoding is greedy.
  """
  if not np.all(np.asarray(sampling.temperature) > 0):
    raise ValueError('acceptance of sampling needs --temperature above 0')
  starts = range(0, len(prompts) - batch_size + 1, batch_size)

  def decode(topology, rule):
    drafted = _with_topology(generator, topology)
    what = f'{topology.branching} x {topology.depth}, {rule}'
    for start in tqdm.tqdm(starts, desc=what, unit='batch', file=sys.stderr):
      yield drafted.generate(
        prompts[start : start + batch_size],
        seed=seed + start,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        verify=rule.verify,
        children=rule.children,
        eos_ids=(),
      )

  def probs_of(model, ids):
    one = check_sampling(sampling, 1, model.definition.vocab_size)
    return law.distributions(model, law.padded(ids), one)

  def expected(result, row, tried):
    """The theory at the positions of a row that were tried."""
    ids = [*result.prompt_tokens[row], *result.tokens[row]]
    at = len(result.prompt_tokens[row]) - 1 + np.flatnonzero(tried)
    target = probs_of(generator.pair.target, ids)[at]
    return theory(target, probs_of(generator.pair.draft, ids)[at])

  acceptance: dict[str, dict[str, Any]] = {}
  for number in numbers_of_children:
    acceptance[str(number)] = by_rule = {}
    for rule in RULES:
      stood, chances = [], []
      for result in decode(k_ary(number, 1), rule):
        for row, origins in enumerate(result.origins):
          tried = _tried(origins)
          stood.append(np.asarray(origins)[tried] > 0)
          if number == 1:
            chances.append(jax.device_get(expected(result, row, tried)))
      all_stood = np.concatenate(stood)
      found: dict[str, Any] = {
        'measured': float(all_stood.mean()),
        'standard_error': float(all_stood.std() / np.sqrt(all_stood.size)),
        'forwards': all_stood.size,
      }
      by_rule[str(rule)] = found
      if chances:
        found['theory'] = {
          name: float(np.concatenate([one[name] for one in chances]).mean())
          for name in chances[0]
        }
  efficiency = {}
  for rule in (*RULES, BLOCK):
    results = list(decode(chain(chain_length), rule))
    total = lambda name: sum(one.stats[name] for one in results)  # noqa: B023
    efficiency[str(rule)] = total('new_tokens') / total('target_forwards')
  return {'acceptance': acceptance, 'block_efficiency': efficiency}


# What the theory of each rule is, for one child.
_THEORY = {
  'match': 'coupled',
  f'rejection, {WITHOUT_REPLACEMENT}': '1 - TV',
  f'rejection, {WITH_REPLACEMENT}': '1 - TV',
  f'rejection, {BEST}': 'p(best)',
}


def table(figures: dict[str, Any]) -> str:
  """The figures as Markdown."""
  numbers = list(figures['acceptance'])
  rows = [
    [
      'rule',
      'theory, 1 child',
      *(f'measured, {number} children' for number in numbers),
      'chain: tokens per forward',
    ]
  ]
  rows.append(['---'] * len(rows[0]))
  for rule, efficiency in figures['block_efficiency'].items():
    cells = []
    for number in numbers:
      one = figures['acceptance'][number].get(rule)
      cells.append(
        f'{one["measured"]:.3f} ± {one["standard_error"]:.3f}' if one else ''
      )
    theory_of = figures['acceptance'].get('1', {}).get(rule, {}).get('theory')
    name = _THEORY.get(rule)
    expected = f'{name} = {theory_of[name]:.3f}' if theory_of and name else ''
    rows.append([rule, expected, *cells, f'{efficiency:.2f}'])
  lines = [f'| {" | ".join(row)} |' for row in rows]
  first = figures['acceptance'].get('1', {}).get('match', {}).get('theory')
  if first:
    lines += ['', 'Means over the positions that match tried: '] + [
      ', '.join(f'{name} = {value:.3f}' for name, value in first.items())
    ]
  return '\n'.join(lines)
