"""Times two ways to attend while decoding: the second table of docs/cpu.md.

python scripts/measure_attention.py
"""

import time

from absl import flags
import command_line
import jax
import jax.numpy as jnp

from models.nn import attention

_LAYERS = flags.DEFINE_integer('layers', 24, 'per measurement')
_HEADS = flags.DEFINE_integer('heads', 20, 'attention heads')
_WIDTH = flags.DEFINE_integer('head_width', 64, 'of each head')
_SLOTS = flags.DEFINE_integer('slots', 448, 'of the cache')
_QUERIES = flags.DEFINE_list('queries', ['1', '2', '5', '8', '16'], 'tokens')
_REPEATS = flags.DEFINE_integer(
  'repeats', 15, 'interleaved; the fastest counts'
)


def _slots_first(query, key, value, mask, *, scale):
  """Keys and values `[B, S, H, Dh]`."""
  scores = scale * jnp.einsum(
    'bhld,bshd->bhls', query, key, preferred_element_type=jnp.float32
  )
  scores = jnp.where(mask[:, None], scores, -1e30)
  probs = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  return jnp.einsum(
    'bhls,bshd->bhld', probs, value, preferred_element_type=jnp.float32
  )


_WAYS = {'slots first': _slots_first, 'heads first': attention.attend}


def _milliseconds_per_layer(queries: int, dtype: str) -> dict[str, float]:
  draw = lambda tokens, seed: jax.random.normal(
    jax.random.key(seed),
    (1, _HEADS.value, tokens, _WIDTH.value),
    jnp.dtype(dtype),
  )
  query = draw(queries, 0)
  heads_first = [draw(_SLOTS.value, seed) for seed in range(2 * _LAYERS.value)]
  caches = {
    'heads first': heads_first,
    'slots first': [array.swapaxes(1, 2) for array in heads_first],
  }
  mask = jnp.ones((1, queries, _SLOTS.value), bool)

  def layers(way, query, caches, mask):
    pairs = zip(caches[::2], caches[1::2], strict=True)
    return sum(way(query, *pair, mask, scale=0.1) for pair in pairs)

  run = jax.jit(layers, static_argnums=0)
  best = dict.fromkeys(_WAYS, float('inf'))
  for _ in range(_REPEATS.value + 1):  # the first one compiles
    for name, way in _WAYS.items():
      start = time.perf_counter()
      run(way, query, caches[name], mask).block_until_ready()
      best[name] = min(best[name], time.perf_counter() - start)
  return {name: 1e3 * time / _LAYERS.value for name, time in best.items()}


def main() -> None:
  for dtype in ('bfloat16', 'float32'):
    for queries in map(int, _QUERIES.value):
      times = _milliseconds_per_layer(queries, dtype)
      cells = '  '.join(f'{name} {time:.2f}' for name, time in times.items())
      print(f'{dtype:9} {queries:3} queries  {cells}', flush=True)


if __name__ == '__main__':
  command_line.run(main)
