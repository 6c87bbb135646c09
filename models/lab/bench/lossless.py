"""Checks that speculative decoding preserves the output of the target.

With `verify='match'` the tokens must equal those of plain decoding; with the
other rules their distribution must be that of the target.
"""

from collections.abc import Sequence
import concurrent.futures
import dataclasses
import sys
from typing import Any

import jax
import numpy as np
import tqdm

from models.lab.bench import endpoint as endpoint_lib
from models.lab.bench import exactness
from models.text import generator as generator_lib
from models.text import pair as pair_lib
from models.text import result as result_lib
from models.text import text_options
import specdec

# The probability that a correct sampler fails, all tests of a check together.
_SIGNIFICANCE = 1e-3
_FEWEST_TOKENS = 500


@dataclasses.dataclass(frozen=True)
class Divergence:
  """The first difference of a row from plain decoding.

  The offset is that of the first new token that differs; `plain` and `drafted`
  are at most three tokens from there on; rounding can reverse the order of the
  two best scores there if `margin`, their difference, is small.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """A check at one batch size; block efficiency is tokens per forward."""

  batch_size: int
  num_tokens: int
  block_efficiency: float

  def _line(self, passed: bool, rest: str) -> str:
    rate = f'{self.block_efficiency:.2f} per target forward'
    batch = f'batch {self.batch_size}, {self.num_tokens} tokens, {rate}'
    return f'{"ok" if passed else "FAILED"}: {batch}: {rest}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCheck(Check):
  """Comparison with plain decoding; rounding may explain `max_margin`."""

  num_prompts: int
  divergences: list[Divergence]
  max_margin: float

  @property
  def passed(self) -> bool:
    """Whether rounding explains all divergences."""
    return all(row.margin <= self.max_margin for row in self.divergences)

  def __str__(self):
    count = f'{len(self.divergences)} divergences of {self.num_prompts} prompts'
    first = self._line(self.passed, count)
    return '\n  '.join([first, *map(str, self.divergences)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionCheck(Check):
  """Goodness-of-fit tests of the tokens, see `models.lab.bench.exactness`.

  Impossible tokens, by prompt and offset, have target probability 0.
  """

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
    impossible = f'{len(self.impossible)} impossible tokens{first}'
    return self._line(self.passed, f'p-values: {tests}; {impossible}')


def _decode(
  generator: generator_lib.Generator,
  prompts: Sequence[str],
  seed: int,
  batch_size: int,
  title: str,
  **options: Any,
) -> tuple[list[list[int]], list[list[int]], float]:
  """Prompt tokens, new tokens, and new tokens per target forward.

  Prompt i has seed + i, so that its tokens do not depend on the batch size.
  """
  many = generator.generate_many(
    prompts, batch_size=batch_size, seed=seed, in_order=True, **options
  )
  progress = tqdm.tqdm(many, title, len(prompts), unit='', file=sys.stderr)
  results: list[result_lib.TextGeneration] = []
  for completion in progress:
    if completion.result is None or completion.error:
      raise ValueError(
        f'{title}: prompt {completion.index}: {completion.error}'
      )
    results.append(completion.result)
  join = lambda name: [getattr(result, name)[0] for result in results]
  forwards = sum(result.stats.target_forwards for result in results)
  tokens = sum(result.stats.new_tokens for result in results)
  return join('prompt_tokens'), join('tokens'), tokens / max(forwards, 1)


def check_tokens(
  generator: generator_lib.Generator,
  prompts: Sequence[str],
  *,
  batch_sizes: Sequence[int],
  sampling: specdec.Sampling,
  seed: int,
  max_margin: float,
  **options: Any,
) -> list[TokenCheck]:
  """Compares the tokens with plain decoding of one prompt at a time.

  There is a check for each batch size of speculative decoding. The seed of
  prompt i is seed + i. Options are other arguments of `Generator.generate`.

  Raises:
    ValueError: the logits of the target are not finite.
  """
  options |= {'sampling': sampling}
  plain = dataclasses.replace(generator, drafter=specdec.PLAIN)
  undrafted = options | {'children': None}
  ids, expected, _ = _decode(plain, prompts, seed, 1, 'plain', **undrafted)
  checks = []
  for size in batch_sizes:
    title = f'batch {size}'
    _, found, rate = _decode(generator, prompts, seed, size, title, **options)
    divergences = _divergences(
      generator.pair, ids, found, expected, sampling, seed
    )
    checks.append(
      TokenCheck(
        batch_size=size,
        num_prompts=len(prompts),
        num_tokens=sum(map(len, expected)),
        block_efficiency=rate,
        divergences=divergences,
        max_margin=max_margin,
      )
    )
  return checks


def _divergences(
  pair: pair_lib.Pair,
  ids: Sequence[Sequence[int]],
  found: Sequence[list[int]],
  expected: Sequence[list[int]],
  sampling: specdec.Sampling,
  seed: int,
) -> list[Divergence]:
  """Where the texts after prompts part, scored by the target of the pair."""
  divergences = []
  for number, (row, other) in enumerate(zip(expected, found, strict=True)):
    (key,) = text_options.keys_of_seeds([seed + number], 1)
    place = exactness.divergence(
      pair.target, key, ids[number], other, row, sampling
    )
    if place is not None:
      offset, margin = place
      shown = slice(offset, offset + 3)
      divergences.append(
        Divergence(number, offset, row[shown], other[shown], margin)
      )
  return divergences


def check_servers(
  pair: pair_lib.Pair,
  prompts: Sequence[str],
  servers: tuple[endpoint_lib.Endpoint, endpoint_lib.Endpoint],
  *,
  batch_size: int,
  max_new_tokens: int,
  sampling: specdec.Sampling,
  seed: int,
  max_margin: float,
) -> TokenCheck:
  """Compares the tokens of two servers, `batch_size` prompts at a time.

  If both are this library's, the second decodes plainly. The seed of prompt i
  is seed + i.

  Raises:
    ValueError: sampling, and a server is not this library's; or one refuses.
  """
  server, plain_server = servers
  are_ours = {one.kind for one in servers} == {endpoint_lib.OURS}
  if sampling.temperature and not are_ours:
    raise ValueError(
      f'--temperature={sampling.temperature}: only servers of this library draw'
      ' the same tokens by the same seed; give --temperature=0'
    )
  ids = pair.ids_of(prompts)

  def ask(
    place: endpoint_lib.Endpoint, **more: Any
  ) -> tuple[list[list[int]], int]:
    def one(number: int) -> endpoint_lib.Reply:
      fields = endpoint_lib.settings_of(sampling, seed + number, pair.eos_ids)
      return place.complete(ids[number], max_new_tokens, **fields, **more)

    with concurrent.futures.ThreadPoolExecutor(batch_size) as threads:
      replies = [*threads.map(one, range(len(ids)))]
    rows = [
      endpoint_lib.ids_of(reply, pair.eos_ids, pair.tokenizer)
      for reply in replies
    ]
    return rows, sum(map(len, rows)) - sum(one.accepted or 0 for one in replies)

  found, forwards = ask(server)
  is_ours = plain_server.kind == endpoint_lib.OURS
  expected, _ = ask(plain_server, **({'method': 'plain'} if is_ours else {}))
  return TokenCheck(
    batch_size=batch_size,
    num_prompts=len(prompts),
    num_tokens=sum(map(len, expected)),
    block_efficiency=sum(map(len, found)) / max(forwards, 1),
    divergences=_divergences(pair, ids, found, expected, sampling, seed),
    max_margin=max_margin,
  )


def check_distribution(
  generator: generator_lib.Generator,
  prompts: Sequence[str],
  *,
  batch_sizes: Sequence[int],
  sampling: specdec.Sampling,
  seed: int,
  **options: Any,
) -> list[DistributionCheck]:
  """Tests whether the tokens are distributed as the target; see `check_tokens`.

  Raises:
    ValueError: there are too few tokens for a test, or the logits of the target
      are not finite.
  """
  options |= {'sampling': sampling}
  pair, checks = generator.pair, []
  for size in batch_sizes:
    title = f'batch {size}'
    ids, new, rate = _decode(generator, prompts, seed, size, title, **options)
    num_tokens = sum(map(len, new))
    if num_tokens < _FEWEST_TOKENS:
      raise ValueError(
        f'{num_tokens} tokens are too few to test their distribution; give'
        f' {_FEWEST_TOKENS} at least, by more prompts or --max_new_tokens'
      )
    rows, impossible = [], []
    for number, (prompt, tokens) in enumerate(zip(ids, new, strict=True)):
      if tokens:
        key = jax.random.fold_in(jax.random.key(seed), number)
        values, probs = exactness.transform(
          pair.target, prompt, tokens, sampling, key, pair.draft
        )
        rows.append(values)
        impossible += [(number, int(i)) for i in np.flatnonzero(probs <= 0)]
    check = DistributionCheck(
      batch_size=size,
      num_tokens=num_tokens,
      block_efficiency=rate,
      p_values=exactness.p_values(rows),
      impossible=impossible,
    )
    checks.append(check)
  return checks
