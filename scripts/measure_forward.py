"""Times a forward over n positions, V(n), as decoding runs it: in a loop.

python scripts/measure_forward.py --model=demo --dtype=bfloat16
"""

import json
import time

from absl import flags
import command_line
import jax
from jax import lax
import jax.numpy as jnp

_MODEL = flags.DEFINE_string('model', 'demo', 'demo, a folder or a hub id')
_DTYPE = flags.DEFINE_enum(
  'dtype', 'bfloat16', ['float32', 'bfloat16', 'int8'], 'of the weights'
)
_WIDTHS = flags.DEFINE_list(
  'widths', ['1', '2', '5', '8', '12', '16', '24', '32', '64'], 'n'
)
_SLOTS = flags.DEFINE_integer('slots', 320, 'of the cache')
_REPEATS = flags.DEFINE_integer('repeats', 5, 'interleaved; the best counts')
_FORWARDS = 3  # per loop


def _make(model, width):
  from specdec.cache import causal_mask

  start = jnp.array([_SLOTS.value // 2])
  positions = start[:, None] + jnp.arange(width)[None]
  mask = causal_mask(start, width, _SLOTS.value)

  @jax.jit
  def loop(model, tokens):
    def forward(_, carry):
      tokens, cache = carry
      cache = cache.replace(length=start)
      logits, cache = model.apply(tokens, positions, mask, cache)
      return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    cache = model.spec.init_cache(1, _SLOTS.value)
    return lax.fori_loop(0, _FORWARDS, forward, (tokens, cache))[0]

  tokens = jnp.zeros((1, width), jnp.int32)
  loop(model, tokens).block_until_ready()
  return lambda: loop(model, tokens).block_until_ready()


def main() -> None:
  from models.text.pair import load_pair

  model = load_pair(_MODEL.value, None, dtype=_DTYPE.value).target
  runs = {int(width): _make(model, int(width)) for width in _WIDTHS.value}
  best = dict.fromkeys(runs, float('inf'))
  for _ in range(_REPEATS.value):
    for width, run in runs.items():
      start = time.perf_counter()
      run()
      elapsed = (time.perf_counter() - start) / _FORWARDS
      best[width] = min(best[width], elapsed)
  print(json.dumps({n: round(1e3 * time, 2) for n, time in best.items()}))


if __name__ == '__main__':
  command_line.run(main)
