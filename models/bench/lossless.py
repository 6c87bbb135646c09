"""Is the output that of the target alone? What check_lossless.py calls."""

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
from specdec.study import exactness as law
from specdec.study.exactness import choice_margin
from specdec.tree.topology import chain
from specdec.tree.topology import k_ary
from specdec.tree.topology import Topology
from specdec.verify.rejection import BEST
from specdec.verify.rejection import WITH_REPLACEMENT
from specdec.verify.rejection import WITHOUT_REPLACEMENT

# One test in a thousand would fail by chance, all tests together.
_SIGNIFICANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Divergence:
  """Where a row leaves that of plain decoding.

  Attributes:
    prompt: its number.
    offset: of the first new token that differs.
    plain: the tokens there and behind, at most three.
    drafted: likewise.
    margin: between the best two scores there; what rounding can bridge.
  """

  prompt: int
  offset: int
  plain: list[int]
  drafted: list[int]
  margin: float


@dataclasses.dataclass(frozen=True)
class TokenCheck:
  """Tokens against those of plain decoding, at one batch size.

  Attributes:
    batch_size: of the speculative arm; plain decoding has 1.
    num_prompts: compared.
    num_tokens: of plain decoding.
    block_efficiency: of the speculative arm.
    divergences: rows that differ.
    max_margin: of a divergence that rounding may explain.
  """

  batch_size: int
  num_prompts: int
  num_tokens: int
  block_efficiency: float
  divergences: list[Divergence]
  max_margin: float

  @property
  def passed(self) -> bool:
    """Whether all is as it should be."""
    return all(one.margin <= self.max_margin for one in self.divergences)

  def __str__(self):
    lines = [
      f'{"ok" if self.passed else "FAILED"}: batch {self.batch_size},'
      f' {self.num_prompts} prompts, {self.num_tokens} tokens,'
      f' {self.block_efficiency:.2f} per target forward:'
      f' {len(self.divergences)} divergences'
    ]
    for one in self.divergences:
      lines.append(
        f'  prompt {one.prompt}, new token {one.offset}: plain {one.plain}...,'
        f' drafted {one.drafted}..., margin {one.margin:.2g}'
      )
    return '\n'.join(lines)


@dataclasses.dataclass(frozen=True)
class LawCheck:
  """Tokens against the law of the target, see `specdec.law`.

  Attributes:
    batch_size: prompts decoded together.
    num_tokens: that took part.
    block_efficiency: tokens per target forward.
    p_values: of each test.
    impossible: tokens that the target could not have said, as prompt and
      offset.
  """

  batch_size: int
  num_tokens: int
  block_efficiency: float
  p_values: dict[str, float]
  impossible: list[tuple[int, int]]

  @property
  def passed(self) -> bool:
    """Whether all is as it should be."""
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
  what: str,
  **options: Any,
) -> tuple[list[list[int]], list[list[int]], float]:
  """Prompts and new tokens, and tokens per target forward.

  The seed of a row is that of its prompt, so it does not matter how prompts are
  dealt out to batches.
  """
  starts = range(0, len(prompts), batch_size)
  results: list[TextGeneration] = []
  for start in tqdm.tqdm(starts, desc=what, unit='batch', file=sys.stderr):
    # The last batch is filled up: another size would have to be compiled.
    numbers = [(start + row) % len(prompts) for row in range(batch_size)]
    results.append(
      generator.generate(
        [prompts[number] for number in numbers],
        seed=[seed + number for number in numbers],
        **options,
      )
    )
  total = lambda name: sum(one.stats[name] for one in results)
  errors = [error for one in results for error in one.errors if error]
  if errors:
    raise ValueError(f'{what}: {errors[0]}')
  return (
    [ids for one in results for ids in one.prompt_tokens][: len(prompts)],
    [ids for one in results for ids in one.tokens][: len(prompts)],
    total('new_tokens') / max(total('target_forwards'), 1),
  )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
  if one == other:
    return None
  pairs = enumerate(zip(one, other, strict=False))
  return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


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
  """Compares with plain decoding of one prompt at a time.

  Args:
    generator: to be checked.
    prompts: texts.
    batch_sizes: of the speculative arm.
    sampling: the same for all rows.
    seed: of the first prompt; the next has the next.
    max_margin: see `TokenCheck`.
    **options: see `models.text_arguments.TextOptions`.

  Returns:
    A check per batch size.

  Raises:
    ValueError: the target gave logits that are not finite.
  """
  options |= {'sampling': sampling}
  plain = dataclasses.replace(generator, drafter=None)
  ids, expected, _ = _decode(plain, prompts, seed, 1, 'plain', **options)
  checks = []
  for batch_size in batch_sizes:
    _, found, efficiency = _decode(
      generator, prompts, seed, batch_size, f'batch {batch_size}', **options
    )
    divergences = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
      offset = _first_difference(one, other)
      if offset is None:
        continue
      margin = choice_margin(
        generator.pair.target,
        row_keys([seed + number], 1)[0],
        ids[number] + one[:offset],
        sampling,
      )
      there = slice(offset, offset + 3)
      divergences.append(
        Divergence(number, offset, one[there], other[there], margin)
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


def check_law(
  generator: Generator,
  prompts: Sequence[str],
  *,
  batch_sizes: Sequence[int],
  sampling: specdec.Sampling,
  seed: int,
  **options: Any,
) -> list[LawCheck]:
  """Tests the tokens against the distributions of the target.

  Args:
    generator: to be checked.
    prompts: texts.
    batch_sizes: how many are decoded together, one check for each.
    sampling: the same for all rows.
    seed: of the first prompt; the next has the next.
    **options: see `models.text_arguments.TextOptions`.

  Returns:
    A check per batch size.

  Raises:
    ValueError: there are too few tokens to say anything, or the target gave
      logits that are not finite.
  """
  checks = []
  for batch_size in batch_sizes:
    ids, new, efficiency = _decode(
      generator,
      prompts,
      seed,
      batch_size,
      f'batch {batch_size}',
      sampling=sampling,
      **options,
    )
    if sum(map(len, new)) < 500:
      raise ValueError(
        f'{sum(map(len, new))} tokens are too few for a test of their law;'
        ' give 500 at least'
      )
    rows, impossible = [], []
    key = jax.random.key(seed)
    for number, (prompt, tokens) in enumerate(zip(ids, new, strict=True)):
      if not tokens:
        continue
      values, own = law.transform(
        generator.pair.target,
        prompt,
        tokens,
        sampling,
        jax.random.fold_in(key, number),
        generator.pair.draft,
      )
      rows.append(values)
      impossible += [(number, int(at)) for at in np.flatnonzero(own <= 0)]
    checks.append(
      LawCheck(
        batch_size=batch_size,
        num_tokens=sum(map(len, new)),
        block_efficiency=efficiency,
        p_values=law.p_values(rows),
        impossible=impossible,
      )
    )
  return checks


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
    one = check_sampling(sampling, 1, model.spec.vocab_size)
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
