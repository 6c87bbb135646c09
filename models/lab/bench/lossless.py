"""Checks that the tokens of speculative and of plain decoding are the same.

They are with `verify='match'`, and greedily by every rule. That the other rules
keep the distribution is proved by enumeration (docs/verification.md).
"""

from collections.abc import Sequence
import concurrent.futures
import dataclasses
import sys
from typing import Any

import tqdm

import specdec
from specdec.models.lab.bench import endpoint as endpoint_lib
from specdec.models.lab.bench import exactness
from specdec.models.text import generator as generator_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import result as result_lib
from specdec.models.text import text_options


@dataclasses.dataclass(frozen=True)
class Divergence:
  """The first difference of a row from plain decoding.

  `offset` is the place of the first new token that differs; `plain` and
  `drafted` are at most three tokens from there on. If `margin`, the difference
  of the two best scores there, is small, rounding can reverse their order.
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
  """Comparison at one batch size; rounding may explain `max_margin`."""

  batch_size: int
  num_prompts: int
  num_tokens: int
  block_efficiency: float  # Tokens per target forward.
  divergences: list[Divergence]
  max_margin: float

  @property
  def passed(self) -> bool:
    """Whether rounding explains all divergences."""
    return all(row.margin <= self.max_margin for row in self.divergences)

  def __str__(self):
    first = (
      f'{"ok" if self.passed else "FAILED"}: batch {self.batch_size},'
      f' {self.num_tokens} tokens, {self.block_efficiency:.2f} per target'
      f' forward: {len(self.divergences)} divergences of'
      f' {self.num_prompts} prompts'
    )
    return '\n  '.join([first, *map(str, self.divergences)])


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
) -> list[Check]:
  """Compares the tokens with plain decoding of one prompt at a time.

  There is a check for each batch size of speculative decoding. The seed of
  prompt i is seed + i. Options are other arguments of `Generator.generate`.

  Raises:
    ValueError: the logits of the target are not finite.
  """
  options |= {'sampling': sampling}
  # A store would have the answers of plain decoding.
  generator = dataclasses.replace(generator, store=None)
  plain = dataclasses.replace(generator, drafter=specdec.PLAIN)
  undrafted = options | {'children': None}
  ids, expected, _ = _decode(plain, prompts, seed, 1, 'plain', **undrafted)
  checks = []
  for size in batch_sizes:
    title = f'batch {size}'
    _, drafted, rate = _decode(generator, prompts, seed, size, title, **options)
    divergences = _divergences(
      generator.pair, ids, drafted, expected, sampling, seed
    )
    checks.append(
      Check(
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
  drafted: Sequence[list[int]],
  expected: Sequence[list[int]],
  sampling: specdec.Sampling,
  seed: int,
) -> list[Divergence]:
  """Where the texts after prompts part, scored by the target of the pair."""
  divergences = []
  for index, (row, other) in enumerate(zip(expected, drafted, strict=True)):
    (key,) = text_options.keys_of_seeds([seed + index], 1)
    place = exactness.divergence(
      pair.target, key, ids[index], other, row, sampling
    )
    if place is not None:
      offset, margin = place
      shown = slice(offset, offset + 3)
      divergences.append(
        Divergence(index, offset, row[shown], other[shown], margin)
      )
  return divergences


def check_servers(
  pair: pair_lib.Pair,
  prompts: Sequence[str],
  servers: tuple[endpoint_lib.Endpoint, endpoint_lib.Endpoint],
  *,
  batch_sizes: Sequence[int],
  max_new_tokens: int,
  sampling: specdec.Sampling,
  seed: int,
  max_margin: float,
) -> list[Check]:
  """Compares the tokens of a server with another one, which gets one at a time.

  There is a check for each number of prompts that the first has at once. The
  other decodes plainly if it is this library's. The seed of prompt i is
  seed + i.

  Raises:
    ValueError: sampling, and a server is not this library's; or one refuses.
  """
  server, plain_server = servers
  are_ours = {place.kind for place in servers} == {endpoint_lib.OURS}
  if sampling.temperature and not are_ours:
    raise ValueError(
      f'--temperature={sampling.temperature}: only servers of this library draw'
      ' the same tokens by the same seed; give --temperature=0'
    )
  ids = pair.ids_of(prompts)

  def ask(
    place: endpoint_lib.Endpoint, batch_size: int, **more: Any
  ) -> tuple[list[list[int]], int]:
    def complete(index: int) -> endpoint_lib.Reply:
      fields = endpoint_lib.settings_of(sampling, seed + index, pair.eos_ids)
      prompt = place.to_prompt(ids[index], pair.tokenizer)
      return place.complete(prompt, max_new_tokens, **fields, **more)

    with concurrent.futures.ThreadPoolExecutor(batch_size) as threads:
      replies = [*threads.map(complete, range(len(ids)))]
    rows = [
      endpoint_lib.ids_of(reply, pair.eos_ids, pair.tokenizer)
      for reply in replies
    ]
    accepted = sum(reply.accepted or 0 for reply in replies)
    return rows, sum(map(len, rows)) - accepted

  is_ours = plain_server.kind == endpoint_lib.OURS
  expected, _ = ask(plain_server, 1, **({'method': 'plain'} if is_ours else {}))
  checks = []
  for size in batch_sizes:
    drafted, forwards = ask(server, size)
    checks.append(
      Check(
        batch_size=size,
        num_prompts=len(prompts),
        num_tokens=sum(map(len, expected)),
        block_efficiency=sum(map(len, drafted)) / max(forwards, 1),
        divergences=_divergences(pair, ids, drafted, expected, sampling, seed),
        max_margin=max_margin,
      )
    )
  return checks
