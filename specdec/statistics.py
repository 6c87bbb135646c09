"""What a decode counts in its loop, and the figures that follow from it.

All methods, plain decoding too, are counted here, by the same code. Tokens past
an EOS or past the limit were not emitted and do not count.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec.draft.drafter import Drafter
from specdec.draft.drafter import StageCounters
from specdec.model import LanguageModel


class Counters(flax.struct.PyTreeNode):
  """Carried by the loop, read once at the end; int32.

  Attributes:
    steps: `[]` batched target forwards, prefill apart.
    target_forwards: `[B]`, those in which the row was not done yet.
    emitted_histogram: `[B, D + 1]`; entry i counts the forwards that emitted
      i + 1 tokens.
    nodes_verified: `[B]`, roots included.
    slots_read: `[B]` visible cache slots, summed over target forwards.
  """

  steps: jax.Array
  target_forwards: jax.Array
  emitted_histogram: jax.Array
  nodes_verified: jax.Array
  slots_read: jax.Array


def init_counters(batch_size: int, max_depth: int) -> Counters:
  """All zeros."""
  per_row = jnp.zeros(batch_size, jnp.int32)
  return Counters(
    steps=jnp.zeros((), jnp.int32),
    target_forwards=per_row,
    emitted_histogram=jnp.zeros((batch_size, max_depth + 1), jnp.int32),
    nodes_verified=per_row,
    slots_read=per_row,
  )


def count_step(
  counters: Counters,
  length: jax.Array,
  num_nodes: jax.Array,
  emitted: jax.Array,
  active: jax.Array,
) -> Counters:
  """Counts one target forward.

  Args:
    counters: before the step.
    length: `[B]` int32, of the sequences before the step.
    num_nodes: `[B]` int32, of the tree, the root included.
    emitted: `[B]` int32, new tokens.
    active: `[B]` bool, rows that were not done before.
  """
  sizes = jnp.arange(1, counters.emitted_histogram.shape[1] + 1)[None]
  active = active.astype(jnp.int32)
  return Counters(
    steps=counters.steps + 1,
    target_forwards=counters.target_forwards + active,
    emitted_histogram=counters.emitted_histogram + (sizes == emitted[:, None]),
    nodes_verified=counters.nodes_verified + active * num_nodes,
    slots_read=counters.slots_read + active * (length - 1 + num_nodes),
  )


def relative_bandwidth(
  reads: Mapping[str, Mapping[str, float]],
  costs: Mapping[str, Mapping[str, float]],
) -> float:
  """Bytes read by all models, over what plain decoding would have read.

  Plain decoding of the same tokens: one target forward per token, rows of a
  batch sharing the weights. (The measure of arXiv 2308.04623, table 1, which
  gives no formula; here the caches count.)

  Args:
    reads: see `summarize`.
    costs: likewise; those of the models that ran, or of any others.

  Returns:
    The ratio; 1 if nothing was decoded.
  """
  total = lambda count, cost: (
    count['forwards'] * cost['per_forward'] + count['slots'] * cost['per_slot']
  )
  plain = total(reads['plain'], costs['target'])
  read = sum(
    total(count, costs[name])
    for name, count in reads.items()
    if name != 'plain'
  )
  return read / plain if plain else 1.0


def _beyond(context: int, starts: np.ndarray, new_tokens: np.ndarray) -> int:
  # The last token that can be drafted follows the last position.
  first = np.maximum(starts, context + 1)
  return int(np.maximum(starts + new_tokens - first, 0).sum())


def summarize(
  counters: Counters,
  stage_counters: Sequence[StageCounters],
  origins: np.ndarray,
  prompt_lengths: np.ndarray,
  new_tokens: np.ndarray,
  *,
  target: LanguageModel,
  drafter: Drafter | None,
  plain_steps: jax.Array | None = None,
) -> dict[str, Any]:
  """The figures of one decode, pooled over its rows.

  Args:
    counters: of the finished decode.
    stage_counters: likewise, from the outermost stage in.
    origins: who proposed each emitted token, in any order.
    prompt_lengths: `[B]`.
    new_tokens: `[B]`, how many were emitted.
    target: for the sizes in bytes.
    drafter: likewise; None for plain decoding.
    plain_steps: `[]`, of those the ones that the guard made plain; or None.

  Returns:
    `new_tokens` and `target_forwards`, summed over rows; `block_efficiency`,
    tokens per target forward (0 if nothing was asked for);
    `nodes_per_forward`, verified on average, the root included;
    `accepted_histogram`, whose entry i counts the forwards that emitted i + 1
    tokens, after the stop rule (a row that failed may have emitted none);
    `beyond_context`, by stage the emitted tokens that it could not have
    drafted, the text having outgrown its context; `stage_forwards` by stage
    and `origins`, the emitted tokens by who proposed them;
    `positions`, by the target (nodes verified) and by stage (the W of each of
    its forwards, whatever of that was of use), summed over rows;
    `relative_bandwidth`, see there, and what it follows from: `reads`, batched
    forwards and visible cache slots (summed over rows) of the target, of each
    stage and of plain decoding, and `costs`, the bytes per forward and per slot
    of the target and each stage; `plain_steps`, batched target forwards for
    which the guard saw to it that nothing was drafted.
  """
  counters, stage_counters = jax.device_get((counters, tuple(stage_counters)))
  forwards = int(counters.target_forwards.sum())
  emitted = int(new_tokens.sum())
  stages = drafter.stages if drafter is not None else ()
  labels = ('target', *(drafter.labels if drafter is not None else ()))
  named = {
    stage.name: counted
    for stage, counted in zip(stages, stage_counters, strict=True)
  }
  # Emitting token i of a row, plain decoding sees prompt_length + i slots.
  plain_slots = new_tokens * prompt_lengths + new_tokens * (new_tokens - 1) // 2
  contexts = {
    stage.name: stage.scorer.max_positions
    for stage in stages
    if stage.scorer.max_positions is not None
  }
  count = lambda forwards, slots: {
    'forwards': int(forwards),
    'slots': int(slots.sum()),
  }
  cost = lambda forward, slot: {'per_forward': forward, 'per_slot': slot}
  reads = {
    'plain': count(new_tokens.max(initial=0), plain_slots),
    'target': count(counters.steps, counters.slots_read),
  } | {name: count(one.forwards, one.slots_read) for name, one in named.items()}
  costs = {'target': cost(target.weight_bytes, target.cache_bytes_per_slot)} | {
    stage.name: cost(
      stage.scorer.bytes_per_forward(stage.config.width),
      stage.scorer.bytes_per_slot,
    )
    for stage in stages
  }
  return {
    'new_tokens': emitted,
    'target_forwards': forwards,
    'block_efficiency': emitted / forwards if forwards else 0.0,
    'nodes_per_forward': (
      int(counters.nodes_verified.sum()) / forwards if forwards else 0.0
    ),
    'accepted_histogram': counters.emitted_histogram.sum(axis=0).tolist(),
    'beyond_context': {
      name: _beyond(longest, prompt_lengths, new_tokens)
      for name, longest in contexts.items()
    },
    'stage_forwards': {
      name: int(one.row_forwards.sum()) for name, one in named.items()
    },
    'origins': {
      label: int(np.sum(origins == index)) for index, label in enumerate(labels)
    },
    'positions': {'target': int(counters.nodes_verified.sum())}
    | {
      stage.name: stage.config.width * int(one.row_forwards.sum())
      for stage, one in zip(stages, stage_counters, strict=True)
    },
    'relative_bandwidth': relative_bandwidth(reads, costs),
    'plain_steps': 0 if plain_steps is None else int(plain_steps),
    'reads': reads,
    'costs': costs,
  }
