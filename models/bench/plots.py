"""Pictures of a benchmark's record, for which matplotlib is needed.

The distribution of speeds over prompts and the roofs are figures 2 and 1 of the
staged speculative decoding paper (arXiv 2308.04623).
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
DOTS_PER_INCH = 150
_HOW_TO_INSTALL = "pip install matplotlib (or the extra: 'specdec-jax[plot]')"


def require_matplotlib(flag: str) -> None:
  """Raises ValueError if matplotlib, which the flag needs, is not there."""
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      f'{flag} needs matplotlib; {_HOW_TO_INSTALL}, or leave it out'
    )


def choose_folder(plots: str | None, output: str | None) -> pathlib.Path | None:
  """Where pictures go; refuses now what would fail after the measurements.

  Args:
    plots: what `--plots` says.
    output: what `--output` says.

  Returns:
    A folder, which exists; None for no pictures.

  Raises:
    ValueError: pictures are asked for, and matplotlib is not there.
  """
  if plots is None and output is None:
    return None
  if plots is not None:
    require_matplotlib(f'--plots={plots}')
  elif importlib.util.find_spec('matplotlib') is None:
    print(
      f'no pictures without matplotlib: {_HOW_TO_INSTALL}, then'
      f' scripts/plot_benchmark.py --results={output}',
      file=sys.stderr,
    )
    return None
  folder = pathlib.Path(output or '').parent if plots is None else plots
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  return folder


def draw(
  record: Mapping[str, Any], folder: pathlib.Path, name: str
) -> list[pathlib.Path]:
  """Draws a record of `models.benchmark_report` as three PNG files.

  Args:
    record: as its JSON holds it.
    folder: where to write them; exists.
    name: that theirs begin with, up to the suffix; may be a path.

  Returns:
    `..._tokens_per_second.png`, `..._speeds.png` and `..._roofline.png`.
  """
  stem = pathlib.Path(name).stem
  files = []
  for kind, draw_one in (
    ('tokens_per_second', _draw_rates),
    ('speeds', _draw_speeds),
    ('roofline', _draw_roofline),
  ):
    figure = draw_one(record)
    files.append(folder / f'{stem}_{kind}.png')
    figure.savefig(files[-1], dpi=DOTS_PER_INCH)
  return files


def _figure(record, width, height, what):
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout='constrained')
  figure.suptitle(f'{what}\n{_subtitle(record)}', fontsize=9)
  return figure


def _subtitle(record: Mapping[str, Any]) -> str:
  settings, machine = record['settings'], record['machine']
  on_cpu = machine['platform'] == 'cpu'
  device = machine['processor'] if on_cpu else machine['device']
  if on_cpu:
    device += f', {machine["cores"]} cores'
  sampling = 'greedy'
  if settings['temperature'] > 0:
    sampling = f'T = {settings["temperature"]:g}'
    sampling += ''.join(
      f', {name.replace("_", "-")} {settings[name]:g}'
      for name in ('top_k', 'top_p', 'min_p')
      if settings.get(name) is not None
    )
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
  """An arm; its dtype only where there are several."""
  method, _, dtype = name.rpartition(':')
  return method if len(_dtypes(record)) == 1 else f'{method}, {dtype}'


def _styles(record) -> dict[str, tuple[str, str]]:
  """Of each arm, a colour and a marker."""
  counts = {True: 0, False: 0}
  styles = {}
  for name in record['arms']:
    is_peer = name.partition(':')[0].partition('(')[0] in PEER_METHODS
    colors = _PEER_COLORS if is_peer else COLORS
    markers = 'sXP*' if is_peer else 'oD^v<>'
    number = counts[is_peer]
    counts[is_peer] += 1
    styles[name] = (
      colors[number % len(colors)],
      markers[number // len(colors) % len(markers)],
    )
  return styles


def _draw_rates(record):
  """Bars with intervals, one per arm."""
  arms, styles = record['arms'], _styles(record)
  figure = _figure(
    record, 7.5, 1.5 + 0.32 * len(arms), 'Decoding speed, 95 % over prompts'
  )
  axes = figure.subplots()
  tops = []
  for row, (name, arm) in enumerate(arms.items()):
    rate, interval = arm['tokens_per_second'], arm['tokens_per_second_interval']
    axes.barh(row, rate, color=styles[name][0], height=0.7)
    if interval is not None:
      below, above = rate - interval[0], interval[1] - rate
      # A resampled interval need not hold the figure itself.
      error = [[max(below, 0)], [max(above, 0)]]
      axes.errorbar(rate, row, xerr=error, color='black', capsize=2.5, lw=1)
    tops.append(max(rate, *(interval or (rate,))))
    axes.annotate(
      f'{rate:.1f}  ({arm["speed"]:.2f}x)',
      (tops[-1], row),
      (4, 0),
      textcoords='offset points',
      va='center',
      fontsize=8,
    )
  axes.set_yticks(range(len(arms)), [_label(one, record) for one in arms])
  axes.invert_yaxis()
  axes.set_xlim(0, 1.25 * max(tops))
  axes.set_xlabel(
    f'tokens per second (over {_label(next(iter(arms)), record)})'
  )
  axes.tick_params(labelsize=8)
  axes.spines[['top', 'right']].set_visible(False)
  return figure


def _draw_speeds(record):
  """A histogram per arm, of the speeds batch by batch."""
  names = list(record['arms'])
  baseline, others = names[0], names[1:] or names
  columns = 1 if len(others) <= 6 else 2
  rows = -(-len(others) // columns)
  speeds = {name: record['arms'][name]['speed_per_batch'] for name in others}
  every = np.concatenate(list(speeds.values()))
  low, high = min(every.min(), 1.0), max(every.max(), 1.0)
  margin = 0.03 * (high - low) + 0.01
  bins = np.linspace(max(low - margin, 0), high + margin, 31)
  figure = _figure(
    record,
    5.5 * columns + 1,
    1.3 + 1.05 * rows,
    f'Speed of each prompt over {_label(baseline, record)}',
  )
  grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
  for axes in grid.T.flat:
    axes.set_visible(False)
  for name, axes in zip(others, grid.T.flat, strict=False):
    axes.set_visible(True)
    arm, color = record['arms'][name], _styles(record)[name][0]
    axes.hist(speeds[name], bins, color=color)
    axes.axvline(1, color='black', lw=0.8, ls=':')
    axes.axvline(arm['speed'], color='black', lw=1.2)
    if arm['speed_interval'] is not None:
      axes.axvspan(*arm['speed_interval'], color='#dddddd', lw=0, zorder=0)
    axes.set_title(
      f'{_label(name, record)}: {arm["speed"]:.2f}x',
      loc='left',
      fontsize=8,
      pad=2,
    )
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=3)
    axes.tick_params(labelsize=7)
    axes.spines[['top', 'right']].set_visible(False)
  figure.supxlabel(
    'speed, pooled (line) with 95 % (grey); dotted: no gain', fontsize=8
  )
  figure.supylabel('batches' if _is_batched(record) else 'prompts', fontsize=8)
  return figure


def _is_batched(record) -> bool:
  return record['settings']['batch_size'] > 1


def _draw_roofline(record):
  """Arithmetic per byte and per second of each arm, under the roofs."""
  arms, styles = record['arms'], _styles(record)
  height = max(4.2, 1.6 + 0.2 * len(arms))
  figure = _figure(
    record, 8, height, 'Arithmetic and memory: what the machine allows'
  )
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
  """Roofs, and what lies under them.

  Args:
    axes: to draw on; gets logarithmic scales.
    limits: of `models.machine_limits`.
    points: by label, FLOP per byte, FLOP per second, colour and marker.
  """
  memory = limits['bytes_per_second']
  roofs = limits['flops_per_second']
  intensities = [intensity for intensity, _, _ in points.values()]
  low = min(*intensities, 0.5) / 2
  high = 2 * max(*intensities, *(roof / memory for roof in roofs.values()))
  top = max(roofs.values())
  x = np.geomspace(low, high, 200)
  axes.plot(x, np.minimum(memory * x, top) / 1e9, color='black', lw=1.3)
  for dtype, roof in roofs.items():
    begin = roof / memory
    axes.plot([begin, high], [roof / 1e9] * 2, color='black', lw=1.3)
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
    # As steep as the line: on logarithmic scales, what doubles x doubles y.
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
  rates = [rate / 1e9 for _, rate, _ in points.values()]
  axes.set_xscale('log')
  axes.set_yscale('log')
  axes.set_xlim(low, high)
  axes.set_ylim(min(*rates, memory * low / 1e9) / 2, 2.2 * top / 1e9)
  axes.tick_params(labelsize=7)
  axes.grid(which='major', lw=0.3)
