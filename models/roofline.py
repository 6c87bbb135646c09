"""Bytes and arithmetic of a decode, and where they put it under the roofs.

Figure 1 of the staged speculative decoding paper (arXiv 2308.04623): a forward
over one token does two operations for every weight that it reads, far less than
the machine could; verifying a tree does more for the same bytes. (The model of
roofs: Williams et al. 2009, "Roofline".)
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax

from specdec.model import Model


@dataclasses.dataclass(frozen=True)
class ModelSize:
  """What a forward computes with.

  Attributes:
    parameters: that are multiplied with every position.
    cache_per_slot: elements of the cache, keys and values, in one slot.
  """

  parameters: int
  cache_per_slot: int


def model_size(model: Model) -> ModelSize:
  """The size of a model of `models.language_model.as_model`."""
  cache = jax.eval_shape(lambda: model.definition.init_cache(1, 1))
  return ModelSize(
    parameters=model.definition.parameters,
    cache_per_slot=sum(
      leaf.size for leaf in jax.tree.leaves(cache) if leaf.ndim > 1
    ),
  )


def bytes_read(
  reads: Mapping[str, Mapping[str, float]],
  costs: Mapping[str, Mapping[str, float]],
) -> float:
  """Weights and visible cache slots, once per forward, of all models.

  Args:
    reads: see `specdec.statistics.summarize`.
    costs: likewise.
  """
  return sum(
    count['forwards'] * costs[name]['per_forward']
    + count['slots'] * costs[name]['per_slot']
    for name, count in reads.items()
    if name != 'plain'
  )


def flops(figures: Mapping[str, Any], sizes: Mapping[str, ModelSize]) -> float:
  """Operations of all models: two per multiplication and addition.

  Args:
    figures: of an arm, with the counts of `specdec.statistics.summarize`.
    sizes: of the target and of each stage that is a language model; others
      compute next to nothing.

  Returns:
    Operations on the positions counted, each of which multiplies all weights,
    and the slots of the cache that its forward saw.
  """
  forwards = {'target': figures['target_forwards']} | figures['stage_forwards']
  total = 0.0
  for name, size in sizes.items():
    slots = figures['reads'][name]['slots'] / max(forwards[name], 1)
    per_position = size.parameters + slots * size.cache_per_slot
    total += 2 * figures['positions'][name] * per_position
  return total


def place(
  figures: Mapping[str, Any],
  costs: Mapping[str, Mapping[str, float]],
  sizes: Mapping[str, ModelSize],
  limits: Mapping[str, Any],
) -> dict[str, float]:
  """An arm beside the limits of the machine.

  Time is that of decoding, prefill apart, whatever it was spent on.

  Args:
    figures: of `specdec.benchmarking.summarize_arms`.
    costs: of `specdec.statistics.summarize`.
    sizes: see `flops`.
    limits: of `models.machine_limits`.

  Returns:
    `arithmetic_intensity` (operations per byte) and `flops_per_second`;
    `seconds_per_target_forward` and `ideal_seconds_per_target_forward`, what
    reading the weights and filled cache, those of drafts included, would take
    flat out; `of_memory_limit`, the second over the first.
  """
  steps = max(figures['reads']['target']['forwards'], 1)
  seconds = max(figures['seconds'] - figures['prefill_seconds'], 1e-9)
  read = bytes_read(figures['reads'], costs)
  ideal = read / limits['bytes_per_second']
  operations = flops(figures, sizes)
  return {
    'arithmetic_intensity': operations / max(read, 1),
    'flops_per_second': operations / seconds,
    'seconds_per_target_forward': seconds / steps,
    'ideal_seconds_per_target_forward': ideal / steps,
    'of_memory_limit': ideal / seconds,
  }
