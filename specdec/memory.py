"""Memory that a decode needs at least, counted from shapes before compiling."""

import math
import os
import pathlib
from typing import Any

import jax

from specdec import cache as cache_lib
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec import step as step_lib
from specdec.draft import drafter as drafter_lib
from specdec.text import constraint as constraint_lib

_FLOAT32 = 4


def device_bytes() -> int | None:
  """Memory of the default device in bytes; None if it is not known.

  For a CPU it is the physical memory, or the limit of the container.
  """
  device = jax.devices()[0]
  if device.platform != 'cpu':
    return (device.memory_stats() or {}).get('bytes_limit')
  try:
    physical = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (AttributeError, OSError, ValueError):  # e.g. Windows
    return None
  limit = pathlib.Path('/sys/fs/cgroup/memory.max')
  try:
    return min(physical, int(limit.read_text()))
  except (OSError, ValueError):  # There is none, or it is `max`.
    return physical


def bytes_on_device(array: Any) -> int:
  """Bytes of the part of an array that one device holds."""
  sharding = getattr(array, 'sharding', None)  # NumPy arrays have none.
  shape = sharding.shard_shape(array.shape) if sharding else array.shape
  return math.prod(shape) * array.dtype.itemsize


def check_fits(needs: dict[str, int]) -> None:
  """Refuses what is larger than the device.

  Args:
    needs: bytes, by what they hold and the arguments that decide on it.

  Raises:
    ValueError: the sum exceeds the memory of the device; names the largest.
  """
  available, needed = device_bytes(), sum(needs.values())
  if available is not None and needed > available:
    largest = max(needs, key=lambda use: needs[use])
    raise ValueError(
      f'at least {needed / 1e9:,.1f} GB of memory are needed, and the device'
      f' has {available / 1e9:,.1f} GB; the largest part,'
      f' {needs[largest] / 1e9:,.1f} GB, is for {largest}'
    )


def _recurrent_bytes(spec: model_lib.NetworkSpec, window: int) -> int:
  """Bytes of the recurrent layers of a row; `window` is in slots."""
  empty = lambda: cache_lib.with_window(spec.init_cache(1, 1), window)
  leaves = jax.tree.leaves(jax.eval_shape(empty).recurrent)
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def decode_bytes(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  prompt_shape: tuple[int, int],
  config: step_lib.DecodeConfig,
  constraint: constraint_lib.Constraint | None = None,
) -> dict[str, int]:
  """Bytes that a device holds at once at least, by part, for `check_fits`.

  `prompt_shape` is B and P, the rows and the padded length of their prompts.
  """
  rows, prompt_slots = prompt_shape
  if rows % target.spec.row_shards == 0:
    rows //= target.spec.row_shards
  vocab_size = target.spec.vocab_size
  stages = [stage.scorer.facts for stage in drafter.stages]
  networks: list[model_lib.Network] = [target]
  networks += [network for facts in stages for network in facts.networks]
  # A head may have matrices of the target.
  leaves = jax.tree.leaves([network.params for network in networks])
  params = {id(leaf): leaf for leaf in leaves}.values()
  bytes_per_slot = sum(
    network.spec.cache_bytes_per_slot // network.spec.slot_shards
    for network in networks
  )
  states = sum(
    _recurrent_bytes(network.spec, window) // network.spec.slot_shards
    for network, window in zip(
      networks, [drafter.shape.num_nodes] + [1] * len(networks), strict=False
    )
  )
  slots = rows * (prompt_slots + config.max_new_tokens)
  drawn = len(stages) if config.rule.children != sampling_lib.BEST else 0
  per_node = rows * vocab_size * _FLOAT32
  return {
    'the weights; see dtype': sum(map(bytes_on_device, params)),
    'the caches; see batch_size and max_new_tokens': slots * bytes_per_slot,
    'the states of layers; see batch_size and num_nodes': rows * states,
    'the logits of the tree; see num_nodes and batch_size': (
      drafter.shape.num_nodes * per_node
    ),
    'the distributions of drawn nodes; see capacity and batch_size': (
      drawn * drafter.shape.capacity * per_node
    ),
    # A constraint of one's own may have plain numbers.
    'the tables of the constraint': sum(
      bytes_on_device(leaf)
      for leaf in jax.tree.leaves(constraint)
      if isinstance(leaf, jax.Array)
    ),
  }
