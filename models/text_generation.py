"""Text in, text out: what scripts/generate.py calls."""

from collections.abc import Sequence
import dataclasses
import json
import time
from typing import Any

import jax
import jax.numpy as jnp

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
    stats: see `specdec.statistics.summarize`; plus `seconds` of decoding
      (prompt included, compilation not), `tokens_per_second` over all rows and
      `compile_seconds`.
  """

  prompts: list[str]
  text: list[str]
  prompt_tokens: list[list[int]]
  tokens: list[list[int]]
  stats: dict[str, Any]

  def to_json(self) -> str:
    """One JSON object in one line."""
    return json.dumps(dataclasses.asdict(self))

  def __str__(self):
    texts = [
      prompt + text
      for prompt, text in zip(self.prompts, self.text, strict=True)
    ]
    width = max(map(len, self.stats))
    table = [
      f'{name.replace("_", " "):{width}}  '
      + (f'{value:.3f}' if isinstance(value, float) else f'{value}')
      for name, value in self.stats.items()
    ]
    return '\n\n'.join([*texts, '\n'.join(table)])


def generate_text(
  prompts: Sequence[str],
  *,
  target: str,
  draft: str | None,
  max_new_tokens: int,
  num_draft_tokens: int,
  sampling: specdec.Sampling,
  seed: int,
  dtype: jnp.dtype,
  revision: str | None = None,
) -> TextGeneration:
  """Loads the models, compiles, decodes once and times that.

  Args:
    prompts: B texts, none empty.
    target: see `models.pair.load_pair`.
    draft: likewise; None is plain decoding.
    max_new_tokens: see `specdec.generate`.
    num_draft_tokens: likewise.
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
  pair = load_pair(target, draft, dtype=dtype, revision=revision)
  ids = [pair.encode(prompt) for prompt in prompts]

  def run(limit):
    start = time.perf_counter()
    generation = specdec.generate(
      pair.target,
      jax.random.key(seed),
      ids,
      draft=pair.draft,
      num_draft_tokens=num_draft_tokens,
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
    stats=generation.stats | timing,
  )
