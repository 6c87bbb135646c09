"""Measurements of a machine: bandwidth, kernels, and forwards.

The speed of a machine drifts. So alternatives are timed in turns, the bandwidth
is measured again before every batch of a benchmark, and medians are used.

V(N) is the time of one target forward over N tree nodes of each row.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from models.nn import attention
from models.nn import matrices as matrices_lib
from models.nn.cpu import build
from models.nn.cpu import ops
from models.text import choice as choice_lib
from models.text import pair as pair_lib
from specdec import best as best_lib
from specdec import cache as cache_lib
from specdec import carried as carried_lib
from specdec import mappings
from specdec import model as model_lib

Row = dict[str, Any]
"""A row of a table, by column."""

# Larger than the caches of a processor, small enough to fit beside the models.
_READ_BYTES = {'cpu': 256 << 20, 'default': 2 << 30}
_COLUMNS = 1024
_REPEATS = 4  # per sample


@jax.jit
def _product(array, vector):
  """Reads the array as decoding reads weights."""
  return lax.dot_general(array, vector, (((1,), (0,)), ((), ())))


_sum = jax.jit(jnp.sum)


class Bandwidth:
  """Measures how fast the default device reads, sample by sample.

  That is the rate of reading a large array by the faster of two kernels.
  """

  def __init__(self) -> None:
    platform = jax.default_backend()
    size = _READ_BYTES.get(platform, _READ_BYTES['default'])
    self._array = jnp.ones((size // (4 * _COLUMNS), _COLUMNS), jnp.float32)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
  """Seconds of target forwards, at one batch size, dtype and context length.

  Raises:
    ValueError: V(1), plain decoding, is missing.
  """

  prompt: float  # Seconds of reading a batch of prompts.
  verification: Mapping[int, float]  # V by N.

  def __post_init__(self):
    if 1 not in self.verification:
      raise ValueError(
        'verification must include the seconds of 1 node, got those of'
        f' {sorted(self.verification)}'
      )

  def of_nodes(self, num_nodes: int) -> float:
    """V(N) in seconds, interpolated; ValueError beyond the measured N."""
    sizes = sorted(self.verification)
    if not 1 <= num_nodes <= sizes[-1]:
      raise ValueError(
        f'num_nodes must be 1 to {sizes[-1]}, for which V was measured, got'
        f' {num_nodes}'
      )
    values = [self.verification[size] for size in sizes]
    return float(np.interp(num_nodes, sizes, values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
  """How much is timed for V(N)."""

  num_steps: int = 8  # Forwards per measurement.
  repeats: int = 5  # How often each measurement is made.
  #: After two N, those that take longer than so many plain forwards are left
  #: out.
  most_tokens: float = math.inf
  #: Once it returns True, further N (after two) and repeats are left out.
  is_late: Callable[[], bool] = lambda: False


@mappings.jit(static_argnames='window_size')
def _read_prompts(
  target: model_lib.LanguageModel, texts, *, window_size: int
) -> cache_lib.KVCache:
  state = model_lib.start(
    target.spec, target.read, texts, window_size=window_size
  )
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


def _median_seconds(
  verify: Callable[[int], float],
  sizes: Sequence[int],
  effort: Effort,
) -> dict[int, float]:
  """Medians of the seconds by N; see `measure_step_costs`."""
  measured: dict[int, list[float]] = {}
  for size in sizes:
    if len(measured) >= 2 and effort.is_late():
      break
    verify(size)  # compiles
    first = verify(size)
    longest = effort.most_tokens * measured.get(sizes[0], [first])[0]
    if len(measured) >= 2 and first > longest:
      break
    measured[size] = [first]
  repeated: dict[int, list[float]] = {size: [] for size in measured}
  for _ in range(effort.repeats):  # interleaved, because machines drift
    for size, seconds in repeated.items():
      seconds.append(verify(size))
    if effort.is_late():
      break
  return {size: float(np.median(seconds)) for size, seconds in repeated.items()}


def measure_step_costs(
  target: model_lib.LanguageModel,
  texts: Sequence[Sequence[int]],
  *,
  prompt_slots: int,
  max_new_tokens: int,
  context: int,
  node_counts: Sequence[int],
  effort: Effort = Effort(),
) -> StepCosts:
  """Times target forwards over different tokens; medians of repeats.

  Args:
    target: the model.
    texts: tokens like those to be decoded, for each row; repeated if short.
    prompt_slots: P, the padded length of the prompts.
    max_new_tokens: room for new tokens, as padded by `specdec.generate`.
    context: tokens in the cache during verification.
    node_counts: the N to measure; 1 is added.
    effort: how much is timed.

  Raises:
    ValueError: a text is empty, or the context does not fit into the slots.
  """
  num_slots = prompt_slots + max_new_tokens
  if not texts or not all(texts):
    raise ValueError('texts must have at least one token in every row')
  if not 1 < context <= num_slots:
    raise ValueError(f'context must be 2 to {num_slots} tokens, got {context}')
  sizes = sorted({1, *node_counts})
  resize = lambda row: np.resize(np.int32(row), num_slots + sizes[-1])
  text = jnp.asarray(np.stack(list(map(resize, texts))))
  full = jnp.full(len(texts), context, jnp.int32)
  prompts = carried_lib.Texts(text[:, :prompt_slots], full + 1, num_slots)
  read = lambda: jax.block_until_ready(
    _read_prompts(target, prompts, window_size=sizes[-1])
  )
  cache = read()  # compiles
  begin = time.perf_counter()
  read()
  prompt = time.perf_counter() - begin

  # Slots between prompts and context are zero, which take as long to read.
  def verify(num_nodes: int) -> float:
    nonlocal cache  # It is donated, its length included.
    cache = cache.replace(length=jnp.copy(full))
    begin = time.perf_counter()
    cache, chosen = _verify(
      target, text, cache, effort.num_steps, num_nodes=num_nodes
    )
    jax.block_until_ready(chosen)
    return (time.perf_counter() - begin) / effort.num_steps

  seconds = _median_seconds(verify, sizes, effort)
  return StepCosts(prompt=prompt, verification=seconds)


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
    times = _best_milliseconds(runs, repeats)
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


def forward(
  models: choice_lib.ModelChoice,
  widths: Sequence[int],
  repeats: int,
  *,
  context: int,
) -> list[Row]:
  """V(N) of a target as median milliseconds by N, which are 1 and the `widths`.

  The context is the number of tokens in the cache.

  Raises:
    ValueError: a width is below 1.
  """
  widths = sorted({1, *widths})
  if widths[0] < 1:
    raise ValueError(f'--sizes={widths}: expected integers of at least 1')
  target = pair_lib.load_pair(models.of_target).target
  seconds = measure_step_costs(
    target,
    [list(range(target.spec.vocab_size))],
    prompt_slots=context,
    max_new_tokens=64,
    context=context,
    node_counts=widths,
    effort=Effort(num_steps=4, repeats=repeats),
  ).verification
  return [
    {'dtype': models.dtype, 'N': n, 'ms': 1e3 * seconds[n]} for n in widths
  ]
