"""Measurements of a machine: bandwidth and forwards.

The speed of a machine drifts. So alternatives are timed in turns, the bandwidth
is measured again before every batch of a benchmark, and medians are used.

V(N) is the time of one target forward over N tree nodes of each row.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

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


def forwards(
  target: model_lib.LanguageModel,
  texts: Sequence[Sequence[int]],
  *,
  prompt_slots: int,
  max_new_tokens: int,
  context: int,
  most_nodes: int,
) -> tuple[Callable[[int, int], float], Callable[[int], str]]:
  """Reads prompts, and returns what times forwards after them.

  The arguments are those of `measure_step_costs`.

  Returns:
    A function that takes N and a number of forwards, over different tokens, and
    returns the seconds of one; a function that takes N and returns the text of
    the compiled program.
  """
  num_slots = prompt_slots + max_new_tokens
  if not texts or not all(texts):
    raise ValueError('texts must have at least one token in every row')
  if not 1 < context <= num_slots:
    raise ValueError(f'context must be 2 to {num_slots} tokens, got {context}')
  resize = lambda row: np.resize(np.int32(row), num_slots + most_nodes)
  text = jnp.asarray(np.stack(list(map(resize, texts))))
  full = jnp.full(len(texts), context, jnp.int32)
  prompts = carried_lib.Texts(text[:, :prompt_slots], full + 1, num_slots)
  cache = _read_prompts(target, prompts, window_size=most_nodes)

  # Slots between prompts and context are zero, which take as long to read.
  def verify(num_nodes: int, num_steps: int) -> float:
    nonlocal cache  # It is donated, its length included.
    cache = cache.replace(length=jnp.copy(full))
    begin = time.perf_counter()
    cache, chosen = _verify(target, text, cache, num_steps, num_nodes=num_nodes)
    jax.block_until_ready(chosen)
    return (time.perf_counter() - begin) / num_steps

  def program(num_nodes: int) -> str:
    lowered = _verify.lower(target, text, cache, 1, num_nodes=num_nodes)
    return lowered.compile().as_text()

  return verify, program


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
  sizes = sorted({1, *node_counts})
  verify, _ = forwards(
    target,
    texts,
    prompt_slots=prompt_slots,
    max_new_tokens=max_new_tokens,
    context=context,
    most_nodes=sizes[-1],
  )
  seconds = _median_seconds(
    lambda num_nodes: verify(num_nodes, effort.num_steps), sizes, effort
  )
  return StepCosts(verification=seconds)
