"""Sweeps as PNG files: marks are measured, lines predicted.

Told apart without colour: by mark and dashes.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

from models.plots import COLORS
from models.plots import DOTS_PER_INCH

_MARKERS = 'osD^'
_DASHES = ('-', '--', ':', '-.')


def draw(
  name: str, record: Mapping[str, Any], folder: pathlib.Path
) -> list[str]:
  """Draws one study, and the forwards that predictions are made from.

  Args:
    name: one of `models.sweep.run.STUDIES`.
    record: with `study`, see `models.sweep.run.by_file`.
    folder: where to write; exists.

  Returns:
    The names of the files.
  """
  figures = {f'sweep_{name}': _PICTURES[name](record['study'])}
  if name == 'experts':
    figures['sweep_distinct_experts'] = _distinct(record['study'])
  if 'forwards' in record:
    figures['sweep_forwards'] = _forwards(record['forwards'])
  for stem, figure in figures.items():
    figure.savefig(folder / f'{stem}.png', dpi=DOTS_PER_INCH)
  return [f'{stem}.png' for stem in figures]


def _figure(title: str):
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7.2, 4.4), layout='constrained')
  figure.suptitle(title, fontsize=9)
  return figure, figure.subplots()


def _finish(axes, x_label: str, y_label: str, xs) -> None:
  axes.set_xlabel(x_label, fontsize=8)
  axes.set_ylabel(y_label, fontsize=8)
  axes.set_xscale('log', base=2)
  ticks = sorted(set(xs))
  # The label of a tick right after another would lie on it.
  near = [b < 1.1 * a for a, b in zip([0, *ticks], ticks, strict=False)]
  labels = ['' if one else f'{x}' for x, one in zip(ticks, near, strict=True)]
  axes.set_xticks(ticks, labels)
  axes.minorticks_off()
  axes.tick_params(labelsize=7.5)
  axes.grid(lw=0.3)
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(fontsize=8)


def _rows(number: int) -> str:
  return '1 row' if number == 1 else f'{number} rows'


def _marks(arm: Mapping[str, Any]) -> str:
  """What the marks are, of an arm like all others."""
  return (
    f'marks: measured (median and range of n = {len(arm["speedups"])} decodes);'
    ' lines: predicted'
  )


def _line(
  axes, number, label, xs, measured, predicted, spread=None, shift=1.0
) -> None:
  color, marker = COLORS[number], _MARKERS[number]
  axes.plot(
    xs,
    predicted,
    _DASHES[number],
    color=color,
    lw=1.4,
    label=f'{label}, predicted',
  )
  errors = None
  if spread is not None:
    errors = [
      [value - min(one) for value, one in zip(measured, spread, strict=True)],
      [max(one) - value for value, one in zip(measured, spread, strict=True)],
    ]
  axes.errorbar(
    [x * shift for x in xs],
    measured,
    yerr=errors,
    fmt=marker,
    color=color,
    markersize=6,
    markeredgecolor='black',
    capsize=3,
    lw=1,
    label=f'{label}, measured',
  )


def speedups(study: Mapping[str, Any], title: str) -> Any:
  """All arms of a study over its axis, as a `matplotlib.figure.Figure`."""
  first = study['points'][0]['arms'][study['arms'][0]]
  figure, axes = _figure(f'{title}\n{_marks(first)}')
  for number, name in enumerate(study['arms']):
    arms = [point['arms'][name] for point in study['points']]
    get = lambda key, arms=arms: [arm[key] for arm in arms]
    _line(
      axes,
      number,
      name,
      study['x'],
      get('speedup'),
      get('predicted'),
      get('speedups'),
      # Beside each other, so that the ranges of several arms can be seen.
      shift=1.03 ** (2 * number - len(study['arms']) + 1),
    )
  axes.axhline(1, color='black', lw=0.9)
  axes.set_ylim(bottom=0)
  _finish(axes, study['axis'], 'speedup, times plain decoding', study['x'])
  return figure


def _batch(study):
  return speedups(study, 'Speedup over plain decoding by batch size')


def _context(study):
  rows = _rows(study['points'][0]['batch_size'])
  return speedups(study, f'Speedup over plain decoding by context, {rows}')


def _long(study):
  return speedups(
    study,
    f'Speedup of a free chain of {study["num_draft_tokens"]} by context, one'
    ' row of a Llama',
  )


def _experts(study):
  return speedups(
    study,
    'Speedup of a free chain of'
    f' {study["num_draft_tokens"]} by batch size: a mixture of experts and a'
    ' dense model of the same active size',
  )


def _nodes(study):
  (point,) = study['points']
  figure, axes = _figure(
    'Speedup over plain decoding by the number of verified tokens,'
    f' {_rows(point["batch_size"])}\n'
    + _marks(next(iter(point['arms'].values())))
  )
  xs: list[int] = []
  for number, name in enumerate(study['arms']):
    sizes = study['sizes'][name]
    arms = [point['arms'][f'{name}: {size}'] for size in sizes]
    get = lambda key, arms=arms: [arm[key] for arm in arms]
    _line(
      axes,
      number,
      name,
      sizes,
      get('speedup'),
      get('predicted'),
      get('speedups'),
    )
    xs += sizes
  axes.axhline(1, color='black', lw=0.9)
  axes.set_ylim(bottom=0)
  _finish(axes, study['axis'], 'speedup, times plain decoding', xs)
  return figure


def _distinct(study):
  figure, axes = _figure(
    'Experts of a layer that a step reads: counted on the texts (marks), by'
    ' formula (lines)'
  )
  rows = study['experts']
  get = lambda key: [row[key] for row in rows]
  nodes = study['num_draft_tokens'] + 1
  for number, (label, counted, formula) in enumerate(
    (
      ('plain, 1 token per row', 'counted_plain', 'formula_plain'),
      (f'verification, {nodes} tokens per row', 'counted', 'formula'),
    )
  ):
    color = COLORS[number]
    axes.plot(
      study['x'], get(formula), _DASHES[number], color=color, label=f'{label}'
    )
    axes.plot(
      study['x'],
      get(counted),
      _MARKERS[number],
      color=color,
      markeredgecolor='black',
      label=f'{label}, counted',
    )
  axes.plot(
    study['x'],
    get('independent'),
    ':',
    color='black',
    label=f'if the {nodes} chose independently',
  )
  axes.set_ylim(bottom=0)
  _finish(axes, study['axis'], 'distinct experts per layer', study['x'])
  return figure


def _routing(study):
  figure, axes = _figure(
    'Experts of a layer that a forward over neighbouring tokens reads:'
    ' counted (marks), by formula (lines)'
  )
  for number, size in enumerate(study['batch_sizes']):
    rows = [row for row in study['rows'] if row['batch_size'] == size]
    get = lambda key, rows=rows: [row[key] for row in rows]
    color, label = COLORS[number], _rows(size)
    axes.plot(
      study['x'],
      get('counted'),
      _MARKERS[number],
      color=color,
      markeredgecolor='black',
      label=f'{label}, counted',
    )
    axes.plot(study['x'], get('formula'), '-', color=color, label=label)
    axes.plot(
      study['x'],
      get('independent'),
      '--',
      color=color,
      lw=1,
      label=f'{label}, if tokens were independent',
    )
  axes.axhline(study['sizes']['num_experts'], color='black', lw=0.9)
  axes.set_ylim(bottom=0)
  _finish(axes, study['axis'], 'distinct experts per layer', study['x'])
  return figure


def _forwards(record):
  figure, axes = _figure(
    'Forwards that the machine was fitted to\nmarks: measured; lines: fitted'
  )
  groups: dict[tuple, list] = {}
  for one in record['times']:
    key = (one['model'], one['batch_size'], one['slots'])
    groups.setdefault(key, []).append(one)
  xs = []
  for number, ((model, rows, slots), times) in enumerate(groups.items()):
    positions = [one['batch_size'] * one['num_tokens'] for one in times]
    _line(
      axes,
      number,
      f'{model}, {rows} x {slots} slots',
      positions,
      [1e3 * one['seconds'] for one in times],
      [1e3 * one['predicted'] for one in times],
    )
    xs += positions
  axes.set_yscale('log')
  _finish(
    axes, 'tokens of a forward, all rows', 'milliseconds of a forward', xs
  )
  return figure


_PICTURES = {
  'batch': _batch,
  'context': _context,
  'nodes': _nodes,
  'long': _long,
  'experts': _experts,
  'routing': _routing,
}
