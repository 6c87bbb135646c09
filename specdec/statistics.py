"""What a decode counts in its loop, and the figures that follow from it.

Both arms, plain and speculative, are counted here, by the same code. Tokens
past an EOS or past the limit were not emitted and do not count.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec.model import LanguageModel


class Counters(flax.struct.PyTreeNode):
  """Carried by the loop, read once at the end; int32.

  Attributes:
    steps: `[]` batched target forwards, prefill apart.
    target_forwards: `[B]`, those in which the row was not done yet.
    draft_forwards: `[B]`, likewise.
    emitted_histogram: `[B, g + 1]`; entry i counts the forwards that emitted
      i + 1 tokens.
    target_slots: `[B]` visible cache slots, summed over target forwards.
    draft_slots: `[B]`, likewise over draft forwards.
  """

  steps: jax.Array
  target_forwards: jax.Array
  draft_forwards: jax.Array
  emitted_histogram: jax.Array
  target_slots: jax.Array
  draft_slots: jax.Array


def init_counters(batch_size: int, num_drafted: int) -> Counters:
  """All zeros."""
  per_row = jnp.zeros(batch_size, jnp.int32)
  return Counters(
    steps=jnp.zeros((), jnp.int32),
    target_forwards=per_row,
    draft_forwards=per_row,
    emitted_histogram=jnp.zeros((batch_size, num_drafted + 1), jnp.int32),
    target_slots=per_row,
    draft_slots=per_row,
  )


def count_step(
  counters: Counters, length: jax.Array, emitted: jax.Array
) -> Counters:
  """Counts one step: g draft forwards and one target forward.

  Args:
    counters: before the step.
    length: `[B]` int32, of the sequences before the step.
    emitted: `[B]` int32; 0 means that the row was done before.
  """
  num_drafted = counters.emitted_histogram.shape[1] - 1
  active = (emitted > 0).astype(jnp.int32)
  # The target sees the sequence and the drafted tokens; the i-th draft forward
  # sees the sequence and the i tokens drafted before.
  drafts_seen = num_drafted * length + num_drafted * (num_drafted - 1) // 2
  return Counters(
    steps=counters.steps + 1,
    target_forwards=counters.target_forwards + active,
    draft_forwards=counters.draft_forwards + active * num_drafted,
    emitted_histogram=counters.emitted_histogram
    + (jnp.arange(1, num_drafted + 2)[None] == emitted[:, None]),
    target_slots=counters.target_slots + active * (length + num_drafted),
    draft_slots=counters.draft_slots + active * drafts_seen,
  )


def summarize(
  counters: Counters,
  prompt_lengths: np.ndarray,
  new_tokens: np.ndarray,
  *,
  target: LanguageModel,
  draft: LanguageModel | None,
) -> dict[str, float | list[int]]:
  """The figures of one decode, pooled over its rows.

  `relative_bandwidth` is bytes read from memory (weights and visible cache of
  all models) over what plain decoding of the same tokens would have read: one
  target forward per token, rows of a batch sharing the weights.

  Args:
    counters: of the finished decode.
    prompt_lengths: `[B]`.
    new_tokens: `[B]`, how many were emitted.
    target: for the sizes in bytes.
    draft: likewise; None for plain decoding.

  Returns:
    `target_forwards`, `draft_forwards` and `new_tokens`, summed over rows;
    `block_efficiency`, tokens per target forward (0 if nothing was asked for);
    `accepted_histogram`, whose entry i counts the forwards that emitted i + 1
    tokens, after the stop rule; `relative_bandwidth`.
  """
  counters = jax.device_get(counters)
  forwards = int(counters.target_forwards.sum())
  emitted = int(new_tokens.sum())
  num_drafted = counters.emitted_histogram.shape[1] - 1
  read = (
    int(counters.steps) * target.weight_bytes
    + int(counters.target_slots.sum()) * target.cache_bytes_per_slot
  )
  if draft is not None:
    read += (
      int(counters.steps) * num_drafted * draft.weight_bytes
      + int(counters.draft_slots.sum()) * draft.cache_bytes_per_slot
    )
  # Emitting token i of a row, plain decoding sees prompt_length + i slots.
  plain_slots = new_tokens * prompt_lengths + new_tokens * (new_tokens - 1) // 2
  plain_read = (
    int(new_tokens.max(initial=0)) * target.weight_bytes
    + int(plain_slots.sum()) * target.cache_bytes_per_slot
  )
  return {
    'target_forwards': forwards,
    'draft_forwards': int(counters.draft_forwards.sum()),
    'new_tokens': emitted,
    'block_efficiency': emitted / forwards if forwards else 0.0,
    'accepted_histogram': counters.emitted_histogram.sum(axis=0).tolist(),
    'relative_bandwidth': read / plain_read if plain_read else 1.0,
  }
