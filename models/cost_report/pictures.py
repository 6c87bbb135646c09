"""The studies as PNG files, for which matplotlib is needed.

Lines differ in dashes and markers, not in colour alone.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from models.bench.plots import COLORS
from models.bench.plots import DOTS_PER_INCH
from models.bench.plots import plot_roofs
from models.cost_report.studies import CONTEXTS

_DASHES = ('-', '--', '-.', ':')
_MARKERS = 'osD^v<>P'
_HATCHES = ('', '///', '...')
_GREYS = ('#333333', '#dddddd', '#ffffff')


def draw(studies: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
  """Draws all studies.

  Args:
    studies: of `models.cost_report.run`.
    folder: where to write; exists.

  Returns:
    The names of the files.
  """
  files = []
  for name, draw_one in _PICTURES.items():
    figure = draw_one(studies)
    figure.savefig(folder / f'{name}.png', dpi=DOTS_PER_INCH)
    files.append(f'{name}.png')
  return files


def _figure(title: str, width: float = 7.2, height: float = 4.4):
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout='constrained')
  figure.suptitle(title, fontsize=9)
  return figure, figure.subplots()


def _finish(axes, x_label: str, y_label: str) -> None:
  axes.set_xlabel(x_label, fontsize=8)
  axes.set_ylabel(y_label, fontsize=8)
  axes.tick_params(labelsize=7.5)
  axes.grid(lw=0.3)
  axes.spines[['top', 'right']].set_visible(False)


def _powers(axes, values) -> None:
  """A logarithmic scale with a tick at every power of two."""
  powers = [value for value in values if value & (value - 1) == 0]
  kilo = lambda value: f'{value // 1024}K' if value >= 1024 else f'{value}'
  axes.set_xscale('log', base=2)
  axes.set_xticks(powers, map(kilo, powers))
  axes.minorticks_off()


def _lines(axes, study, *, groups: int = 0) -> None:
  """A line per label; with groups, those of one look alike but for dashes."""
  for number, (label, values) in enumerate(study['lines'].items()):
    look = number % groups if groups else number
    dashes = number // groups if groups else number
    axes.plot(
      study['x'],
      [np.nan if value is None else value for value in values],
      _DASHES[dashes % len(_DASHES)],
      color=COLORS[look % len(COLORS)],
      marker=_MARKERS[look % len(_MARKERS)],
      markersize=4.5,
      markevery=max(len(values) // 16, 1),
      lw=1.4,
      label=label,
    )


def _break_even_line(axes) -> None:
  axes.axhline(1, color='black', lw=0.9)
  axes.set_ylim(bottom=0)


def _options(studies):
  study = studies['options']
  tokens = study['num_tokens']
  figure, axes = _figure(
    f'{study["model"]}: {tokens} queries x 1 token (option 2) against 1 query x'
    f' {tokens} tokens (option 1)'
  )
  _lines(axes, study)
  for row in study['rows']:
    axes.annotate(
      f'{row["total_ratio"]:.2f}x',
      (row['context'], row['total_ratio']),
      (-6, 7),
      textcoords='offset points',
      ha='right',
      fontsize=8,
    )
  for ratio, context in study['contexts_for'].items():
    if context is None:
      continue
    axes.plot(
      [context, context, study['x'][0]],
      [0, float(ratio), float(ratio)],
      color='black',
      lw=0.8,
      ls=':',
    )
    axes.annotate(
      f'{ratio}x at {context:,.0f}',
      (study['x'][0], float(ratio)),
      (4, 3),
      textcoords='offset points',
      fontsize=8,
    )
  _powers(axes, CONTEXTS)
  axes.set_ylim(bottom=0)
  _finish(
    axes,
    'context of each query, tokens',
    'bytes of option 2 / bytes of option 1',
  )
  return figure


def _setting(studies) -> str:
  one = studies['setting']
  draft = one['draft'] or 'a free draft'
  return (
    f'{one["target"]} with {draft}, {one["hardware"]}, acceptance'
    f' {one["acceptance"]:g}'
  )


def _by_batch_size(studies):
  study = studies['by_batch_size']
  figure, axes = _figure(
    f'Speedup of chains over plain decoding\n{_setting(studies)}, context'
    f' {study["context"]:,}'
  )
  _lines(axes, study)
  _break_even_line(axes)
  _powers(axes, study['x'])
  _finish(axes, 'batch size, rows', 'speedup, times plain decoding')
  axes.legend(fontsize=8)
  return figure


def _by_context(studies):
  study = studies['by_context']
  figure, axes = _figure(
    f'Speedup of a chain of {study["num_draft_tokens"]} over plain decoding;'
    f' lines end where memory does\n{_setting(studies)}',
    width=8.6,
  )
  labels = list(study['lines'])
  _lines(axes, study, groups=sum('free' not in label for label in labels))
  _break_even_line(axes)
  _powers(axes, study['x'])
  _finish(axes, 'context of each row, tokens', 'speedup, times plain decoding')
  axes.legend(fontsize=8, loc='upper left', bbox_to_anchor=(1.01, 1))
  return figure


def _expert_share(studies):
  study = studies['expert_share']
  figure, axes = _figure(
    'Experts of a layer that a forward has to read (uniform routing)'
  )
  _lines(axes, study)
  axes.set_xlim(0, study['x'][-1])
  axes.set_ylim(0, 1.02)
  _finish(
    axes, 'tokens of the forward, all rows', 'share of the experts of a layer'
  )
  axes.legend(fontsize=8)
  return figure


def _by_experts(studies):
  study = studies['by_experts']
  hardware, acceptance = (
    studies['setting'][one] for one in ('hardware', 'acceptance')
  )
  figure, axes = _figure(
    f'Mixtures (lines) and dense models of the same active size (dotted):'
    f' speedup of a free chain of {study["num_draft_tokens"]}\n{hardware},'
    f' acceptance {acceptance:g}, context {study["context"]:,}',
    width=9.4,
  )
  for number, (label, values) in enumerate(study['lines'].items()):
    is_twin = number % 2
    axes.plot(
      study['x'],
      [np.nan if value is None else value for value in values],
      ':' if is_twin else '-',
      color=COLORS[number // 2],
      marker=_MARKERS[number // 2],
      markerfacecolor='white' if is_twin else None,
      markersize=5,
      lw=1.4,
      label=label.partition(': ')[2] if is_twin else label.partition(': ')[0],
    )
  _break_even_line(axes)
  _powers(axes, study['x'])
  _finish(axes, 'batch size, rows', 'speedup, times plain decoding')
  axes.legend(fontsize=8, loc='upper left', bbox_to_anchor=(1.01, 1))
  return figure


def _paper(studies):
  rows = studies['paper']['published']
  figure, axes = _figure(
    'Staged speculative decoding (arXiv 2308.04623, RTX 4090): its table of'
    ' speeds, from its table of bytes',
    height=3.8,
  )
  kinds = {
    'published (table 2)': 'speedup',
    '1 / relative bandwidth (table 1)': 'speedup_by_bytes',
    'the same, less 35 % of Python': 'speedup_less_python',
  }
  height = 0.26
  for number, (label, key) in enumerate(kinds.items()):
    places = np.arange(len(rows)) + (number - 1) * height
    values = [row[key] for row in rows]
    axes.barh(
      places,
      values,
      height,
      color=_GREYS[number],
      edgecolor='black',
      hatch=_HATCHES[number],
      lw=0.7,
      label=label,
    )
    for place, value in zip(places, values, strict=True):
      axes.annotate(
        f'{value:.2f}',
        (value, place),
        (3, 0),
        textcoords='offset points',
        va='center',
        fontsize=7.5,
      )
  labels = [f'{row["method"]}, {row["mode"]}' for row in rows]
  axes.set_yticks(range(len(rows)), labels)
  axes.invert_yaxis()
  _finish(axes, 'speedup, times plain decoding', '')
  axes.set_xlim(right=1.45 * axes.get_xlim()[1])  # room for the legend
  axes.grid(axis='y', visible=False)
  axes.legend(fontsize=8, loc='lower right')
  return figure


def _roofs(studies):
  study = studies['roofs']
  figure, axes = _figure(
    'Where the methods lie under the roofs: gpt2-large, draft-40m, rtx-4090,'
    f' batch 1, context {study["context"]}\n'
    'greedy counts of the embedded pair',
    width=8.4,
  )
  points = {
    f'{name}: {point["arithmetic_intensity"]:.1f} FLOP/byte,'
    f' {point["speedup"]:.2f}x': (
      point['arithmetic_intensity'],
      point['flops_per_second'],
      (COLORS[number], _MARKERS[number]),
    )
    for number, (name, point) in enumerate(study['points'].items())
  }
  plot_roofs(axes, study['limits'], points)
  axes.set_xlabel('FLOP per byte moved, all models', fontsize=8)
  axes.set_ylabel('predicted GFLOP per second', fontsize=8)
  axes.legend(fontsize=7.5, loc='lower right')
  return figure


_PICTURES = {
  'options': _options,
  'by_batch_size': _by_batch_size,
  'by_context': _by_context,
  'expert_share': _expert_share,
  'by_experts': _by_experts,
  'paper': _paper,
  'roofs': _roofs,
}
