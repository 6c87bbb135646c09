"""Times forwards of a target over N tokens, here and in transformers, in turns.

python scripts/measure_forwards.py --target=gpt2-large --dtypes=bfloat16

Needs torch, which users install themselves. Milliseconds, medians, as a
Markdown table; ours are V(N) of the decoding loop (specdec.step_costs).
"""

import statistics
import sys
import time

from absl import flags
import command_line

_TARGET = flags.DEFINE_string('target', 'demo', 'demo, a folder or a hub id')
_DTYPES = flags.DEFINE_list('dtypes', 'bfloat16', 'float32, bfloat16 or both')
_NODES = flags.DEFINE_list('nodes', '1,2,16', 'N of the forwards')
_CONTEXT = flags.DEFINE_integer(
  'context', 192, 'tokens in the cache', lower_bound=8
)
_REPEATS = flags.DEFINE_integer('repeats', 5, 'of each', lower_bound=1)
_STEPS = 4


def _here(name: str, dtype: str, sizes: list[int]):
  """A function that times V(N) for all N."""
  from models.checkpoints import hub
<<<<<<< HEAD
  from models.nn.adapter import as_model
=======
  from models.nn.adapter import as_model
  import specdec
>>>>>>> w-nn
  from specdec.study.costs import measure_step_costs

  target = as_model(hub.load_module(name, dtype=dtype))
  vocab_size = target.spec.vocab_size

  def measure() -> dict[int, float]:
    costs = measure_step_costs(
      target,
      [list(range(vocab_size))],
      prompt_slots=_CONTEXT.value,
      max_new_tokens=64,
      context=_CONTEXT.value,
      num_steps=_STEPS,
      node_counts=sizes,
      repeats=1,
    )
    return dict(costs.verification)

  return measure


def _there(name: str, dtype: str, sizes: list[int]):
  """The same by transformers, with a cache of its own."""
  from models.bench import peers

  torch = peers.import_torch()
  model = peers.load_peer(name, dtype, None)
  ids = torch.zeros((1, _CONTEXT.value), dtype=torch.long, device=model.device)
  with torch.inference_mode():
    cache = model(ids, use_cache=True).past_key_values

  def measure() -> dict[int, float]:
    found = {}
    for size in sizes:
      with torch.inference_mode():
        start = time.perf_counter()
        for _ in range(_STEPS):
          logits = model(ids[:, :size], past_key_values=cache).logits
          logits[0, -1, 0].item()  # waits
          cache.crop(-size)
        found[size] = (time.perf_counter() - start) / _STEPS
    return found

  return measure


def main() -> None:
  from models.bench.record import to_table

  try:
    sizes = sorted({1, *map(int, _NODES.value)})
  except ValueError as error:
    raise ValueError(
      f'--nodes={",".join(_NODES.value)}: expected integers'
    ) from error
  if sizes[0] < 1 or sizes[-1] > 64:
    raise ValueError(f'--nodes={sizes}: expected integers from 1 to 64')
  rows = []
  for dtype in _DTYPES.value:
    if dtype not in ('float32', 'bfloat16'):
      raise ValueError(f'--dtypes: {dtype} is not float32 or bfloat16')
    arms = [make(_TARGET.value, dtype, sizes) for make in (_here, _there)]
    for arm in arms:
      arm()  # compiles, and touches all weights
    rounds = []
    for number in range(_REPEATS.value):
      rounds.append([arm() for arm in arms])
      print(f'{dtype}: round {number + 1}', file=sys.stderr)
    for size in sizes:
      ours, theirs = (
        [found[index][size] for found in rounds] for index in range(2)
      )
      ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
      rows.append(
        (
          dtype,
          f'{size}',
          f'{1e3 * statistics.median(ours):.1f}',
          f'{1e3 * statistics.median(theirs):.1f}',
          f'{statistics.median(ratios):.2f}'
          f' ({min(ratios):.2f}-{max(ratios):.2f})',
        )
      )
  head = ('dtype', 'tokens', 'ms here', 'ms in transformers', 'ratio (range)')
  print(to_table(head, rows))


if __name__ == '__main__':
  command_line.run(main)
