"""How many experts tokens need together, counted and by formula."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from models.mixtral import Mixtral
from models.sweep import mixture
from specdec.cost_model import Experts

_ROWS = 32
_LENGTH = 128


def over_nodes(
  module: Mixtral,
  text: np.ndarray,
  *,
  node_counts: Sequence[int],
  batch_sizes: Sequence[int],
) -> dict[str, Any]:
  """Distinct experts per layer of forwards over neighbouring tokens of a text.

  Routing, and the correlation of tokens of a row, are counted on pairs of
  tokens of the same text; the formula makes of them what more tokens need.

  Args:
    module: a mixture of experts.
    text: `[T]` int32, what rows are cut from.
    node_counts: N.
    batch_sizes: B.

  Returns:
    `rows`, by N and B: `counted`, `formula`, the formula for `independent`
    tokens, and `uniform`, for independent tokens and experts that are all
    alike; `routing`, as counted; `correlation` by N.

  Raises:
    ValueError: the text is shorter than a row, or N or B is beyond the rows.
  """
  if max(node_counts) > _LENGTH or max(batch_sizes) > _ROWS:
    raise ValueError(
      f'--routed_nodes goes up to {_LENGTH} and --routed_batch_sizes up to'
      f' {_ROWS}, got {max(node_counts)} and {max(batch_sizes)}'
    )
  if len(text) < _LENGTH:
    raise ValueError(
      f'a row needs {_LENGTH} tokens, the text has {len(text)}; give a larger'
      ' --corpus'
    )
  starts = np.linspace(0, len(text) - _LENGTH, _ROWS, dtype=int)
  texts = np.stack([text[at : at + _LENGTH] for at in starts])
  chosen = mixture.chosen_experts(module, texts)
  config = module.config
  alike = Experts(
    count=config.num_experts,
    per_token=config.experts_per_token,
    width=config.inner_width,
  )
  independent = dataclasses.replace(
    alike, routing=mixture.chances(chosen, config.num_experts)
  )
  rows, correlations = [], []
  for size in node_counts:
    experts = dataclasses.replace(
      independent,
      correlation=mixture.correlation(chosen, config.num_experts, size),
    )
    correlations.append(experts.correlation)
    rows += [
      {'num_nodes': size, 'batch_size': one}
      | mixture.experts_row(chosen, experts, num_nodes=size, batch_size=one)
      | {'uniform': alike.expected_distinct(size, batch_size=one)}
      for one in batch_sizes
    ]
  return {
    'axis': 'neighbouring tokens of each row in one forward',
    'x': list(node_counts),
    'batch_sizes': list(batch_sizes),
    'rows': rows,
    'correlation': correlations,
    'routing': independent.routing,
    'sizes': {
      'num_layers': config.num_layers,
      'num_experts': config.num_experts,
      'experts_per_token': config.experts_per_token,
    },
  }
