"""Times two ways to attend while decoding: the second table of docs/cpu.md.

python scripts/measure_attention.py
"""

import time

from absl import flags
import command_line
import jax
import jax.numpy as jnp

from models import attention

_LAYERS = flags.DEFINE_integer('layers', 24, 'per measurement')
_HEADS = flags.DEFINE_integer('heads', 20, 'attention heads')
_WIDTH = flags.DEFINE_integer('head_width', 64, 'of each head')
_SLOTS = flags.DEFINE_integer('slots', 448, 'of the cache')
_QUERIES = flags.DEFINE_list('queries', ['1', '2', '5', '8', '16'], 'tokens')
_REPEATS = flags.DEFINE_integer(
  'repeats', 15, 'interleaved; the fastest counts'
)

_WAYS = {
  'batched': attention._batched,
  'block-diagonal': attention._block_diagonal,
}


def _milliseconds_per_layer(queries: int, dtype: str) -> dict[str, float]:
  heads = (_HEADS.value, _WIDTH.value)
  draw = lambda tokens, seed: jax.random.normal(
    jax.random.key(seed), (1, tokens, *heads), jnp.dtype(dtype)
  )
  query = draw(queries, 0)
  caches = [draw(_SLOTS.value, seed) for seed in range(2 * _LAYERS.value)]
  mask = jnp.ones((1, queries, _SLOTS.value), bool)

  def layers(way, query, caches, mask):
    pairs = zip(caches[::2], caches[1::2], strict=True)
    return sum(way(query, *pair, mask, scale=0.1) for pair in pairs)

  run = jax.jit(layers, static_argnums=0)
  best = dict.fromkeys(_WAYS, float('inf'))
  for _ in range(_REPEATS.value + 1):  # the first one compiles
    for name, way in _WAYS.items():
      start = time.perf_counter()
      run(way, query, caches, mask).block_until_ready()
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
