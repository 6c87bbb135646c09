"""Is the output that of the target alone? What check_lossless.py calls."""

from collections.abc import Sequence
import dataclasses
import sys
from typing import Any

import jax
import numpy as np
import tqdm

from models.generator import Generator
from models.text_arguments import row_keys
from models.text_generation import TextGeneration
import specdec
from specdec import law
from specdec.margins import choice_margin

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
