"""Pictures of benchmark records, drawn with matplotlib.

The distribution of speeds over prompts and the roofline diagram are figures 2
and 1 of the staged speculative decoding paper (arXiv 2308.04623).
"""

from collections.abc import Mapping
import importlib.util
import pathlib
import sys
from typing import Any

import numpy as np

from models.bench.arms import PEER_METHODS

COLORS = (
  '#4477aa',
  '#ee6677',
  '#228833',
  '#ccbb44',
  '#aa3377',
  '#66ccee',
  '#994f00',
  '#117777',
)
_PEER_COLORS = ('#777777', '#a5a5a5', '#404040')
_MARKERS, _PEER_MARKERS = 'oD^v<>', 'sXP*'
DOTS_PER_INCH = 150
_HOW_TO_INSTALL = "pip install matplotlib (or the extra: 'specdec-jax[plot]')"


def require_matplotlib(flag: str) -> None:
  """Raises ValueError if matplotlib, which the flag needs, is missing."""
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      f'{flag} needs matplotlib; {_HOW_TO_INSTALL}, or leave it out'
    )


def choose_folder(plots: str | None, output: str | None) -> pathlib.Path | None:
  """The folder for pictures, checked before anything is measured.

  Args:
    plots: the flag `--plots`.
    output: the flag `--output`.

  Returns:
    A folder that exists, or None for no pictures.

  Raises:
    ValueError: `--plots` is given and matplotlib is missing.
  """
  if plots is None and output is None:
    return None
  if plots is not None:
    require_matplotlib(f'--plots={plots}')
  elif importlib.util.find_spec('matplotlib') is None:
    print(f'no pictures without matplotlib: {_HOW_TO_INSTALL}', file=sys.stderr)
    return None
  folder = pathlib.Path(plots or pathlib.Path(output or '').parent)
  folder.mkdir(parents=True, exist_ok=True)
  return folder


def draw(
  record: Mapping[str, Any], folder: pathlib.Path, name: str
) -> list[pathlib.Path]:
  """Draws a record of `models.bench.benchmark` as three PNG files.

  Args:
    record: as in its JSON file.
    folder: where to write the files; must exist.
    name: the beginning of their names; a folder and a suffix are removed.

  Returns:
    `..._tokens_per_second.png`, `..._speeds.png` and `..._roofline.png`.
  """
  figures = {
    'tokens_per_second': _draw_rates(record),
    'speeds': _draw_speeds(record),
    'roofline': _draw_roofline(record),
  }
  files = []
  for kind, figure in figures.items():
    files.append(folder / f'{pathlib.Path(name).stem}_{kind}.png')
    figure.savefig(files[-1], dpi=DOTS_PER_INCH)
  return files


def _figure(record, width, height, title):
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout='constrained')
  figure.suptitle(f'{title}\n{_subtitle(record)}', fontsize=9)
  return figure


def _finish(axes, *, size=8):
  axes.tick_params(labelsize=size)
  axes.spines[['top', 'right']].set_visible(False)


def _subtitle(record: Mapping[str, Any]) -> str:
  settings, machine = record['settings'], record['machine']
  device = machine['device']
  if machine['platform'] == 'cpu':
    device = f'{machine["processor"]}, {machine["cores"]} cores'
  sampling = 'greedy'
  if settings['temperature'] > 0:
    filters = [
      f', {name.replace("_", "-")} {settings[name]:g}'
      for name in ('top_k', 'top_p', 'min_p')
      if settings.get(name) is not None
    ]
    sampling = ''.join([f'T = {settings["temperature"]:g}', *filters])
  batch = settings['batch_size']
  prompts = settings['batches_measured'] * batch
  return (
    f'{device}; target {settings["target"]}, {" and ".join(_dtypes(record))}\n'
    f'{sampling}, batch {batch}, {prompts} prompts,'
    f' at most {settings["max_new_tokens"]} new tokens'
  )


def _dtypes(record) -> list[str]:
  return sorted({name.rpartition(':')[2] for name in record['arms']})


def _label(name: str, record) -> str:
  """The name of an arm, with its dtype only if the dtypes differ."""
  method, _, dtype = name.rpartition(':')
  return method if len(_dtypes(record)) == 1 else f'{method}, {dtype}'


def _styles(record) -> dict[str, tuple[str, str]]:
  """The colour and the marker of each arm."""
  counts = {True: 0, False: 0}
  styles = {}
  for name in record['arms']:
    is_peer = name.partition(':')[0].partition('(')[0] in PEER_METHODS
    colors = _PEER_COLORS if is_peer else COLORS
    markers = _PEER_MARKERS if is_peer else _MARKERS
    row, column = divmod(counts[is_peer], len(colors))
    counts[is_peer] += 1
    styles[name] = (colors[column], markers[row % len(markers)])
  return styles


def _draw_rates(record):
  """Bars with intervals, one per arm."""
  arms, styles = record['arms'], _styles(record)
  figure = _figure(
    record, 7.5, 1.5 + 0.32 * len(arms), 'Decoding speed, 95 % over prompts'
  )
  axes = figure.subplots()
  ends = []
  for row, (name, arm) in enumerate(arms.items()):
    rate = arm['tokens_per_second']
    low, high = arm['tokens_per_second_interval'] or (rate, rate)
    axes.barh(row, rate, color=styles[name][0], height=0.7)
    if low < high:
      # A bootstrap interval need not contain the pooled figure.
      error = [[max(rate - low, 0)], [max(high - rate, 0)]]
      axes.errorbar(rate, row, xerr=error, color='black', capsize=2.5, lw=1)
    ends.append(max(rate, high))
    axes.annotate(
      f'{rate:.1f}  ({arm["speed"]:.2f}x)',
      (ends[-1], row),
      (4, 0),
      textcoords='offset points',
      va='center',
      fontsize=8,
    )
  axes.set_yticks(range(len(arms)), [_label(name, record) for name in arms])
  axes.invert_yaxis()
  axes.set_xlim(0, 1.25 * max(ends))
  axes.set_xlabel(
    f'tokens per second (over {_label(next(iter(arms)), record)})'
  )
  _finish(axes)
  return figure


def _draw_speeds(record):
  """For each arm, a histogram of the speeds of single batches."""
  baseline, *others = record['arms']
  others = others or [baseline]
  columns = 1 if len(others) <= 6 else 2
  rows = -(-len(others) // columns)
  speeds = {name: record['arms'][name]['speed_per_batch'] for name in others}
  pooled = np.concatenate([*speeds.values(), [1.0]])
  margin = 0.03 * np.ptp(pooled) + 0.01
  bins = np.linspace(max(pooled.min() - margin, 0), pooled.max() + margin, 31)
  figure = _figure(
    record,
    5.5 * columns + 1,
    1.3 + 1.05 * rows,
    f'Speed of each prompt over {_label(baseline, record)}',
  )
  grid = figure.subplots(rows, columns, sharex=True, squeeze=False).T.flat
  for index, axes in enumerate(grid):
    if index >= len(others):
      axes.set_visible(False)
      continue
    name = others[index]
    arm = record['arms'][name]
    axes.hist(speeds[name], bins, color=_styles(record)[name][0])
    axes.axvline(1, color='black', lw=0.8, ls=':')
    axes.axvline(arm['speed'], color='black', lw=1.2)
    if arm['speed_interval'] is not None:
      axes.axvspan(*arm['speed_interval'], color='#dddddd', lw=0, zorder=0)
    title = f'{_label(name, record)}: {arm["speed"]:.2f}x'
    axes.set_title(title, loc='left', fontsize=8, pad=2)
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=3)
    _finish(axes, size=7)
  figure.supxlabel(
    'speed, pooled (line) with 95 % (grey); dotted: no gain', fontsize=8
  )
  batched = record['settings']['batch_size'] > 1
  figure.supylabel('batches' if batched else 'prompts', fontsize=8)
  return figure


def _draw_roofline(record):
  """Operations per byte and per second of each arm, under the roofline."""
  arms, styles = record['arms'], _styles(record)
  height = max(4.2, 1.6 + 0.2 * len(arms))
  figure = _figure(record, 8, height, 'Roofline of the machine')
  axes = figure.subplots()
  points = {
    f'{_label(name, record)}: {arm["arithmetic_intensity"]:.1f}': (
      arm['arithmetic_intensity'],
      arm['flops_per_second'],
      styles[name],
    )
    for name, arm in arms.items()
  }
  plot_roofs(axes, record['limits'], points)
  axes.set_xlabel('FLOP per byte read, all models', fontsize=8)
  axes.set_ylabel('attained GFLOP per second', fontsize=8)
  axes.legend(
    loc='upper left',
    bbox_to_anchor=(1.01, 1),
    fontsize=7,
    title='arm: FLOP per byte',
    title_fontsize=7,
  )
  return figure


def plot_roofs(
  axes,
  limits: Mapping[str, Any],
  points: Mapping[str, tuple[float, float, tuple[str, str]]],
) -> None:
  """Draws a roofline diagram.

  Args:
    axes: to draw on; its scales become logarithmic.
    limits: of `models.bench.machine.MachineLimits.summary`.
    points: by label: FLOP per byte, FLOP per second, colour and marker.
  """
  memory, roofs = limits['bytes_per_second'], limits['flops_per_second']
  intensities = [intensity for intensity, _, _ in points.values()]
  low = min(*intensities, 0.5) / 2
  high = 2 * max(*intensities, *(roof / memory for roof in roofs.values()))
  top = max(roofs.values())
  x = np.geomspace(low, high, 200)
  axes.plot(x, np.minimum(memory * x, top) / 1e9, color='black', lw=1.3)
  for dtype, roof in roofs.items():
    axes.plot([roof / memory, high], [roof / 1e9] * 2, color='black', lw=1.3)
    axes.annotate(
      f'{dtype}, {roof / 1e9:,.0f} GFLOP/s',
      (high, roof / 1e9),
      (-2, 3),
      textcoords='offset points',
      ha='right',
      fontsize=7.5,
    )
  text_x, text_y = 1.3 * low, 1.7 * memory * low / 1e9
  axes.text(
    text_x,
    text_y,
    f'memory, {memory / 1e9:,.1f} GB/s',
    # Parallel to the line: on logarithmic scales, doubling x doubles y.
    rotation=np.degrees(np.arctan2(text_y, text_x)),
    rotation_mode='anchor',
    transform_rotates_text=True,
    fontsize=7.5,
  )
  for label, (intensity, rate, (color, marker)) in points.items():
    axes.plot(
      intensity,
      rate / 1e9,
      marker,
      color=color,
      markersize=7,
      markeredgecolor='white',
      markeredgewidth=0.7,
      label=label,
    )
  lowest = min(rate for _, rate, _ in points.values())
  axes.set_xscale('log')
  axes.set_yscale('log')
  axes.set_xlim(low, high)
  axes.set_ylim(min(lowest, memory * low) / 2e9, 2.2 * top / 1e9)
  axes.tick_params(labelsize=7)
  axes.grid(which='major', lw=0.3)
