"""Measurements of single parts of decoding, for scripts/measure.py.

Each function returns the rows of a table as dictionaries. Alternatives are
timed in turns, because the speed of a machine drifts.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoints import hub
from models.lab import task as task_lib
from models.lab.bench import machine
from models.lab.bench import peers
from models.lab.study import costs as costs_lib
from models.nn import attention
from models.nn import matrices as matrices_lib
from models.nn.cpu import build
from models.nn.cpu import ops
from models.text import choice as choice_lib
from models.text import generator as generator_lib
from models.text import pair as pair_lib
from models.text import sources as sources_lib
import specdec
from specdec import cache as cache_lib

Row = dict[str, Any]


def best_milliseconds(
  runs: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, float]:
  """The shortest time of each run over interleaved repeats."""
  for run in runs.values():
    jax.block_until_ready(run())  # compiles
  best = dict.fromkeys(runs, float('inf'))
  for _ in range(repeats):
    for name, run in runs.items():
      start = time.perf_counter()
      jax.block_until_ready(run())
      best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
  return best


def _xla_attention(projections, mask, start, keys, values, *, scale):
  """`ops.attend` of as many heads of queries as of keys, by XLA."""
  heads, width = keys.shape[1], keys.shape[3]
  shape = *projections.shape[:2], 3, heads, width
  query, key, value = (
    projections.astype(keys.dtype).reshape(shape).transpose(2, 0, 3, 1, 4)
  )
  cache = cache_lib.KVCache((keys,), (values,), start, keys.shape[2])
  cache = cache_lib.write(cache, 0, key, value)
  slots = cache.keys[0], cache.values[0]
  return attention.attend(query, *slots, mask, scale=scale), *slots


def _in_place(
  function: Callable[..., Any], arrays: list[jax.Array]
) -> Callable[[], Any]:
  """A run of a function that is given its arrays and returns them anew."""

  def run():
    out, *arrays[:] = function(*arrays)
    return out

  return run


# All formats that the kernels know, except the one that only files have.
_MADE_DTYPES = [
  dtype for dtype in matrices_lib.KERNEL_DTYPES if dtype != matrices_lib.STORED
]


def kernels(num_rows: Sequence[int], repeats: int) -> list[Row]:
  """Milliseconds of XLA's products and attention, and of `models.nn.cpu`'s.

  24 products of n rows at the shape of a layer of GPT-2 Large, and attention of
  n queries of a layer to 320 of 512 slots, of which n are written before.

  Raises:
    ValueError: there are no kernels on this machine.
  """
  if not build.is_available():
    raise ValueError('kernels: there are none on this machine')
  matrices, features_in, features_out = 24, 1280, 5120
  heads, slots, filled, width = 20, 512, 320, 64
  products = jax.jit(
    lambda x, weights: sum(matrices_lib.matmul(x, w) for w in weights)
  )
  layers = {
    way: jax.jit(functools.partial(attend, scale=0.1), donate_argnums=(3, 4))
    for way, attend in (('xla', _xla_attention), ('kernels', ops.attend))
  }
  table: list[Row] = []

  def add(what: str, dtype: str, rows: int, runs) -> None:
    times = best_milliseconds(runs, repeats)
    row: Row = {'what': what, 'dtype': dtype, 'rows': rows}
    table.append(row | times | {'ratio': times['xla'] / times['kernels']})

  rng = np.random.default_rng(0)
  draw = lambda *shape: np.asarray(rng.standard_normal(shape, np.float32))
  for dtype in _MADE_DTYPES:
    shape = features_out, features_in
    blocks = [[(slice(None), draw(*shape))] for _ in range(matrices)]
    make = matrices_lib.FORMATS[dtype].from_blocks
    made = [make(matrix, shape) for matrix in blocks]
    weights = {
      'xla': jax.device_put(matrices_lib.for_xla(made)),
      'kernels': list(map(matrices_lib.pack, made)),
    }
    for n in num_rows:
      x = draw(n, features_in)
      runs = {
        way: functools.partial(products, x, weights[way]) for way in weights
      }
      add('products', dtype, n, runs)
    if not matrices_lib.FORMATS[dtype].is_float:
      continue  # Attention is computed in bfloat16.
    slots_shape = 1, heads, slots, width
    for n in num_rows:
      rows = draw(1, n, 3 * heads * width)
      mask = jnp.tile(jnp.arange(slots) < filled, (1, n, 1))
      start = jnp.full(1, max(filled - n, 0), jnp.int32)
      layer_runs = {
        way: _in_place(
          functools.partial(layer, rows, mask, start),
          [jnp.asarray(draw(*slots_shape), dtype) for _ in range(2)],
        )
        for way, layer in layers.items()
      }
      add('attention', dtype, n, layer_runs)
  return table


_STEPS = 4  # forwards per measurement


def _forwards(
  models: choice_lib.ModelChoice, widths: Sequence[int], context: int
) -> Callable[[], Mapping]:
  """A function that measures V(N) for every N."""
  target = pair_lib.load_pair(models.of_target).target
  return lambda: (
    costs_lib.measure_step_costs(
      target,
      [list(range(target.spec.vocab_size))],
      prompt_slots=context,
      max_new_tokens=64,
      context=context,
      node_counts=widths,
      effort=costs_lib.Effort(num_steps=_STEPS, repeats=1),
    ).verification
  )


def _peer_forwards(
  models: choice_lib.ModelChoice, widths: Sequence[int], context: int
) -> Callable[[], Mapping]:
  """A function that measures V(N) of transformers on torch for every N."""
  torch = peers.import_torch()
  dtype = matrices_lib.format_of(models.dtype).name
  model = peers.load_peer(models.target, dtype, models.revision)
  slots = max(context, *widths)
  ids = torch.zeros((1, slots), dtype=torch.long, device=model.device)
  with torch.inference_mode():
    cache = model(ids[:, :context], use_cache=True).past_key_values

  def seconds(width: int) -> float:
    start = time.perf_counter()
    for _ in range(_STEPS):
      logits = model(ids[:, :width], past_key_values=cache).logits
      logits[0, -1, 0].item()  # waits for the device
      cache.crop(-width)
    return (time.perf_counter() - start) / _STEPS

  def measure() -> dict[int, float]:
    with torch.inference_mode():
      return {width: seconds(width) for width in widths}

  return measure


def forward(
  models: choice_lib.ModelChoice,
  widths: Sequence[int],
  repeats: int,
  *,
  context: int,
  peer: bool,
) -> list[Row]:
  """V(N) of a target as median milliseconds by N, which are 1 and the `widths`.

  The context is the number of tokens in the cache. With `peer` transformers is
  measured in turns with this library.

  Raises:
    ValueError: a width is below 1.
  """
  widths = sorted({1, *widths})
  if widths[0] < 1:
    raise ValueError(f'--sizes={widths}: expected integers of at least 1')
  arms = {'ms': _forwards(models, widths, context)}
  if peer:
    arms['ms, transformers'] = _peer_forwards(models, widths, context)
  for arm in arms.values():
    arm()  # compiles, and reads all weights once
  rounds = [{key: arm() for key, arm in arms.items()} for _ in range(repeats)]
  median = lambda key, n: statistics.median(times[key][n] for times in rounds)
  return [
    {'dtype': models.dtype, 'N': n}
    | {key: 1e3 * median(key, n) for key in arms}
    for n in widths
  ]


def memory(models: choice_lib.ModelChoice) -> list[Row]:
  """The peak of host memory while a target is loaded (Linux only)."""
  sources = sources_lib.open_sources(models.of_target)
  found = sources.target
  jax.devices()  # the memory of the backend itself does not count
  loaded: list[jax.Array] = []

  def load() -> None:
    module = hub.read_module(found, dtype=sources.dtype, packed=sources.packed)
    loaded.extend(jax.block_until_ready(jax.tree.leaves(module)))

  peak = machine.host_peak(load)
  loaded_bytes = sum(leaf.nbytes for leaf in loaded)
  return [
    {
      'model': found.path.name,
      'dtype': sources.dtype,
      'checkpoint_bytes': found.size,
      'loaded_bytes': loaded_bytes,
      'peak_bytes': peak,
      'peak_per_loaded_byte': round(peak / loaded_bytes, 3),
    }
  ]


def _seconds_in_turns(decodings: list[specdec.Decoding]) -> list[float]:
  """Seconds of each decoding, all of which take turns of eight steps."""
  seconds = [0.0] * len(decodings)
  while not all(decoding.done for decoding in decodings):
    for index, decoding in enumerate(decodings):
      start = time.perf_counter()
      if not decoding.done:
        decoding.step(8)
        seconds[index] += time.perf_counter() - start
  return seconds


def fallback(
  generator: generator_lib.Generator,
  prompts: Sequence[str],
  task: task_lib.Task,
) -> list[Row]:
  """Decodes prompts with the adaptive fallback and plainly, in turns.

  Returns:
    For each prompt `seconds`, those with the fallback over those of plain
    decoding; `plain_ms_per_token`; `new_tokens`; `speculative_steps`;
    `same_tokens`.

  Raises:
    ValueError: the task has no `break_even`, without which nothing falls back.
  """
  if task.break_even is None:
    raise ValueError('--break_even is needed; it enables the fallback')
  pair, table = generator.pair, []
  arms = ((specdec.PLAIN, None), (generator.drafter, task.break_even))
  room = task.max_new_tokens
  for ids in map(pair.encode, prompts):
    for limit in (min(24, room), room):  # compiles first
      plain, other = (
        specdec.Decoding(
          pair.target,
          jax.random.key(task.seed),
          [ids],
          max_new_tokens=limit,
          room_for_new_tokens=room,
          sampling=task.sampling,
          eos_ids=pair.eos_ids,
          drafter=drafter,
          break_even=threshold,
        )
        for drafter, threshold in arms
      )
      plain_seconds, seconds = _seconds_in_turns([plain, other])
    stats, tokens = other.result().stats, plain.result().tokens
    table.append(
      {
        'seconds': seconds / plain_seconds,
        'plain_ms_per_token': 1e3 * plain_seconds / len(tokens[0]),
        'new_tokens': stats.new_tokens,
        'speculative_steps': stats.target_forwards - (stats.plain_steps or 0),
        'same_tokens': other.result().tokens == tokens,
      }
    )
  return table
