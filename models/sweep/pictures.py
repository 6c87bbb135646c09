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
  axes.set_xticks(sorted(set(xs)), [f'{x}' for x in sorted(set(xs))])
  axes.minorticks_off()
  axes.tick_params(labelsize=7.5)
  axes.grid(lw=0.3)
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(fontsize=8)


def _line(axes, number, label, xs, measured, predicted, spread=None) -> None:
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
    xs,
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


def _speedups(study, title: str):
  figure, axes = _figure(
    f'{title}\nmarks: measured (median, and range over prompts); lines:'
    ' predicted'
  )
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
    )
  axes.axhline(1, color='black', lw=0.9)
  axes.set_ylim(bottom=0)
  _finish(axes, study['axis'], 'speedup, times plain decoding', study['x'])
  return figure


def _batch(study):
  return _speedups(study, 'Speedup over plain decoding by batch size')


def _context(study):
  rows = study['points'][0]['batch_size']
  return _speedups(
    study, f'Speedup over plain decoding by context, {rows} rows'
  )


def _experts(study):
  return _speedups(
    study,
    'Speedup of a free chain of'
    f' {study["num_draft_tokens"]} by batch size: a mixture of experts and a'
    ' dense model of the same active size',
  )


def _nodes(study):
  (point,) = study['points']
  figure, axes = _figure(
    'Speedup over plain decoding by the number of verified tokens,'
    f' {point["batch_size"]} rows\nmarks: measured (median, and range over'
    ' prompts); lines: predicted'
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
    ' formula from the counted routing (lines)'
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
  'experts': _experts,
}
