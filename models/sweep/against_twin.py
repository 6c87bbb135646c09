"""Speculation with a mixture of experts, and with its dense twin."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from models.language_model import as_model
from models.sweep import mixture
from models.sweep.fitting import described
from models.sweep.fitting import fit
from models.sweep.measuring import Effort
from models.sweep.measuring import measure_decodes
from models.sweep.studies import make_bench
from models.sweep.studies import measure_point
from models.sweep.studies import PLAIN
from models.sweep.studies import time_forwards
from specdec.cost_model import Hardware

MIXTURE, TWIN = 'mixture', 'dense twin'
_ARM = 'chain'


def over_batch_sizes(
  sizes: mixture.Mixture,
  machine: Hardware,
  *,
  batch_sizes: Sequence[int],
  length: int,
  num_draft_tokens: int,
  effort: Effort,
) -> dict[str, Any]:
  """A free chain on both, over batch sizes.

  To each model the machine is fitted on its own: the products of a few rows
  with an expert's matrices are not those of many rows with wide ones.

  Args:
    sizes: of the models.
    machine: what it can do at best.
    batch_sizes: B.
    length: of the prompts.
    num_draft_tokens: of the chain.
    effort: how long to measure.

  Returns:
    A study whose arms are the two models; `experts`, `mixture.experts_row` by
    batch size, of a verification and (`*_plain`) of plain decoding; `factors`,
    by batch size the speedup of the mixture over that of the twin, measured and
    predicted; by model `forwards`, what was fitted to what.
  """
  module = sizes.mixture()
  shape = sizes.shape()
  drafters = {_ARM: mixture.free_chain(sizes, num_draft_tokens)}
  make = lambda name, target, shape: mixture.subject(
    name, target, shape, sizes.temperature
  )
  sparse = make(MIXTURE, as_model(module), shape)
  dense = make(TWIN, as_model(sizes.twin()), shape.dense_twin())
  # Where the tokens go, in the texts that are decoded.
  largest = max(batch_sizes)
  (batch,) = sparse.batches(batch_size=largest, length=length, count=1)
  plain = measure_decodes(
    sparse, {PLAIN: None}, [batch], dataclasses.replace(effort, repeats=1)
  )[PLAIN][0].generation
  chosen = mixture.chosen_experts(module, np.array(plain.tokens, np.int32))
  experts = shape.experts
  assert experts is not None
  experts = dataclasses.replace(
    experts,
    routing=mixture.chances(chosen, experts.count),
    correlation=mixture.correlation(
      chosen, experts.count, num_draft_tokens + 1
    ),
  )
  sparse = dataclasses.replace(
    sparse, shape=dataclasses.replace(shape, experts=experts)
  )
  times = {
    name: time_forwards(subject, lengths=(length,), effort=effort)
    for name, subject in ((MIXTURE, sparse), (TWIN, dense))
  }
  fits = {name: fit(times[name], machine) for name in times}
  points: dict[str, list] = {}
  for name, subject in ((MIXTURE, sparse), (TWIN, dense)):
    bench = make_bench(
      subject,
      fits[name],
      drafters,
      batch_sizes=batch_sizes,
      length=length,
      effort=effort,
    )
    points[name] = [
      measure_point(bench, drafters, batch_size=one, length=length)
      for one in batch_sizes
    ]
  row = lambda num_nodes, batch_size: mixture.experts_row(
    chosen, experts, num_nodes=num_nodes, batch_size=batch_size
  )
  study = joined(points, batch_sizes)
  return study | {
    'num_draft_tokens': num_draft_tokens,
    'sizes': dataclasses.asdict(sizes),
    'experts': [
      {'batch_size': one}
      | row(num_draft_tokens + 1, one)
      | {f'{key}_plain': value for key, value in row(1, one).items()}
      for one in batch_sizes
    ],
    'forwards': {
      name: described(one, times[name]) for name, one in fits.items()
    },
  }


def joined(
  points: Mapping[str, Sequence[Mapping[str, Any]]], batch_sizes: Sequence[int]
) -> dict[str, Any]:
  """Points of the two models as one study, and `factors` between them."""
  pairs = list(zip(points[MIXTURE], points[TWIN], strict=True))
  arms = [
    {MIXTURE: sparse['arms'][_ARM], TWIN: dense['arms'][_ARM]}
    for sparse, dense in pairs
  ]
  return {
    'axis': 'batch size, rows',
    'x': list(batch_sizes),
    'arms': list(points),
    'points': [
      {
        'batch_size': sparse['batch_size'],
        'plain_step_seconds': {
          name: point['plain_step_seconds']
          for name, point in zip(points, (sparse, dense), strict=True)
        },
        'predicted_plain_step_seconds': {
          name: point['predicted_plain_step_seconds']
          for name, point in zip(points, (sparse, dense), strict=True)
        },
        'arms': both,
      }
      for (sparse, dense), both in zip(pairs, arms, strict=True)
    ],
    'factors': [
      {
        'batch_size': size,
        'measured': both[MIXTURE]['speedup'] / both[TWIN]['speedup'],
        'predicted': both[MIXTURE]['predicted'] / both[TWIN]['predicted'],
      }
      for size, both in zip(batch_sizes, arms, strict=True)
    ],
  }
