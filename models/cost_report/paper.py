"""The figures of the staged speculative decoding paper, beside the model's.

Spector and Ré 2023, arXiv 2308.04623: GPT-2 Large, a draft of 40 million
parameters and a trigram on an RTX 4090, HumanEval, batch 1. Acceptance is not
published, so it is taken from their table of bytes, and their table of speeds
is what is predicted.
"""

from typing import Any

from specdec.cost_model import Deployment
from specdec.cost_model import HARDWARE
from specdec.cost_model import MODELS
from specdec.cost_model import predict
from specdec.cost_model import Step
from specdec.cost_model import tree_step
from specdec.tree import topology

DEPLOYMENT = Deployment(
  target=MODELS['gpt2-large'],
  draft=MODELS['draft-40m'],
  hardware=HARDWARE['rtx-4090'],
)

# Relative bandwidth and tokens per second, of plain decoding, their chain and
# their staged trees.
_PUBLISHED = {
  'greedy': {'plain': (1.0, 150), 'chain': (0.31, 350), 'staged': (0.23, 475)},
  'top-k 50': {
    'plain': (1.0, 150),
    'chain': (0.48, 219),
    'staged': (0.35, 298),
  },
}
_PYTHON = 0.35  # of their time

# Counted here with the embedded pair, 40 HumanEval prompts: demo_counts_*.json
# in results/amd-epyc-zen4-2-cores, with the relative bandwidth that was counted
# at the paper's sizes.
COUNTED = {
  'greedy': {
    'plain': (Step(), 1.0),
    'chain': (Step(num_nodes=5, tokens=3.318, draft_forwards=4.0), 0.365),
    'tree': (
      Step(num_nodes=63.6, tokens=4.441, draft_forwards=3.788, draft_width=16),
      0.272,
    ),
    'staged': (
      Step(num_nodes=64, tokens=6.827, draft_forwards=1.825, draft_width=16),
      0.162,
    ),
  },
  'top-k 50': {
    'plain': (Step(), 1.0),
    'chain': (Step(num_nodes=5, tokens=1.934, draft_forwards=4.0), 0.627),
    'tree': (
      Step(num_nodes=64, tokens=3.187, draft_forwards=4.0, draft_width=16),
      0.383,
    ),
    'staged': (
      Step(num_nodes=64, tokens=3.255, draft_forwards=2.866, draft_width=16),
      0.356,
    ),
  },
}
CONTEXT = 207
"""Cache slots that a plain forward saw there, the mean."""

_CHAIN = 4


def _acceptance_of_chain(relative_bandwidth: float) -> float:
  """What a chain of 4 needs to read so little."""
  low, high = 0.0, 1.0
  for _ in range(50):
    middle = (low + high) / 2
    step = tree_step(topology.chain(_CHAIN), [middle])
    found = predict(DEPLOYMENT, step, context=CONTEXT).relative_bandwidth
    low, high = (middle, high) if found > relative_bandwidth else (low, middle)
  return high


def compare() -> dict[str, Any]:
  """(e) Both tables of the paper, and what the model makes of them.

  Returns:
    `published`: per row the speedup that its bytes alone would give, that less
    the part of Python, and the published one over the first; `counted`: our
    counts at the paper's sizes; `plain`: the speed of plain decoding that the
    memory of the RTX 4090 allows, in 16 and 32 bits.
  """
  published, counted = [], []
  for mode, methods in _PUBLISHED.items():
    plain_rate = methods['plain'][1]
    for method in ('chain', 'staged'):
      bandwidth, rate = methods[method]
      by_bytes = 1.0 / bandwidth
      published.append(
        {
          'mode': mode,
          'method': method,
          'relative_bandwidth': bandwidth,
          'tokens_per_second': rate,
          'speedup': rate / plain_rate,
          'speedup_by_bytes': by_bytes,
          'speedup_less_python': by_bytes * (1.0 - _PYTHON),
          'attained': rate / plain_rate / by_bytes,
          'acceptance': _acceptance_of_chain(bandwidth)
          if method == 'chain'
          else None,
        }
      )
  for mode, steps in COUNTED.items():
    for method, (step, bandwidth) in steps.items():
      predicted = predict(DEPLOYMENT, step, context=CONTEXT)
      counted.append(
        {
          'mode': mode,
          'method': method,
          'block_efficiency': step.tokens,
          'draft_forwards': step.draft_forwards / step.tokens,
          'relative_bandwidth': predicted.relative_bandwidth,
          'counted_relative_bandwidth': bandwidth,
          'speedup': predicted.speedup,
        }
      )
  plain = predict(DEPLOYMENT, Step(), context=CONTEXT)
  return {
    'published': published,
    'counted': counted,
    'plain': {
      'published': _PUBLISHED['greedy']['plain'][1],
      '16 bits': plain.throughput,
      '32 bits': plain.throughput / 2,
    },
  }
