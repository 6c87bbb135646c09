"""One function per claim: figures of the cost model, ready for JSON.

Those over a range have `x` and `lines`, the values by label; None where weights
and caches do not fit the machine.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from specdec.cost_model import best_tree
from specdec.cost_model import break_even_batch_size
from specdec.cost_model import Deployment
from specdec.cost_model import forward_cost
from specdec.cost_model import ForwardCost
from specdec.cost_model import ModelShape
from specdec.cost_model import predict
from specdec.cost_model import Step
from specdec.cost_model import tree_step
from specdec.tree import topology

CONTEXTS = tuple(2**power for power in range(9, 18))
BATCH_SIZES = (1, *(n << power for power in range(7) for n in (2, 3)), 256)
_MOST_TOKENS = 64
_LONGEST_CHAIN = 16


def _fits(deployment: Deployment, batch_size: int, context: float) -> bool:
  memory = deployment.hardware.memory_bytes
  needed = deployment.resident_bytes(batch_size=batch_size, context=context)
  return memory is None or needed <= memory


def _speedup(
  deployment: Deployment, step: Step, batch_size: int, context: float
) -> float | None:
  if not _fits(deployment, batch_size, context):
    return None
  return predict(
    deployment, step, batch_size=batch_size, context=context
  ).speedup


def _of_option(cost: ForwardCost) -> dict[str, float]:
  return {'bytes': cost.bytes} | dataclasses.asdict(cost)


def options(
  shape: ModelShape,
  *,
  num_tokens: int = 10,
  contexts: Sequence[int] = (2048, 131072),
  ratios: Sequence[float] = (1.5, 2.0),
) -> dict[str, Any]:
  """(a) Option 1, one query of n tokens; option 2, n queries of one token.

  Args:
    shape: of the model.
    num_tokens: n.
    contexts: of every query.
    ratios: of the bytes of both options, to find contexts for.

  Returns:
    `rows` by context: the bytes of both options, the ratios, and how many of
    the n tokens option 1 must emit to read as little per token; and
    `contexts_for` the ratios, None where no context has it.
  """

  def both(context: float) -> tuple[ForwardCost, ForwardCost]:
    one = forward_cost(shape, num_tokens=num_tokens, context=context)
    many = forward_cost(shape, batch_size=num_tokens, context=context)
    return one, many

  rows = []
  for context in contexts:
    one, many = both(context)
    ratio = many.bytes / one.bytes
    rows.append(
      {
        'context': context,
        'option_1': _of_option(one),
        'option_2': _of_option(many),
        'cache_ratio': many.cache_read_bytes / one.cache_read_bytes,
        'total_ratio': ratio,
        'tokens_to_break_even': num_tokens / ratio,
      }
    )
  # All but the caches read is the same, F: (F + n s) / (F + s) = r.
  same = both(0)[0].bytes
  contexts_for = {
    f'{ratio:g}': (ratio - 1)
    * same
    / ((num_tokens - ratio) * shape.kv_bytes_per_token)
    if ratio < num_tokens
    else None
    for ratio in ratios
  }
  low, high = CONTEXTS[0], CONTEXTS[-1]
  costs = {
    context: both(context)
    for context in np.geomspace(low, high, 65).round().astype(int).tolist()
  }
  return {
    'model': shape.name,
    'num_tokens': num_tokens,
    'rows': rows,
    'contexts_for': contexts_for,
    'x': list(costs),
    'lines': {
      'ratio': [many.bytes / one.bytes for one, many in costs.values()]
    },
  }


def by_batch_size(
  deployment: Deployment,
  acceptance: float,
  *,
  context: int,
  lengths: Sequence[int] = (1, 2, 4, 8),
) -> dict[str, Any]:
  """(b) The speedup of chains over batch sizes, and where it ends.

  Args:
    deployment: models and machine.
    acceptance: of a drafted token.
    context: of every row.
    lengths: of the chains.

  Returns:
    Besides the lines, `break_even` batch sizes; by batch size
    `best_draft_length` and `rates`, those of plain decoding and of that length:
    latency in seconds per token of a row, throughput in tokens per second.
  """
  steps = {n: tree_step(topology.chain(n), [acceptance]) for n in lengths}
  best, rates = {}, {}
  for batch_size in BATCH_SIZES:
    tree = best_tree(
      deployment,
      [acceptance],
      num_nodes=_LONGEST_CHAIN + 1,
      max_depth=_LONGEST_CHAIN,
      batch_size=batch_size,
      context=context,
    )
    best[batch_size] = tree.depth if tree else 0
    fastest = tree_step(tree, [acceptance]) if tree else Step()
    rates[batch_size] = [
      {'latency': found.latency, 'throughput': found.throughput}
      for found in (
        predict(deployment, step, batch_size=batch_size, context=context)
        for step in (Step(), fastest)
      )
    ]
  return {
    'context': context,
    'x': list(BATCH_SIZES),
    'lines': {
      f'{n} drafted': [
        _speedup(deployment, step, batch_size, context)
        for batch_size in BATCH_SIZES
      ]
      for n, step in steps.items()
    },
    'break_even': {
      f'{n} drafted': break_even_batch_size(deployment, step, context=context)
      for n, step in steps.items()
    },
    'best_draft_length': best,
    'rates': rates,
  }


def by_context(
  deployment: Deployment,
  acceptance: float,
  *,
  num_draft_tokens: int = 4,
  batch_sizes: Sequence[int] = (1, 32, 128),
) -> dict[str, Any]:
  """(c) The speedup of a chain over contexts, with the draft and for free.

  A draft reads a cache of its own; n-grams and prompt lookup do not.

  Args:
    deployment: models and machine.
    acceptance: of a drafted token, whoever drafts.
    num_draft_tokens: of the chain.
    batch_sizes: two lines each.
  """
  step = tree_step(topology.chain(num_draft_tokens), [acceptance])
  drafts = {'': deployment}
  if deployment.draft is not None:
    drafts[', free draft'] = dataclasses.replace(deployment, draft=None)
  return {
    'num_draft_tokens': num_draft_tokens,
    'x': list(CONTEXTS),
    'lines': {
      f'batch {batch_size}{label}': [
        _speedup(one, step, batch_size, context) for context in CONTEXTS
      ]
      for label, one in drafts.items()
      for batch_size in batch_sizes
    },
  }


def expert_share(shapes: Sequence[ModelShape]) -> dict[str, Any]:
  """(d) The part of a layer's experts that n tokens need."""
  tokens = range(1, _MOST_TOKENS + 1)
  lines = {}
  for shape in shapes:
    experts = shape.experts
    assert experts is not None
    lines[shape.name] = [
      experts.expected_distinct(n) / experts.count for n in tokens
    ]
  return {'x': list(tokens), 'lines': lines}


def by_experts(
  shapes: Sequence[ModelShape],
  deployment: Deployment,
  acceptance: float,
  *,
  context: int,
  num_draft_tokens: int = 4,
) -> dict[str, Any]:
  """(d) Mixtures beside dense models of the same active size.

  Drafting is free here, so that nothing but verification differs.

  Args:
    shapes: with experts.
    deployment: on what; its models do not matter.
    acceptance: of a drafted token.
    context: of every row.
    num_draft_tokens: of the chain.
  """
  step = tree_step(topology.chain(num_draft_tokens), [acceptance])
  rows, lines = [], {}
  for shape in shapes:
    experts = shape.experts
    assert experts is not None
    mixture = dataclasses.replace(deployment, target=shape, draft=None)
    twin = dataclasses.replace(mixture, target=shape.dense_twin())
    speeds = [
      predict(one, step, context=context).speedup for one in (mixture, twin)
    ]
    rows.append(
      {
        'model': shape.name,
        'experts': experts.count,
        'plain_experts': experts.expected_distinct(1),
        'verified_experts': experts.expected_distinct(step.num_nodes),
        'verification': [step.tokens / speed for speed in speeds],
        'speedup': speeds,
      }
    )
    for name, one in ((shape.name, mixture), ('its dense twin', twin)):
      lines[f'{shape.name}: {name}'] = [
        _speedup(one, step, batch_size, context) for batch_size in BATCH_SIZES
      ]
  return {
    'context': context,
    'num_draft_tokens': num_draft_tokens,
    'rows': rows,
    'x': list(BATCH_SIZES),
    'lines': lines,
  }


def roofs(
  deployment: Deployment, steps: Mapping[str, Step], *, context: float
) -> dict[str, Any]:
  """(f) Arithmetic per byte and per second, under the roofs of the machine.

  Args:
    deployment: models and machine.
    steps: by name.
    context: of the row; the batch size is 1.
  """
  dtype = deployment.target.dtype
  hardware = deployment.hardware
  points = {}
  for name, step in steps.items():
    predicted = predict(deployment, step, context=context)
    points[name] = {
      'arithmetic_intensity': predicted.arithmetic_intensity,
      'flops_per_second': predicted.flops / predicted.seconds,
      'tokens_per_second': predicted.throughput,
      'speedup': predicted.speedup,
    }
  return {
    'context': context,
    'points': points,
    'limits': {
      'bytes_per_second': hardware.bytes_per_second,
      'flops_per_second': {dtype: hardware.peak(dtype)},
    },
  }
