"""The counters of a decode, and the figures that follow from them.

All methods, plain decoding included, are counted here, by the same code. Tokens
past an EOS or past the limit were not emitted and do not count.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec import context as context_lib
from specdec import hosts
from specdec import model as model_lib
from specdec import total as total_lib
from specdec.draft import drafter as drafter_lib


class Counters(flax.struct.PyTreeNode):
  """Counters that the loop carries, read once at the end.

  The counts of rows are one array, because each array that changes costs a GPU
  a kernel per step. The properties are int64 on the host. In a program they are
  int32, modulo 2^32.
  """

  steps: total_lib.Total  #: `[]` batched target forwards, prefill apart.
  #: `[B, 3 + D + 1]`, the columns of the properties, in their order.
  of_rows: total_lib.Total

  def _rows(self) -> Any:
    rows = self.of_rows
    return rows.wrapped if isinstance(rows, total_lib.Total) else rows

  @property
  def target_forwards(self) -> Any:
    """`[B]`, target forwards in which the row was not done yet."""
    return self._rows()[:, 0]

  @property
  def nodes_verified(self) -> Any:
    """`[B]`, roots included."""
    return self._rows()[:, 1]

  @property
  def slots_read(self) -> Any:
    """`[B]`, visible cache slots, summed over target forwards."""
    return self._rows()[:, 2]

  @property
  def emitted_histogram(self) -> Any:
    """`[B, D + 1]`; entry i counts the forwards that emitted i + 1 tokens."""
    return self._rows()[:, 3:]

  def with_steps(self, number: jax.typing.ArrayLike) -> 'Counters':
    """Counts the steps of a whole loop, which need no counter within it."""
    return self.replace(steps=self.steps + number)


def init_counters(batch_size: int, max_depth: int) -> Counters:
  """Counters of zero."""
  return Counters(
    steps=total_lib.Total.zeros(),
    of_rows=total_lib.Total.zeros(batch_size, 3 + max_depth + 1),
  )


def count_step(
  counters: Counters,
  nodes: jax.Array,
  emitted: jax.Array,
  ctx: context_lib.StepContext,
) -> Counters:
  """Counts one target forward over `nodes [B, N]`; `emitted [B]` new tokens.

  `Counters.steps` is left to `Counters.with_steps`.
  """
  active = ctx.active.astype(jnp.int32)
  num_nodes = jnp.sum(nodes >= 0, axis=1)
  counted = active, active * num_nodes, active * (ctx.length - 1 + num_nodes)
  place = jnp.arange(counters.of_rows.wrapped.shape[1])[None]
  # The entries of the histogram come after those.
  amounts = (place - len(counted) + 1 == emitted[:, None]).astype(jnp.int32)
  for index, amount in enumerate(counted):
    amounts = jnp.where(place == index, amount[:, None], amounts)
  return counters.replace(of_rows=counters.of_rows + amounts)


def bytes_read(
  reads: Mapping[str, Mapping[str, float]],
  costs: Mapping[str, Mapping[str, float]],
) -> float:
  """Bytes of weights, states and visible cache slots that all models read.

  For `reads` and `costs` see `Statistics`; `plain` does not count.
  """
  return sum(
    count['forwards'] * costs[name]['per_forward']
    + count['slots'] * costs[name]['per_slot']
    + count.get('rows', 0) * costs[name].get('per_row', 0)
    for name, count in reads.items()
    if name != 'plain'
  )


def relative_bandwidth(
  reads: Mapping[str, Mapping[str, float]],
  costs: Mapping[str, Mapping[str, float]],
) -> float:
  """Bytes read by all models, over what plain decoding would have read.

  Plain decoding takes one target forward per token, and the rows of a batch
  share the weights. (The measure of arXiv 2308.04623, table 1, which gives no
  formula; here the caches count.) 1 if nothing was decoded. For `reads` and
  `costs` see `Statistics`; the costs may belong to other models.
  """
  plain = bytes_read({'target': reads['plain']}, costs)
  return bytes_read(reads, costs) / plain if plain else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
  """Figures of a decode, pooled over its rows; None where they do not apply.

  Figures per stage or per model are mappings by its name.
  """

  new_tokens: int  #: Emitted by all rows.
  target_forwards: int  #: Summed over rows.
  #: Tokens per target forward, or 0.
  block_efficiency: float = dataclasses.field(init=False)
  #: Nodes verified per target forward, the root included, or 0.
  nodes_per_forward: float = dataclasses.field(init=False)
  #: Entry i counts the target forwards that emitted i + 1 tokens.
  accepted_histogram: list[int] | None = None
  #: By stage, the tokens that its context was too short to draft.
  beyond_context: Mapping[str, int] | None = None
  stage_forwards: Mapping[str, int]  #: By stage, summed over rows.
  #: Summed over rows: the nodes that the `target` verified, and W per forward
  #: of each stage.
  positions: Mapping[str, int]
  origins: Mapping[str, int] | None = None  #: Emitted tokens by source.
  #: See `relative_bandwidth`.
  relative_bandwidth: float = dataclasses.field(init=False)
  #: Batched target forwards for which the fallback drafted nothing.
  plain_steps: int | None = None
  #: For the `target`, each stage and `plain` decoding: batched `forwards`; and
  #: summed over rows, visible cache `slots` and the forwards of `rows`.
  reads: Mapping[str, Mapping[str, int]]
  #: For the `target` and each stage: bytes `per_forward` and `per_slot`. Models
  #: with recurrent states also have `per_row`: every forward of a row reads its
  #: states twice, for the nodes and for the accepted path.
  costs: Mapping[str, Mapping[str, float]]
  #: Time of decoding, the prompt included, without compiling; timed decodes
  #: have it.
  seconds: float | None = None
  #: All rows together; timed decodes have it.
  tokens_per_second: float | None = None
  compile_seconds: float | None = None  #: Timed decodes have it.

  def __post_init__(self) -> None:
    per_forward = lambda count: count / max(self.target_forwards, 1)
    derived = {
      'block_efficiency': per_forward(self.new_tokens),
      'nodes_per_forward': per_forward(self.positions['target']),
      'relative_bandwidth': relative_bandwidth(self.reads, self.costs),
    }
    for name, value in derived.items():
      object.__setattr__(self, name, value)

  def as_dict(self) -> dict[str, Any]:
    """The figures that apply, by name, for JSON."""
    figures = dataclasses.asdict(self)
    return {name: value for name, value in figures.items() if value is not None}


def _read(forwards: Any, rows: Any, slots: Any) -> dict[str, int]:
  """An entry of `Statistics.reads`."""
  return {
    'forwards': int(forwards),
    'slots': int(slots.sum()),
    'rows': int(rows.sum()),
  }


def _cost(forward: float, slot: float, state: float) -> dict[str, float]:
  """An entry of `Statistics.costs`."""
  per_row = {'per_row': 2 * state} if state else {}
  return {'per_forward': forward, 'per_slot': slot} | per_row


def summarize(
  counts: tuple[
    Counters, tuple[drafter_lib.StageCounters, ...], total_lib.Total
  ],
  origins: np.ndarray,
  prompt_lengths: np.ndarray,
  new_tokens: np.ndarray,
  *,
  target: model_lib.ModelSpec,
  drafter: drafter_lib.Drafter,
) -> Statistics:
  """The figures of one decode.

  Args:
    counts: `counters`, `stage_counters` and `plain_steps` of the decode.
    origins: of all emitted tokens, in any order.
    prompt_lengths: `[B]`.
    new_tokens: `[B]`, how many were emitted.
    target: for the sizes in bytes.
    drafter: for names and sizes in bytes.
  """
  # Their products may exceed 32 bits.
  prompt_lengths = np.asarray(prompt_lengths, np.int64)
  new_tokens = np.asarray(new_tokens, np.int64)
  counters, stage_counters, plain_steps = hosts.read(counts)
  # Emitting token i of a row, plain decoding sees prompt_length + i slots.
  slots = new_tokens * prompt_lengths + new_tokens * (new_tokens - 1) // 2
  forwards = counters.target_forwards
  reads = {
    'plain': _read(new_tokens.max(initial=0), new_tokens, slots),
    'target': _read(counters.steps, forwards, counters.slots_read),
  }
  costs = {
    'target': _cost(
      target.weight_bytes, target.cache_bytes_per_slot, target.state_bytes
    )
  }
  positions = {'target': int(counters.nodes_verified.sum())}
  stage_forwards, beyond_context = dict[str, int](), dict[str, int]()
  for stage, counted in zip(drafter.stages, stage_counters, strict=True):
    facts, width = stage.scorer.facts, stage.config.width
    rows = counted.row_forwards
    reads[stage.name] = _read(counted.forwards, rows, counted.slots_read)
    costs[stage.name] = _cost(
      facts.bytes_of(width), facts.bytes_per_slot, facts.state_bytes
    )
    stage_forwards[stage.name] = int(rows.sum())
    positions[stage.name] = width * stage_forwards[stage.name]
    if facts.max_positions:
      # The last token that can be drafted follows the last position.
      first = np.maximum(prompt_lengths, facts.max_positions + 1)
      beyond = np.maximum(prompt_lengths + new_tokens - first, 0)
      beyond_context[stage.name] = int(beyond.sum())
  return Statistics(
    new_tokens=int(new_tokens.sum()),
    target_forwards=int(forwards.sum()),
    accepted_histogram=counters.emitted_histogram.sum(axis=0).tolist(),
    beyond_context=beyond_context,
    stage_forwards=stage_forwards,
    positions=positions,
    origins={
      label: int(np.sum(origins == index))
      for index, label in enumerate(('target', *drafter.labels))
    },
    plain_steps=int(plain_steps),
    reads=reads,
    costs=costs,
  )
