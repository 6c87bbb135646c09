"""A whole decode with all of its blocks, for those who want to look inside."""

from collections.abc import Sequence
from typing import Unpack

import jax

from specdec.generation import Decoding
from specdec.generation import Options
from specdec.model import Model
from specdec.tracing import Trace


def trace(
  target: Model,
  rng_key: jax.Array,
  prompts: Sequence[Sequence[int]],
  **options: Unpack[Options],
) -> list[Trace]:
  """Decodes like `specdec.generate`, and tells what happened in every step.

  The tokens are the same. It is slower: every step returns to the host.

  Args:
    target: see `specdec.Decoding`.
    rng_key: likewise.
    prompts: likewise.
    **options: see `specdec.generation.Options`.

  Returns:
    Of each row its trace. Without a tokenizer the text of a token is its
    number; `models.Generator.trace` has the real ones.

  Raises:
    TypeError: an argument is missing or not known.
    ValueError: an argument cannot be used; says which and why.
  """
  decoding = Decoding(target, rng_key, prompts, **options)
  rows = decoding.record()
  result = decoding.result()
  traces = []
  for row, blocks in enumerate(rows):
    prompt = [int(token) for token in prompts[row]]
    ids = {token for one in blocks for token in (*one.tokens, *one.emitted)}
    traces.append(
      Trace(
        prompt=''.join(f'{token} ' for token in prompt),
        prompt_tokens=tuple(prompt),
        labels=result.labels,
        blocks=tuple(blocks),
        pieces=tuple(f'{token} ' for token in result.tokens[row]),
        texts={token: str(token) for token in sorted(ids)},
        finish_reason=result.finish_reasons[row],
        log_probs=None
        if result.log_probs is None
        else tuple(result.log_probs[row]),
      )
    )
  return traces
