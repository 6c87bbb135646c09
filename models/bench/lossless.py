"""Checks that speculative decoding preserves the output of the target.

With `verify='match'` the tokens must equal those of plain decoding; with the
other rules their distribution must be that of the target. `measure` compares
the acceptance rates of the rules with theory.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from models.text.generator import Generator
from models.text.generator import row_keys
from models.text.result import TextGeneration
import specdec
from specdec.checks import check_sampling
from specdec.sampling import BEST
from specdec.sampling import WITH_REPLACEMENT
from specdec.sampling import WITHOUT_REPLACEMENT
from specdec.study import exactness
from specdec.study.timing import first_difference
from specdec.tree.topology import chain
from specdec.tree.topology import k_ary
from specdec.tree.topology import Topology

# The probability that a correct sampler fails, all tests of a check together.
_SIGNIFICANCE = 1e-3
_FEWEST_TOKENS = 500


@dataclasses.dataclass(frozen=True)
class Divergence:
  """The first difference of a row from plain decoding.

  Attributes:
    prompt: its number.
    offset: of the first new token that differs.
    plain: at most three tokens of plain decoding from there on.
    drafted: at most three tokens of speculative decoding from there on.
    margin: between the two best scores there; rounding can reverse their order
      if it is small.
  """

  prompt: int
  offset: int
  plain: list[int]
  drafted: list[int]
  margin: float

  def __str__(self):
    return (
      f'prompt {self.prompt}, new token {self.offset}: plain {self.plain}...,'
      f' drafted {self.drafted}..., margin {self.margin:.2g}'
    )


@dataclasses.dataclass(frozen=True)
class TokenCheck:
  """Comparison of tokens with those of plain decoding, at one batch size.

  Attributes:
    batch_size: of speculative decoding; plain decoding has 1.
    num_prompts: number of prompts.
    num_tokens: of plain decoding.
    block_efficiency: tokens per target forward of speculative decoding.
    divergences: rows that differ.
    max_margin: the largest margin that rounding may explain.
  """

  batch_size: int
  num_prompts: int
  num_tokens: int
  block_efficiency: float
  divergences: list[Divergence]
  max_margin: float

  @property
  def passed(self) -> bool:
    """Whether rounding explains all divergences."""
    return all(row.margin <= self.max_margin for row in self.divergences)

  def __str__(self):
    first = (
      f'{"ok" if self.passed else "FAILED"}: batch {self.batch_size},'
      f' {self.num_prompts} prompts, {self.num_tokens} tokens,'
      f' {self.block_efficiency:.2f} per target forward:'
      f' {len(self.divergences)} divergences'
    )
    return '\n  '.join([first, *map(str, self.divergences)])


@dataclasses.dataclass(frozen=True)
class DistributionCheck:
  """Goodness-of-fit tests of the tokens, see `specdec.study.exactness`.

  Attributes:
    batch_size: prompts decoded together.
    num_tokens: tested.
    block_efficiency: tokens per target forward.
    p_values: by test.
    impossible: prompt and offset of tokens with target probability 0.
  """

  batch_size: int
  num_tokens: int
  block_efficiency: float
  p_values: dict[str, float]
  impossible: list[tuple[int, int]]

  @property
  def passed(self) -> bool:
    """Whether no test rejects the distribution of the target."""
    bound = _SIGNIFICANCE / len(self.p_values)
    return not self.impossible and min(self.p_values.values()) >= bound

  def __str__(self):
    tests = ', '.join(f'{name} {p:.3g}' for name, p in self.p_values.items())
    first = f', the first at {self.impossible[0]}' if self.impossible else ''
    return (
      f'{"ok" if self.passed else "FAILED"}: batch {self.batch_size},'
      f' {self.num_tokens} tokens, {self.block_efficiency:.2f} per target'
      f' forward: p-values: {tests}; {len(self.impossible)} impossible'
      f' tokens{first}'
    )


def _decode(
  generator: Generator,
  prompts: Sequence[str],
  seed: int,
  batch_size: int,
  title: str,
  **options: Any,
) -> tuple[list[list[int]], list[list[int]], float]:
  """Prompt tokens, new tokens, and new tokens per target forward.

  Prompt i has seed + i, so that its tokens do not depend on the batch size.
  """
  starts = range(0, len(prompts), batch_size)
  results: list[TextGeneration] = []
  for start in tqdm.tqdm(starts, desc=title, unit='batch', file=sys.stderr):
    # The last batch is filled up, because another size would compile again.
    numbers = [(start + row) % len(prompts) for row in range(batch_size)]
    results.append(
      generator.generate(
        [prompts[number] for number in numbers],
        seed=[seed + number for number in numbers],
        **options,
      )
    )
  errors = [error for result in results for error in result.errors if error]
  if errors:
    raise ValueError(f'{title}: {errors[0]}')
  join = lambda name: [row for r in results for row in getattr(r, name)]
  count = len(prompts)
  return join('prompt_tokens')[:count], join('tokens')[:count], _rate(results)


def _rate(results: Sequence[TextGeneration]) -> float:
  total = lambda name: sum(result.stats[name] for result in results)
  return total('new_tokens') / max(total('target_forwards'), 1)


def check_tokens(
  generator: Generator,
  prompts: Sequence[str],
  *,
  batch_sizes: Sequence[int],
  sampling: specdec.Sampling,
  seed: int,
  max_margin: float,
  **options: Any,
) -> list[TokenCheck]:
  """Compares the tokens with plain decoding of one prompt at a time.

  Args:
    generator: to be checked.
    prompts: texts.
    batch_sizes: of speculative decoding.
    sampling: the same for all rows.
    seed: of the first prompt; that of prompt i is seed + i.
    max_margin: see `TokenCheck`.
    **options: other arguments of `Generator.generate`.

  Returns:
    A check per batch size.

  Raises:
    ValueError: the logits of the target are not finite.
  """
  options |= {'sampling': sampling}
  plain = dataclasses.replace(generator, drafter=specdec.PLAIN)
  ids, expected, _ = _decode(plain, prompts, seed, 1, 'plain', **options)
  checks = []
  for batch_size in batch_sizes:
    _, found, efficiency = _decode(
      generator, prompts, seed, batch_size, f'batch {batch_size}', **options
    )
    divergences = []
    for number, (row, other) in enumerate(zip(expected, found, strict=True)):
      offset = first_difference(other, row)
      if offset is None:
        continue
      margin = exactness.choice_margin(
        generator.pair.target,
        row_keys([seed + number], 1)[0],
        ids[number] + row[:offset],
        sampling,
      )
      shown = slice(offset, offset + 3)
      divergences.append(
        Divergence(number, offset, row[shown], other[shown], margin)
      )
    checks.append(
      TokenCheck(
        batch_size=batch_size,
        num_prompts=len(prompts),
        num_tokens=sum(map(len, expected)),
        block_efficiency=efficiency,
        divergences=divergences,
        max_margin=max_margin,
      )
    )
  return checks


def check_distribution(
  generator: Generator,
  prompts: Sequence[str],
  *,
  batch_sizes: Sequence[int],
  sampling: specdec.Sampling,
  seed: int,
  **options: Any,
) -> list[DistributionCheck]:
  """Tests whether the tokens are distributed as the target.

  Args:
    generator: to be checked.
    prompts: texts.
    batch_sizes: numbers of prompts decoded together, one check for each.
    sampling: the same for all rows.
    seed: of the first prompt; that of prompt i is seed + i.
    **options: other arguments of `Generator.generate`.

  Returns:
    A check per batch size.

  Raises:
    ValueError: there are too few tokens for a test, or the logits of the target
      are not finite.
  """
  options |= {'sampling': sampling}
  key = jax.random.key(seed)
  checks = []
  for batch_size in batch_sizes:
    ids, new, efficiency = _decode(
      generator, prompts, seed, batch_size, f'batch {batch_size}', **options
    )
    num_tokens = sum(map(len, new))
    if num_tokens < _FEWEST_TOKENS:
      raise ValueError(
        f'{num_tokens} tokens are too few to test their distribution; give'
        f' {_FEWEST_TOKENS} at least, by more prompts or --max_new_tokens'
      )
    rows, impossible = [], []
    for number, (prompt, tokens) in enumerate(zip(ids, new, strict=True)):
      if not tokens:
        continue
      values, probs = exactness.transform(
        generator.pair.target,
        prompt,
        tokens,
        sampling,
        jax.random.fold_in(key, number),
        generator.pair.draft,
      )
      rows.append(values)
      impossible += [(number, int(at)) for at in np.flatnonzero(probs <= 0)]
    checks.append(
      DistributionCheck(
        batch_size=batch_size,
        num_tokens=num_tokens,
        block_efficiency=efficiency,
        p_values=exactness.p_values(rows),
        impossible=impossible,
      )
    )
  return checks


@dataclasses.dataclass(frozen=True)
class Rule:
  """The arguments `verify` and `children` of `specdec.generate`."""

  verify: str
  children: str | None = None

  def __str__(self):
    return self.verify + (f', {self.children}' if self.children else '')


# Each with its acceptance probability for a single child, see `theory`.
RULES = {
  Rule('match'): 'coupled',
  Rule('rejection', WITHOUT_REPLACEMENT): '1 - TV',
  Rule('rejection', WITH_REPLACEMENT): '1 - TV',
  Rule('rejection', BEST): 'p(best)',
}
BLOCK = Rule('block', WITHOUT_REPLACEMENT)


@jax.jit
def theory(target: jax.Array, draft: jax.Array) -> dict[str, jax.Array]:
  """Acceptance probabilities of a single draft token, at each of n positions.

  Args:
    target: `[n, V]`, distributions.
    draft: `[n, V]`, distributions.

  Returns:
    `[n]` each: `1 - TV`, rejection sampling; `coupled`, match, where draft and
    target choose with the same Gumbel noise (arXiv 2408.07978), and its lower
    bound `(1 - TV)/(1 + TV)`; `sum p q`, independent noise; `p(best)`, the
    draft's most likely token instead of a draw.
  """
  common = jnp.sum(jnp.minimum(target, draft), axis=1)
  best = jnp.argmax(draft, axis=1)
  # sum_j 1 / sum_i max(p_i / p_j, q_i / q_j): the maximum is the first term if
  # p_i / q_i >= p_j / q_j, so that sorting by that ratio gives all sums.
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
  drafter = specdec.fixed_drafter(specdec.LanguageModelScorer(draft), topology)
  return dataclasses.replace(generator, drafter=drafter)


def _acceptance(
  results: Iterator[TextGeneration], probs_of: Any, *, with_theory: bool
) -> dict[str, Any]:
  """Acceptance of the first draft token of each target forward."""
  accepted: list[np.ndarray] = []
  expected: list[dict[str, np.ndarray]] = []
  for result in results:
    rows = zip(result.prompt_tokens, result.tokens, result.origins, strict=True)
    for prompt, tokens, origins in rows:
      # Origin 0 is the target, whose token is the last of its forward.
      first = np.concatenate([[0], origins[:-1]]) == 0
      accepted.append(np.asarray(origins)[first] > 0)
      if with_theory:
        at = len(prompt) - 1 + np.flatnonzero(first)
        target, draft = (probs[at] for probs in probs_of([*prompt, *tokens]))
        expected.append(jax.device_get(theory(target, draft)))
  pooled = np.concatenate(accepted)
  figures: dict[str, Any] = {
    'measured': float(pooled.mean()),
    'standard_error': float(pooled.std() / np.sqrt(pooled.size)),
    'forwards': pooled.size,
  }
  if with_theory:
    figures['theory'] = {
      name: float(np.concatenate([row[name] for row in expected]).mean())
      for name in expected[0]
    }
  return figures


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
  """Measures how often each rule of verification accepts.

  Args:
    generator: with a draft; its drafter is not used.
    prompts: texts; a last batch that is not full is left out.
    sampling: at a temperature above 0; all rules are equal at 0.
    seed: of the first batch; that of the batch from prompt i on is seed + i.
    batch_size: prompts decoded together.
    max_new_tokens: the limit per row.
    numbers_of_children: of trees of depth 1.
    chain_length: of the chain for block efficiency.

  Returns:
    `acceptance` by number of children and rule: `measured`, the share of target
    forwards that accepted a draft token, `standard_error` and `forwards`; for
    one child also `theory`, the means of `theory` over the same positions. And
    `block_efficiency` of the chain by rule.

  Raises:
    ValueError: there is no draft, or decoding is greedy.
  """
  if not np.all(np.asarray(sampling.temperature) > 0):
    raise ValueError('acceptance of sampling needs --temperature above 0')
  starts = range(0, len(prompts) - batch_size + 1, batch_size)
  pair = generator.pair

  def decode(topology, rule):
    drafted = _with_topology(generator, topology)
    title = f'{topology.branching} x {topology.max_depth}, {rule}'
    for start in tqdm.tqdm(starts, desc=title, unit='batch', file=sys.stderr):
      yield drafted.generate(
        prompts[start : start + batch_size],
        seed=seed + start,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        verify=rule.verify,
        children=rule.children,
        eos_ids=(),
      )

  def probs_of(ids):
    arrays = check_sampling(sampling, 1, pair.target.spec.vocab_size)
    text = exactness.padded(ids)
    for model in (pair.target, pair.draft):
      yield exactness.distributions(model, text, arrays)

  return {
    'acceptance': {
      str(number): {
        str(rule): _acceptance(
          decode(k_ary(number, 1), rule), probs_of, with_theory=number == 1
        )
        for rule in RULES
      }
      for number in numbers_of_children
    },
    'block_efficiency': {
      str(rule): _rate(list(decode(chain(chain_length), rule)))
      for rule in (*RULES, BLOCK)
    },
  }


def acceptance_rows(figures: dict[str, Any]) -> list[dict[str, str]]:
  """The rows of a table of the figures of `measure`."""
  names = {str(rule): name for rule, name in RULES.items()}
  rows = []
  for rule, efficiency in figures['block_efficiency'].items():
    row = {'rule': rule, 'theory, 1 child': ''}
    for number, by_rule in figures['acceptance'].items():
      found = by_rule.get(rule, {})
      if 'theory' in found:
        value = found['theory'][names[rule]]
        row['theory, 1 child'] = f'{names[rule]} = {value:.3f}'
      row[f'measured, {number} children'] = (
        f'{found["measured"]:.3f} ± {found["standard_error"]:.3f}'
        if found
        else ''
      )
    row['chain: tokens per forward'] = f'{efficiency:.2f}'
    rows.append(row)
  return rows
