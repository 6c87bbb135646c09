"""Sweeps as Markdown."""

from collections.abc import Mapping
from typing import Any

from models.markdown import to_table


def _point_rows(study: Mapping[str, Any]):
  for x, point in zip(study['x'], study['points'], strict=True):
    for name in study['arms']:
      arm = point['arms'][name]
      yield (
        f'{x}',
        name,
        f'{arm["step"]["tokens"]:.2f}',
        f'{1e3 * arm["step_seconds"]:.1f}',
        f'{1e3 * arm["predicted_step_seconds"]:.1f}',
        f'{arm["speedup"]:.2f}',
        f'{arm["predicted"]:.2f}',
        f'{arm["predicted"] / arm["speedup"]:.2f}',
      )


_HEAD = (
  'method',
  'tokens per step, counted',
  'ms per step',
  'predicted',
  'speedup',
  'predicted',
  'predicted / measured',
)


def _study(study: Mapping[str, Any]) -> str:
  return to_table((study['axis'], *_HEAD), list(_point_rows(study)))


def nodes(study: Mapping[str, Any]) -> str:
  """By the number of verified tokens."""
  (point,) = study['points']
  flat = {
    'x': [size for name in study['arms'] for size in study['sizes'][name]],
    'points': [
      {'arms': {name: point['arms'][f'{name}: {size}']}}
      for name in study['arms']
      for size in study['sizes'][name]
    ],
  }
  rows = [
    row
    for x, one in zip(flat['x'], flat['points'], strict=True)
    for row in _point_rows(
      {'x': [x], 'arms': list(one['arms']), 'points': [one]}
    )
  ]
  return to_table((study['axis'], *_HEAD), rows)


def _crossings(study: Mapping[str, Any]) -> str:
  show = lambda value: 'not here' if value is None else f'{value:.1f}'
  rows = [
    (name, *(show(one[key]) for key in ('measured', 'predicted', 'ratio')))
    for name, one in study['crossings'].items()
  ]
  head = ('method', 'speedup 1 at batch size', 'predicted', 'ratio')
  return to_table(head, rows)


def _forwards(record: Mapping[str, Any]) -> str:
  rows = [
    (
      one['model'],
      f'{one["batch_size"]}',
      f'{one["num_tokens"]}',
      f'{one["slots"]}',
      f'{1e3 * one["seconds"]:.2f}',
      f'{1e3 * one["predicted"]:.2f}',
    )
    for one in record['times']
  ]
  head = ('model', 'rows', 'tokens of each', 'slots', 'ms', 'fitted, ms')
  hardware = record['hardware']
  ((dtype, rate),) = hardware['flops_per_second'].items()
  combined = 'the slower of both' if record['overlap'] else 'their sum'
  return (
    f'{to_table(head, rows)}\n\nFitted:'
    f' {hardware["bytes_per_second"] / 1e9:.1f} GB/s,'
    f' {rate / 1e9:.0f} GFLOP/s in {dtype} ({combined} counts),'
    f' {1e6 * hardware["layer_seconds"]:.0f} us per layer; typical error'
    f' {record["typical_error"]:.0%}.'
  )


def _experts(study: Mapping[str, Any]) -> str:
  rows = [
    (
      f'{one["batch_size"]}',
      f'{one["counted_plain"]:.2f}',
      f'{one["formula_plain"]:.2f}',
      f'{one["counted"]:.2f}',
      f'{one["formula"]:.2f}',
      f'{one["independent"]:.2f}',
      f'{factor["measured"]:.2f}',
      f'{factor["predicted"]:.2f}',
      f'{factor["predicted"] / factor["measured"]:.2f}',
    )
    for one, factor in zip(study['experts'], study['factors'], strict=True)
  ]
  head = (
    'batch size',
    'experts of a plain step',
    'formula',
    'of a verification',
    'formula',
    'if tokens were independent',
    "speedup over twin's",
    'predicted',
    'predicted / measured',
  )
  return to_table(head, rows)


def _routing(study: Mapping[str, Any]) -> str:
  rows = [
    (
      f'{one["batch_size"]}',
      f'{one["num_nodes"]}',
      *(
        f'{one[key]:.2f}'
        for key in ('counted', 'formula', 'independent', 'uniform')
      ),
      f'{one["formula"] / one["counted"]:.2f}',
    )
    for one in sorted(study['rows'], key=lambda one: one['batch_size'])
  ]
  head = (
    'rows',
    'tokens of each',
    'distinct experts, counted',
    'formula',
    'if tokens were independent',
    'and experts alike',
    'formula / counted',
  )
  return to_table(head, rows)


def to_markdown(figures: Mapping[str, Any]) -> str:
  """Everything that `models.sweep.run` found."""
  parts = []
  if 'forwards' in figures:
    parts += ['## Forwards', _forwards(figures['forwards'])]
  if 'batch' in figures:
    study = figures['batch']
    parts += ['## Batch size', _study(study), _crossings(study)]
  if 'context' in figures:
    parts += ['## Context', _study(figures['context'])]
  if 'nodes' in figures:
    parts += ['## Verified tokens', nodes(figures['nodes'])]
  if 'long' in figures:
    study = figures['long']
    parts += ['## Long contexts', _study(study), _forwards(study['forwards'])]
  if 'experts' in figures:
    study = figures['experts']
    parts += ['## Experts', _study(study), _experts(study)]
    parts += [_forwards(one) for one in study['forwards'].values()]
  if 'routing' in figures:
    parts += ['## Routing', _routing(figures['routing'])]
  return '\n\n'.join(parts)
