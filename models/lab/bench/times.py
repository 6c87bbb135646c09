"""Times of parts of decoding on this machine.

`forward`: V(N), a forward over N tree nodes of each row. `draft`: what a step
takes, the target apart. `kernels`: the CPU kernels next to XLA's. The speed of
a machine drifts, so alternatives are timed in turns, and medians are used.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import specdec
from specdec import best as best_lib
from specdec import cache as cache_lib
from specdec import carried as carried_lib
from specdec import mappings
from specdec import model as model_lib
from specdec.models.lab.bench import timing
from specdec.models.nn import attention
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn.cpu import build
from specdec.models.nn.cpu import huge_pages
from specdec.models.nn.cpu import ops
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib

Row = dict[str, Any]
"""A row of a table, by column."""

# Larger than the caches of a processor, small enough to fit next to the models.
_READ_BYTES = {'cpu': 256 << 20, 'default': 2 << 30}
_COLUMNS = 1024
_REPEATS = 4  # per sample


@jax.jit
def _product(array, vector):
  """Reads the array as decoding reads weights."""
  return lax.dot_general(array, vector, (((1,), (0,)), ((), ())))


_sum = jax.jit(jnp.sum)


_ROOM = 64  # Slots for new tokens.
_FORWARDS = 4  # Per measurement of V(N).
_NEW_TOKENS = 24  # Tokens of a decode whose steps are timed.


class Bandwidth:
  """Measures how fast the default device reads, sample by sample.

  That is the rate of reading a large array by the faster of two kernels. On CPU
  the array lies in memory as weights for kernels do.
  """

  def __init__(self) -> None:
    platform = jax.default_backend()
    size = _READ_BYTES.get(platform, _READ_BYTES['default'])
    shape = size // (4 * _COLUMNS), _COLUMNS
    if platform == 'cpu':
      array = huge_pages.zeros(shape).view(np.float32)
      array[...] = 1
      self._array = jax.device_put(array)
    else:
      self._array = jnp.ones(shape, jnp.float32)
    self._vector = jnp.ones(_COLUMNS, jnp.float32)
    self._samples: list[float] = []
    self.sample()  # compiles
    self._samples.clear()

  def _rate(self, read: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready([read() for _ in range(_REPEATS)])
    return self._array.nbytes * _REPEATS / (time.perf_counter() - start)

  def sample(self) -> None:
    """Measures the rate once."""
    readers = (
      lambda: _product(self._array, self._vector),
      lambda: _sum(self._array),
    )
    self._samples.append(max(map(self._rate, readers)))

  def summary(self) -> dict[str, Any]:
    """`bytes_per_second`, the median, and `bytes_per_second_samples`."""
    return {
      'bytes_per_second': float(np.median(self._samples)),
      'bytes_per_second_samples': self._samples,
    }


@mappings.jit(static_argnames='window_size')
def _read_prompts(
  target: model_lib.LanguageModel, texts, *, window_size: int
) -> cache_lib.KVCache:
  state = model_lib.start(target, texts, window_size=window_size)
  return state.cache


@mappings.jit(static_argnames='num_nodes', donate_argnames='cache')
def _verify(
  target: model_lib.LanguageModel, text, cache, num_steps, *, num_nodes: int
):
  """Some forwards over a root and its children, tokens of the text `[B, T]`."""
  nodes = jnp.arange(num_nodes)
  sees = (nodes[:, None] == nodes[None]) | (nodes[None] == 0)
  sees = jnp.broadcast_to(sees[None], (len(text), num_nodes, num_nodes))
  mask = cache.ops.mask(cache.length, sees, cache.num_slots)
  positions = cache.length[:, None] + jnp.minimum(nodes, 1)[None]

  def forward(step, carry):
    cache, chosen = carry
    # Other tokens in each step, or XLA would move work out of the loop.
    first = jnp.maximum(cache.length[0] - num_nodes - step, 0)
    tokens = lax.dynamic_slice_in_dim(text, first, num_nodes, axis=1)
    logits, cache = target.apply(tokens, positions, mask, cache)
    return cache, chosen + best_lib.best_token(logits)

  chosen = jnp.zeros((len(text), num_nodes), jnp.int32)
  return lax.fori_loop(0, num_steps, forward, (cache, chosen))


def verification_seconds(
  target: model_lib.LanguageModel,
  *,
  context: int,
  node_counts: Sequence[int],
  repeats: int,
) -> dict[int, float]:
  """V(N) in seconds by N, at batch size 1; medians of repeats.

  Args:
    target: the model.
    context: tokens in the cache.
    node_counts: the N to measure; 1 is added.
    repeats: how often each is measured.

  Raises:
    ValueError: a size is below 1, or the context below 2.
  """
  sizes = sorted({1, *node_counts})
  if sizes[0] < 1:
    raise ValueError(f'sizes={[*node_counts]}: expected integers of at least 1')
  if context < 2:
    raise ValueError(f'context must be at least 2 tokens, got {context}')
  num_slots = context + _ROOM
  tokens = jnp.arange(num_slots + sizes[-1])[None] % target.spec.vocab_size
  full = jnp.full(1, context, jnp.int32)
  prompts = carried_lib.Texts(tokens[:, :context], full + 1, num_slots)
  cache = _read_prompts(target, prompts, window_size=sizes[-1])

  def verify(num_nodes: int) -> float:
    nonlocal cache  # It is donated, its length included.
    cache = cache.replace(length=jnp.copy(full))
    begin = time.perf_counter()
    cache, chosen = _verify(
      target, tokens, cache, _FORWARDS, num_nodes=num_nodes
    )
    jax.block_until_ready(chosen)
    return (time.perf_counter() - begin) / _FORWARDS

  for size in sizes:
    verify(size)  # compiles
  measured = [[verify(size) for size in sizes] for _ in range(repeats)]
  return dict(zip(sizes, np.median(measured, axis=0).tolist(), strict=True))


def forward(
  model: model_lib.LanguageModel,
  widths: Sequence[int],
  repeats: int,
  *,
  context: int,
) -> list[Row]:
  """V(N) of a model as median milliseconds by N, which are 1 and the `widths`.

  Next to them is how long it takes to read its weights and states, at the
  bandwidth that is measured before and after. `context` are the tokens in the
  cache. ValueError if a width is below 1.
  """
  bandwidth = Bandwidth()
  bandwidth.sample()
  seconds = verification_seconds(
    model,
    context=context,
    node_counts=widths,
    repeats=repeats,
  )
  bandwidth.sample()
  rate = bandwidth.summary()['bytes_per_second']
  read = model.spec.weight_bytes + model.spec.state_bytes
  return [
    {
      'N': n,
      'ms': 1e3 * seconds[n],
      'per_one': seconds[n] / seconds[1],
      'MB': read / 1e6,
      'GB_per_second': rate / 1e9,
      'per_reading': seconds[n] * rate / read,
    }
    for n in seconds
  ]


def draft(
  pair: pair_lib.Pair,
  drafting: settings_lib.DraftSettings,
  *,
  context: int,
  repeats: int,
) -> list[Row]:
  """Milliseconds of a step of chain and tree, the target apart.

  It does not depend on weights, so they may be random (`pair.drawn_pair`).

  Args:
    pair: a target and a drafter.
    drafting: settings of the methods.
    context: tokens in the cache.
    repeats: interleaved measurements.

  Returns:
    A row for each method: N nodes; V(1) and V(N) in `plain_ms` and `verify_ms`;
    `draft_ms`, the rest of a step; and `draft_per_plain`.
  """
  rng, size = np.random.default_rng(0), pair.target.spec.vocab_size
  text = rng.integers(size, size=context).tolist()
  drafting = dataclasses.replace(drafting, inner='none')
  chosen = {
    name: drafters.make_drafter(name, pair, drafting)
    for name in ('chain', 'tree')
  }

  def arm(drafter: specdec.Drafter) -> timing.Arm:
    return lambda prompts, limit: specdec.generate(
      pair.target,
      jax.random.key(0),
      prompts,
      drafter=drafter,
      max_new_tokens=limit,
    )

  arms = {name: arm(drafter) for name, drafter in chosen.items()}
  timing.warm_up(arms, [[text]], max_new_tokens=_NEW_TOKENS)
  measured = timing.time_arms(
    arms, [[text]] * repeats, max_new_tokens=_NEW_TOKENS
  )
  nodes = {name: drafter.shape.num_nodes for name, drafter in chosen.items()}
  seconds = verification_seconds(
    pair.target,
    context=context,
    node_counts=[*nodes.values()],
    repeats=repeats,
  )
  rows = []
  for name, decodes in measured.items():
    steps = [
      (decode.seconds - decode.prefill_seconds)
      / decode.generation.stats.target_forwards
      for decode in decodes
    ]
    plain, verify = seconds[1], seconds[nodes[name]]
    rest = float(np.median(steps)) - verify
    rows.append(
      {
        'method': name,
        'N': nodes[name],
        'draft_ms': 1e3 * rest,
        'plain_ms': 1e3 * plain,
        'verify_ms': 1e3 * verify,
        'draft_per_plain': rest / plain,
      }
    )
  return rows


def _best_milliseconds(
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
  operands = attention.Operands(query, *slots, mask)
  return attention.attend(operands, scale=scale), *slots


def _in_place(
  function: Callable[..., Any], arrays: list[jax.Array]
) -> Callable[[], Any]:
  """A run of a function that is given its arrays and returns new ones."""

  def run():
    out, *arrays[:] = function(*arrays)
    return out

  return run


# All formats that the kernels know, except the one that only files have.
_MADE_DTYPES = [
  dtype for dtype in matrices_lib.KERNEL_DTYPES if dtype != matrices_lib.STORED
]


def kernels(num_rows: Sequence[int], repeats: int) -> list[Row]:
  """Milliseconds of XLA's products and attention, and of `models/nn/cpu`'s.

  24 products of n rows at the shape of a layer of GPT-2 Large, and attention of
  n queries of a layer to 320 of 512 slots; n of them are written before.

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
    times = _best_milliseconds(runs, repeats)
    row: Row = {'what': what, 'dtype': dtype, 'rows': rows}
    table.append(row | times | {'ratio': times['xla'] / times['kernels']})

  rng = np.random.default_rng(0)
  draw = lambda *shape: np.asarray(rng.standard_normal(shape, np.float32))
  for dtype in _MADE_DTYPES:
    shape = features_out, features_in
    blocks = [[(slice(None), draw(*shape))] for _ in range(matrices)]
    make = matrices_lib.FORMATS[dtype].from_rows
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
