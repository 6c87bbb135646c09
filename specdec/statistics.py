"""The counters of a decode, and the figures that follow from them.

All methods, plain decoding included, are counted here, by the same code. Tokens
past an EOS or past the limit were not emitted and do not count.
"""

from collections.abc import Mapping
from typing import Any
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec import hosts
from specdec.context import StepContext
from specdec.draft.drafter import Drafter
from specdec.draft.stages import StageCounters
from specdec.model import ModelSpec
from specdec.total import Total


class DecodeCounts(Protocol):
  """The counters of a `DecodeResult`."""

  counters: 'Counters'
  stage_counters: tuple[StageCounters, ...]
  plain_steps: Total


class Counters(flax.struct.PyTreeNode):
  """Counters that the loop carries, read once at the end.

  What is at most the number of tokens of a text is int32, all else a `Total`.
  """

  steps: Total  #: `[]` batched target forwards, prefill apart.
  #: `[B]` int32, those in which the row was not done yet.
  target_forwards: jax.Array
  #: `[B, D + 1]` int32; entry i counts the forwards that emitted i + 1 tokens.
  emitted_histogram: jax.Array
  nodes_verified: Total  #: `[B]`, roots included.
  #: `[B]` visible cache slots, summed over target forwards.
  slots_read: Total


def init_counters(batch_size: int, max_depth: int) -> Counters:
  """All zeros."""
  return Counters(
    steps=Total.zeros(),
    target_forwards=jnp.zeros(batch_size, jnp.int32),
    emitted_histogram=jnp.zeros((batch_size, max_depth + 1), jnp.int32),
    nodes_verified=Total.zeros(batch_size),
    slots_read=Total.zeros(batch_size),
  )


def count_step(
  counters: Counters, nodes: jax.Array, emitted: jax.Array, ctx: StepContext
) -> Counters:
  """Counts one target forward over `nodes [B, N]`; `emitted [B]` new tokens."""
  sizes = jnp.arange(1, counters.emitted_histogram.shape[1] + 1)[None]
  active = ctx.active.astype(jnp.int32)
  num_nodes = jnp.sum(nodes >= 0, axis=1)
  return Counters(
    steps=counters.steps + 1,
    target_forwards=counters.target_forwards + active,
    emitted_histogram=counters.emitted_histogram + (sizes == emitted[:, None]),
    nodes_verified=counters.nodes_verified + active * num_nodes,
    slots_read=counters.slots_read + active * (ctx.length - 1 + num_nodes),
  )


def bytes_read(
  reads: Mapping[str, Mapping[str, float]],
  costs: Mapping[str, Mapping[str, float]],
) -> float:
  """Bytes of weights and visible cache slots that all models read.

  `reads` and `costs` are those of `summarize`; `plain` does not count.
  """
  return sum(
    count['forwards'] * costs[name]['per_forward']
    + count['slots'] * costs[name]['per_slot']
    for name, count in reads.items()
    if name != 'plain'
  )


def plain_reads(
  prompt_lengths: np.ndarray, new_tokens: np.ndarray
) -> dict[str, int]:
  """Forwards and visible slots of plain decoding; lengths of the rows `[B]`."""
  # Emitting token i of a row, plain decoding sees prompt_length + i slots.
  slots = new_tokens * prompt_lengths + new_tokens * (new_tokens - 1) // 2
  return {
    'forwards': int(new_tokens.max(initial=0)),
    'slots': int(slots.sum()),
  }


def relative_bandwidth(
  reads: Mapping[str, Mapping[str, float]],
  costs: Mapping[str, Mapping[str, float]],
) -> float:
  """Bytes read by all models, over what plain decoding would have read.

  Plain decoding takes one target forward per token, and the rows of a batch
  share the weights. (The measure of arXiv 2308.04623, table 1, which gives no
  formula; here the caches count.) 1 if nothing was decoded. `reads` and `costs`
  are those of `summarize`; the costs may be those of other models.
  """
  plain = bytes_read({'target': reads['plain']}, costs)
  return bytes_read(reads, costs) / plain if plain else 1.0


def _beyond(context: int, starts: np.ndarray, new_tokens: np.ndarray) -> int:
  """Emitted tokens that a stage with this context could not have drafted."""
  # The last token that can be drafted follows the last position.
  first = np.maximum(starts, context + 1)
  return int(np.maximum(starts + new_tokens - first, 0).sum())


def _reads(counters, stages, prompt_lengths, new_tokens):
  """`reads` of `summarize`; `stages` are pairs of a stage and its counters."""
  count = lambda forwards, slots: {
    'forwards': int(forwards),
    'slots': int(slots.sum()),
  }
  return {
    'plain': plain_reads(prompt_lengths, new_tokens),
    'target': count(counters.steps, counters.slots_read),
  } | {
    stage.name: count(counted.forwards, counted.slots_read)
    for stage, counted in stages
  }


def _costs(target, stages):
  """`costs` of `summarize`."""
  cost = lambda forward, slot: {'per_forward': forward, 'per_slot': slot}
  return {'target': cost(target.weight_bytes, target.cache_bytes_per_slot)} | {
    stage.name: cost(
      stage.scorer.bytes_per_forward(stage.config.width),
      stage.scorer.bytes_per_slot,
    )
    for stage in stages
  }


def _by_stage(stages, prompt_lengths, new_tokens, verified):
  """The figures of `summarize` that are mappings from stages."""
  forwards = {
    stage.name: int(counted.row_forwards.sum()) for stage, counted in stages
  }
  return {
    'beyond_context': {
      stage.name: _beyond(
        stage.scorer.max_positions, prompt_lengths, new_tokens
      )
      for stage, _ in stages
      if stage.scorer.max_positions
    },
    'stage_forwards': forwards,
    'positions': {'target': verified}
    | {
      stage.name: stage.config.width * forwards[stage.name]
      for stage, _ in stages
    },
  }


def summarize(
  result: DecodeCounts,
  origins: np.ndarray,
  prompt_lengths: np.ndarray,
  new_tokens: np.ndarray,
  *,
  target: ModelSpec,
  drafter: Drafter,
) -> dict[str, Any]:
  """The figures of one decode, pooled over its rows.

  Args:
    result: the counters of the decode.
    origins: of all emitted tokens, in any order.
    prompt_lengths: `[B]`.
    new_tokens: `[B]`, how many were emitted.
    target: for the sizes in bytes.
    drafter: for names and sizes in bytes.

  Returns:
    `new_tokens`, `target_forwards`: summed over rows; `block_efficiency`:
    tokens per target forward, or 0; `nodes_per_forward`: verified, the root
    included; `accepted_histogram`: entry i counts the forwards that emitted i +
    1 tokens; `beyond_context`: by stage, the tokens that its context was too
    short to draft; `stage_forwards`: by stage; `origins`: emitted tokens by
    source; `positions`: nodes verified, and by stage W per forward, summed over
    rows; `reads`: batched forwards and visible cache slots (summed over rows)
    of the target, of each stage and of plain decoding; `costs`: bytes per
    forward and per slot; `relative_bandwidth`, which follows from the two;
    `plain_steps`: batched target forwards for which the fallback drafted
    nothing.
  """
  # Their products may exceed 32 bits.
  prompt_lengths = np.asarray(prompt_lengths, np.int64)
  new_tokens = np.asarray(new_tokens, np.int64)
  counters, stage_counters, plain_steps = hosts.read(
    (result.counters, result.stage_counters, result.plain_steps)
  )
  stages = list(zip(drafter.stages, stage_counters, strict=True))
  reads = _reads(counters, stages, prompt_lengths, new_tokens)
  costs = _costs(target, drafter.stages)
  forwards = int(counters.target_forwards.sum())
  emitted, verified = int(new_tokens.sum()), int(counters.nodes_verified.sum())
  return {
    'new_tokens': emitted,
    'target_forwards': forwards,
    'block_efficiency': emitted / forwards if forwards else 0.0,
    'nodes_per_forward': verified / forwards if forwards else 0.0,
    'accepted_histogram': counters.emitted_histogram.sum(axis=0).tolist(),
    **_by_stage(stages, prompt_lengths, new_tokens, verified),
    'origins': {
      label: int(np.sum(origins == index))
      for index, label in enumerate(('target', *drafter.labels))
    },
    'relative_bandwidth': relative_bandwidth(reads, costs),
    'plain_steps': int(plain_steps),
    'reads': reads,
    'costs': costs,
  }
