"""Text in, text out: what scripts/generate.py calls."""

from collections.abc import Sequence
import dataclasses
import json
import time
from typing import Any

import jax
import jax.numpy as jnp

from models import origins
from models.drafters import DraftSettings
from models.drafters import make_drafter
from models.pair import load_pair
import specdec


@dataclasses.dataclass(frozen=True)
class TextGeneration:
  """Prompts, their continuations and what they cost.

  Attributes:
    prompts: B texts.
    text: B continuations.
    prompt_tokens: the ids of each prompt.
    tokens: the new ids of each row.
    pieces: the texts of these tokens, row by row; a token that ends within a
      character has none, and the one that completes it has all of it.
    origins: who proposed each of them, an index of `labels`.
    labels: see `specdec.Generation`.
    stats: see `specdec.statistics.summarize`; plus `seconds` of decoding
      (prompt included, compilation not), `tokens_per_second` over all rows and
      `compile_seconds`.
  """

  prompts: list[str]
  text: list[str]
  prompt_tokens: list[list[int]]
  tokens: list[list[int]]
  pieces: list[list[str]]
  origins: list[list[int]]
  labels: tuple[str, ...]
  stats: dict[str, Any]

  def to_json(self) -> str:
    """One JSON object in one line."""
    return json.dumps(dataclasses.asdict(self))

  def __str__(self):
    texts = [
      prompt + text
      for prompt, text in zip(self.prompts, self.text, strict=True)
    ]
    return '\n\n'.join([*texts, self._table()])

  def with_origins(self, *, color: bool) -> str:
    """The texts, each token marked by who proposed it, and a legend."""
    rows = zip(self.prompts, self.pieces, self.origins, strict=True)
    texts = [
      prompt + origins.mark(pieces, proposed, color=color)
      for prompt, pieces, proposed in rows
    ]
    legend = origins.legend(self.labels, self.stats['origins'], color=color)
    return '\n\n'.join([*texts, legend, self._table()])

  def _table(self) -> str:
    # What the figures follow from is in the JSON.
    shown = {
      name: value
      for name, value in self.stats.items()
      if name not in ('reads', 'costs')
    }
    width = max(map(len, shown))
    return '\n'.join(
      f'{name.replace("_", " "):{width}}  {_formatted(value)}'
      for name, value in shown.items()
    )


def _formatted(value) -> str:
  if isinstance(value, float):
    return f'{value:.3f}'
  if isinstance(value, dict):
    return ', '.join(f'{name} {count}' for name, count in value.items())
  return f'{value}'


def generate_text(
  prompts: Sequence[str],
  *,
  target: str,
  draft: str | None,
  max_new_tokens: int,
  method: str,
  drafting: DraftSettings,
  sampling: specdec.Sampling,
  seed: int,
  dtype: jnp.dtype,
  revision: str | None = None,
) -> TextGeneration:
  """Loads the models, compiles, decodes once and times that.

  Args:
    prompts: B texts, none empty.
    target: see `models.pair.load_pair`.
    draft: likewise.
    method: see `models.drafters.make_drafter`.
    drafting: likewise.
    max_new_tokens: see `specdec.generate`.
    sampling: likewise.
    seed: of the sampling.
    dtype: of weights and cache.
    revision: of the target, on the hub.

  Returns:
    Texts, ids and statistics.

  Raises:
    ValueError: bad input; says what.
  """
  for prompt in prompts:
    if not prompt:
      raise ValueError('the prompt is empty; give at least one character')
  pair = load_pair(
    target,
    None if method == 'plain' else draft,
    dtype=dtype,
    revision=revision,
  )
  drafter = make_drafter(method, pair, drafting)
  ids = [pair.encode(prompt) for prompt in prompts]

  def run(limit):
    start = time.perf_counter()
    generation = specdec.generate(
      pair.target,
      jax.random.key(seed),
      ids,
      drafter=drafter,
      max_new_tokens=limit,
      room_for_new_tokens=max_new_tokens,
      sampling=sampling,
      eos_ids=pair.eos_ids,
    )
    return generation, time.perf_counter() - start

  _, warm_up_seconds = run(0)  # compiles, decodes nothing
  generation, seconds = run(max_new_tokens)
  timing = {
    'seconds': seconds,
    'tokens_per_second': generation.stats['new_tokens'] / seconds,
    'compile_seconds': warm_up_seconds,
  }
  return TextGeneration(
    prompts=list(prompts),
    text=[pair.decode(row) for row in generation.tokens],
    prompt_tokens=ids,
    tokens=generation.tokens,
    pieces=[pair.pieces(row) for row in generation.tokens],
    origins=generation.origins,
    labels=generation.labels,
    stats=generation.stats | timing,
  )
