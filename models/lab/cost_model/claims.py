"""Claims about speculative decoding as tables of predictions.

A table is a list of rows, which map names of columns to values. A speedup is
missing (None) where weights and caches exceed the memory. The tables are
discussed in docs/cost_model.md.
"""

from collections.abc import Mapping
import dataclasses
import itertools
import json
import pathlib
from typing import Any

from models.lab.cost_model import forward as forward_lib
from models.lab.cost_model import presets
from models.lab.cost_model import speculation
from specdec.text import text_files
from specdec.tree import topology as topology_lib

Tables = dict[str, list[dict[str, Any]]]

_BATCH_SIZES = tuple(2**power for power in range(9))
_CONTEXTS = tuple(2**power for power in range(9, 18))
_PLAIN = speculation.SpeculativeStep()
_COUNTS = 'amd-epyc-zen4-2-cores'  # Folder of the results that are read.
_METHODS = ('plain', 'chain', 'tree', 'staged')

# Spector and Ré 2023, arXiv 2308.04623: mode, method, relative bandwidth (table
# 1) and tokens per second (table 2).
PAPER = speculation.Deployment(
  target=presets.MODELS['gpt2-large'],
  draft=presets.MODELS['draft-40m'],
  hardware=presets.HARDWARE['rtx-4090'],
)
_PUBLISHED = (
  ('greedy', 'chain', 0.31, 350),
  ('greedy', 'staged', 0.23, 475),
  ('top-k 50', 'chain', 0.48, 219),
  ('top-k 50', 'staged', 0.35, 298),
)
_PLAIN_RATE = 150
_PYTHON_SHARE = 0.35  # of their time


def options(
  shape: forward_lib.ModelShape,
  *,
  num_tokens: int = 10,
  contexts=(2048, 131072),
) -> Tables:
  """Option 1, one query verifying n tokens; option 2, n queries of one token.

  `break_even`: how many of the n tokens option 1 must emit to move as few bytes
  per token as option 2; `contexts_for`: the contexts where option 2 moves 1.5
  and 2 times the bytes.
  """
  rows, break_even = [], []
  for context in contexts:
    first = forward_lib.forward_cost(
      shape, num_tokens=num_tokens, context=context
    )
    second = forward_lib.forward_cost(
      shape, batch_size=num_tokens, context=context
    )
    for name in ('weight', 'activation', 'cache_read', 'cache_write', 'all'):
      field = 'num_bytes' if name == 'all' else f'{name}_bytes'
      gb = [getattr(cost, field) / 1e9 for cost in (first, second)]
      row = {'context': context, 'GB': name, 'option 1': gb[0]}
      rows.append(row | {'option 2': gb[1], 'ratio': gb[1] / gb[0]})
    emitted = num_tokens * first.num_bytes / second.num_bytes
    break_even.append({'context': context, 'emitted tokens': emitted})
  # With F bytes of other traffic and s of one cache, (F + n s) / (F + s) = r.
  other = forward_lib.forward_cost(shape, num_tokens=num_tokens).num_bytes
  context_for = lambda r: (
    other * (r - 1) / ((num_tokens - r) * shape.kv_bytes_per_token)
  )
  contexts_for = [{'ratio': r, 'context': context_for(r)} for r in (1.5, 2.0)]
  return {'bytes': rows, 'break_even': break_even, 'contexts_for': contexts_for}


def _speedups(columns, **sizes) -> dict[str, float | None]:
  return {
    name: speculation.predict(deployment, step, **sizes).speedup
    if deployment.fits(**sizes)
    else None
    for name, (deployment, step) in columns.items()
  }


def by_batch_size(
  deployment: speculation.Deployment, acceptance: float, *, context: int
) -> Tables:
  """Speedup, break-even and best length of chains by batch size.

  `rates` compares plain decoding with the chain of the best draft length.
  """
  steps = {
    n: speculation.tree_step(topology_lib.chain(n), [acceptance])
    for n in (1, 2, 4, 8)
  }
  columns = {f'{n} drafted': (deployment, step) for n, step in steps.items()}
  speedup, rates = [], []
  for batch_size in _BATCH_SIZES:
    sizes = {'batch_size': batch_size, 'context': context}
    speedup.append({'batch size': batch_size} | _speedups(columns, **sizes))
    best = speculation.best_tree(
      deployment, [acceptance], num_nodes=17, max_depth=16, **sizes
    )
    step = speculation.tree_step(best, [acceptance]) if best else _PLAIN
    plain, fastest = (
      speculation.predict(deployment, s, **sizes) for s in (_PLAIN, step)
    )
    row = {
      'batch size': batch_size,
      'plain ms per token': 1e3 * plain.latency,
      'plain tokens/s': plain.throughput,
      'best draft length': int(step.num_nodes) - 1,
      'ms per token': 1e3 * fastest.latency,
      'tokens/s': fastest.throughput,
    }
    rates.append(row)
  end_of = lambda step: speculation.break_even_batch_size(
    deployment, step, context=context
  )
  break_even = [
    {'drafted': n, 'break-even batch size': end_of(step)}
    for n, step in steps.items()
  ]
  return {'speedup': speedup, 'break_even': break_even, 'rates': rates}


def by_context(deployment: speculation.Deployment, acceptance: float) -> Tables:
  """Speedup of a chain of 4 by context, with the draft and a free draft."""
  step = speculation.tree_step(topology_lib.chain(4), [acceptance])
  draft = deployment.draft.name if deployment.draft else 'free draft'
  free = dataclasses.replace(deployment, draft=None)
  columns = {draft: (deployment, step), 'free draft': (free, step)}
  rows = lambda size: [
    {'context': context} | _speedups(columns, batch_size=size, context=context)
    for context in _CONTEXTS
  ]
  return {f'batch_size_{size}': rows(size) for size in (1, 32, 128)}


def by_experts(
  deployment: speculation.Deployment, acceptance: float, *, context: int
) -> Tables:
  """A chain of 4 from a free draft, for mixtures and their dense baselines."""
  step = speculation.tree_step(topology_lib.chain(4), [acceptance])
  rows, columns = [], {}
  for shape in (
    presets.MODELS['mixtral-8x7b'],
    presets.MODELS['qwen3-30b-a3b'],
  ):
    speeds = []
    for target in (shape, shape.dense_baseline()):
      free = dataclasses.replace(deployment, target=target, draft=None)
      columns[target.name] = free, step
      speeds.append(speculation.predict(free, step, context=context).speedup)
    row = {
      'target': shape.name,
      'experts': shape.num_experts,
      'used by 1 token': shape.expected_experts(1),
      'by 5': shape.expected_experts(step.num_nodes),
      'cost of 5 tokens': step.tokens / speeds[0],
      'dense cost': step.tokens / speeds[1],
      'speedup': speeds[0],
      'dense speedup': speeds[1],
    }
    rows.append(row)
  speedup = [
    {'batch size': size} | _speedups(columns, batch_size=size, context=context)
    for size in _BATCH_SIZES
  ]
  return {'batch_size_1': rows, 'speedup': speedup}


def read_counts(results: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Counts of the embedded pair: by mode, the figures of all methods.

  `results` is the folder of that name in the repository.
  """
  read = lambda name: json.loads(text_files.read(str(results / _COUNTS / name)))
  return {
    mode: {arm.partition(':')[0]: found for arm, found in arms.items()}
    for mode, arms in (
      ('greedy', read('demo_counts_greedy.json')['arms']),
      ('top-k 50', read('demo_counts_sampled.json')['arms']),
    )
  }


def paper(counts: Mapping[str, Mapping[str, Any]]) -> Tables:
  """Both tables of the paper, and predictions at its sizes.

  `published` compares the published speedup with that of the bytes alone;
  `counted` has predictions from `counts` (`read_counts`); `plain` has tokens
  per second of plain decoding, at the context of the first counts.
  """
  published = [
    {
      'mode': mode,
      'method': method,
      'relative bandwidth': bandwidth,
      'speedup by bytes': 1 / bandwidth,
      'less Python': (1 - _PYTHON_SHARE) / bandwidth,
      'published speedup': rate / _PLAIN_RATE,
      'published / by bytes': rate / _PLAIN_RATE * bandwidth,
    }
    for mode, method, bandwidth, rate in _PUBLISHED
  ]
  counted: list[dict[str, Any]] = [
    {'mode': mode, 'method': method} | _at_paper_sizes(arms[method], arms)
    for mode, arms in counts.items()
    for method in _METHODS
  ]
  rate = counted[0]['tokens/s']
  plain = {'published': _PLAIN_RATE, '16 bits': rate, '32 bits': rate / 2}
  return {'published': published, 'counted': counted, 'plain': [plain]}


def _at_paper_sizes(figures: Any, arms: Mapping[str, Any]) -> dict[str, float]:
  plain = arms['plain']['reads']['plain']
  context = plain['slots'] / plain['forwards']  # Mean over plain forwards.
  step = counted_step(figures)
  found = speculation.predict(PAPER, step, context=context)
  return {
    'block efficiency': step.tokens,
    'draft forwards per token': step.draft_forwards / step.tokens,
    'counted relative bandwidth': figures['relative_bandwidth_at_paper_costs'],
    'relative bandwidth': found.relative_bandwidth,
    'FLOP per byte': found.arithmetic_intensity,
    'TFLOP/s': found.flops / found.seconds / 1e12,
    'tokens/s': found.throughput,
    'speedup': found.speedup,
  }


def counted_step(figures: Mapping[str, Any]) -> speculation.SpeculativeStep:
  """The mean step of an arm of scripts/benchmark.py with batch size 1."""
  steps, positions = figures['target_forwards'], figures['positions']
  forwards = figures['stage_forwards'].get('draft', 0)
  return speculation.SpeculativeStep(
    num_nodes=positions['target'] / steps,
    tokens=figures['new_tokens'] / steps,
    draft_forwards=forwards / steps,
    draft_width=positions['draft'] / forwards if forwards else 1,
  )


def roofline() -> Tables:
  """The limits of the paper's machine."""
  hardware, dtype = PAPER.hardware, PAPER.target.dtype
  limits = {
    'GB/s': hardware.bytes_per_second / 1e9,
    'TFLOP/s': hardware.peak(dtype) / 1e12,
    'ridge, FLOP per byte': hardware.ridge(dtype),
  }
  return {'limits': [limits]}


def by_devices(
  arms: Mapping[str, Any], *, context: int, devices: int
) -> Tables:
  """A dense target and a mixture on one device and on several.

  They need not have the memory. The draft is TinyLlama 1.1B; `arms` has the
  counts of the steps. `communication` is that of the target's forwards, per
  token; `free draft` is the speedup of the same tree if drafting costs nothing.
  """
  steps = {method: counted_step(arms[method]) for method in ('chain', 'staged')}
  return {
    name.replace('-', '_'): [
      _of_devices(
        presets.MODELS[name],
        presets.HARDWARE[machine].times(number),
        steps,
        sizes,
      )
      for machine, size, number in itertools.product(
        ('v5e', 'v5p', 'v6e', 'h100'), (1, 16), sorted({1, devices})
      )
      for sizes in ({'batch_size': size, 'context': context},)
    ]
    for name in ('llama-2-70b', 'mixtral-8x7b')
  }


def _of_devices(
  target: forward_lib.ModelShape,
  hardware: forward_lib.Hardware,
  steps: Mapping[str, speculation.SpeculativeStep],
  sizes: dict[str, int],
) -> dict[str, Any]:
  draft = presets.MODELS['tinyllama-1.1b']
  plain = forward_lib.forward_cost(target, **sizes)
  row: dict[str, Any] = {
    'machine': hardware.name,
    'batch size': sizes['batch_size'],
    'plain ms per token': 1e3 * plain.seconds(hardware),
    'communication ms': 1e3 * plain.communication_seconds(hardware),
  }
  for method, step in steps.items():
    alone = speculation.Deployment(target=target, draft=None, hardware=hardware)
    found = speculation.predict(
      dataclasses.replace(alone, draft=draft), step, **sizes
    )
    verify = forward_lib.forward_cost(
      target, num_tokens=step.num_nodes, **sizes
    )
    communication = verify.communication_seconds(hardware) / step.tokens
    row |= {
      f'{method} ms per token': 1e3 * found.latency,
      f'{method} communication ms': 1e3 * communication,
      f'{method} speedup': found.speedup,
      f'{method}, free draft': speculation.predict(
        alone, step, **sizes
      ).speedup,
    }
  return row
