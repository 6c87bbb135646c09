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

from models.lab.bench import arms as arms_lib

COLORS = (
  *('#4477aa', '#ee6677', '#228833', '#ccbb44'),
  *('#aa3377', '#66ccee', '#994f00', '#117777'),
)
_PEER_COLORS = ('#777777', '#a5a5a5', '#404040')
_MARKERS, _PEER_MARKERS = 'oD^v<>', 'sXP*'
_HOW_TO_INSTALL = "pip install matplotlib (or the extra: 'specdec-jax[plot]')"


def choose_folder(plots: str | None, output: str | None) -> pathlib.Path | None:
  """The folder for pictures, which is made; None for no pictures.

  The arguments are the flags `--plots` and `--output`.

  Raises:
    ValueError: `--plots` is given and matplotlib is missing.
  """
  if plots is None and output is None:
    return None
  if importlib.util.find_spec('matplotlib') is None:
    if plots is not None:
      raise ValueError(
        f'--plots={plots} needs matplotlib; {_HOW_TO_INSTALL}, or leave it out'
      )
    print(f'no pictures without matplotlib: {_HOW_TO_INSTALL}', file=sys.stderr)
    return None
  folder = pathlib.Path(plots or pathlib.Path(output or '').parent)
  folder.mkdir(parents=True, exist_ok=True)
  return folder


def draw(
  record: Mapping[str, Any], folder: pathlib.Path, name: str
) -> list[pathlib.Path]:
  """Draws a record of `models.lab.bench.benchmark` into an existing folder.

  The file names begin with `name` without its folder and suffix, and end with
  `..._tokens_per_second.png`, `..._speeds.png`, `..._roofline.png` and, if
  there are categories, `..._categories.png`.
  """
  kinds = {
    'tokens_per_second': _draw_rates,
    'speeds': _draw_speeds,
    'roofline': _draw_roofline,
  }
  if 'categories' in record:
    kinds['categories'] = draw_categories
  stem = pathlib.Path(name).stem
  files = {kind: folder / f'{stem}_{kind}.png' for kind in kinds}
  for kind, draw_figure in kinds.items():
    draw_figure(record).savefig(files[kind], dpi=150)
  return list(files.values())


def draw_batch_sizes(
  records: Mapping[int, Mapping[str, Any]], folder: pathlib.Path, name: str
) -> pathlib.Path:
  """Draws records by batch size into an existing folder; returns the file.

  On the left the tokens per second of each arm, all rows together, on the right
  its speed over the first arm, measured and as `models.lab.bench.predict` says.
  """
  # The one with the most arms: peers have fewer with many rows.
  first = max(records.values(), key=lambda record: len(record['arms']))
  title = 'Speed by the number of rows'
  figure = _figure(first, 8, 3.4, title, with_batch=False)
  rates, speeds = figure.subplots(1, 2)
  for arm, (color, marker) in _styles(first).items():
    own = {n: one for n, one in records.items() if arm in one['arms']}
    sizes = list(own)
    values = lambda key, arm=arm, own=own: [
      record['arms'][arm].get(key) for record in own.values()
    ]
    style = {'color': color, 'marker': marker, 'ms': 4, 'lw': 1.2}
    label = _label(arm, first)
    rates.plot(sizes, values('tokens_per_second'), label=label, **style)
    speeds.plot(sizes, values('speed'), **style)
    predicted = values('predicted_speed')
    if None not in predicted:
      speeds.plot(sizes, predicted, color=color, ls=':', lw=1.2)
  rates.set_ylabel('tokens per second, all rows')
  speeds.set_ylabel('speed (dotted: predicted)')
  rates.legend(fontsize=7, frameon=False)
  for axes in (rates, speeds):
    axes.set_xscale('log', base=2)
    axes.set_xticks(list(records), [str(size) for size in records])
    axes.set_xlabel('rows decoded at once')
    axes.set_ylim(bottom=0)
    _finish(axes)
  file = folder / f'{pathlib.Path(name).stem}_batch_sizes.png'
  figure.savefig(file, dpi=150)
  return file


def _figure(record, width, height, title, *, with_batch=True):
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout='constrained')
  subtitle = _subtitle(record, with_batch)
  figure.suptitle(f'{title}\n{subtitle}', fontsize=9)
  return figure


def _finish(axes, *, size=8):
  axes.tick_params(labelsize=size)
  axes.spines[['top', 'right']].set_visible(False)


def _subtitle(record: Mapping[str, Any], with_batch: bool) -> str:
  settings, machine = record['settings'], record['machine']
  device = machine['device']
  if machine['platform'] == 'cpu':
    device = f'{machine["processor"]}, {machine["cores"]} cores'
  sampling = 'greedy'
  if settings['temperature'] > 0:
    sampling = f'T = {settings["temperature"]:g}'
    for name in ('top_k', 'top_p', 'min_p'):
      if settings.get(name) is not None:
        sampling += f', {name.replace("_", "-")} {settings[name]:g}'
  batch, limit = settings['batch_size'], settings['max_new_tokens']
  prompts = settings['batches_measured'] * batch
  rows = f'batch {batch}, ' if with_batch else ''
  return (
    f'{device}; target {settings["target"]}, {" and ".join(_dtypes(record))}\n'
    f'{sampling}, {rows}{prompts} prompts, at most {limit} new tokens'
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
    is_peer = name.partition(':')[0].partition('(')[0] in arms_lib.PEER_METHODS
    colors = _PEER_COLORS if is_peer else COLORS
    markers = _PEER_MARKERS if is_peer else _MARKERS
    row, column = divmod(counts[is_peer], len(colors))
    counts[is_peer] += 1
    styles[name] = (colors[column], markers[row % len(markers)])
  return styles


def _draw_rates(record):
  """Bars with intervals, one per arm; within each, one with the prompt read."""
  arms, styles = record['arms'], _styles(record)
  height, title = 1.7 + 0.32 * len(arms), 'Decoding speed, 95 % over prompts'
  figure = _figure(record, 7.5, height, title)
  axes = figure.subplots()
  ends = []
  for row, (name, arm) in enumerate(arms.items()):
    color = styles[name][0]
    rate = arm['decoding_tokens_per_second']
    low, high = arm['decoding_tokens_per_second_interval'] or (rate, rate)
    axes.barh(row, rate, color=color, height=0.7, alpha=0.45)
    axes.barh(row, arm['tokens_per_second'], color=color, height=0.35)
    if low < high:
      # A bootstrap interval need not contain the pooled figure.
      error = [[max(rate - low, 0)], [max(high - rate, 0)]]
      axes.errorbar(rate, row, xerr=error, color='black', capsize=2.5, lw=1)
    ends.append(max(rate, high))
    text = f'{rate:.1f}  ({arm["decoding_speed"]:.2f}x)'
    axes.text(1.01 * ends[-1], row, text, va='center', fontsize=8)
  labels = [_label(name, record) for name in arms]
  axes.set_yticks(range(len(arms)), labels)
  axes.invert_yaxis()
  axes.set_xlim(0, 1.25 * max(ends))
  over = f'(over {labels[0]}; inner: with it)'
  label = f'tokens per second after the prompt {over}'
  axes.set_xlabel(label, loc='right', fontsize=8)
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
  title = f'Speed of each prompt over {_label(baseline, record)}'
  figure = _figure(record, 5.5 * columns + 1, 1.3 + 1.05 * rows, title)
  grid = figure.subplots(rows, columns, sharex=True, squeeze=False).T.flat
  for axes in grid[len(others) :]:
    axes.set_visible(False)
  for axes, name in zip(grid, others, strict=False):
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
  label = 'speed, pooled (line) with 95 % (grey); dotted: no gain'
  figure.supxlabel(label, fontsize=8)
  batched = record['settings']['batch_size'] > 1
  figure.supylabel('batches' if batched else 'prompts', fontsize=8)
  return figure


def draw_categories(record: Mapping[str, Any]) -> Any:
  """A figure of the record's categories and their mean, with a bar per arm."""
  means = {'mean': record['mean_over_categories']}
  groups = {**record['categories'], **means}
  baseline, *others = record['arms']
  others = others or [baseline]
  size = 0.8 / len(others)
  width = 3 + max(0.12 * len(others), 0.35) * len(groups)
  title = f'Speed after the prompt over {_label(baseline, record)}'
  figure = _figure(record, width, 4, title)
  axes = figure.subplots()
  for index, name in enumerate(others):
    axes.bar(
      np.arange(len(groups)) + size * (index - (len(others) - 1) / 2),
      [arms[name]['decoding_speed'] for arms in groups.values()],
      size,
      color=_styles(record)[name][0],
      label=_label(name, record),
    )
  axes.axhline(1, color='black', lw=0.8, ls=':')
  axes.set_xticks(range(len(groups)), [*groups], rotation=30, ha='right')
  axes.set_ylabel('speed (dotted: no gain)', fontsize=8)
  axes.legend(loc='upper left', bbox_to_anchor=(1.01, 1), fontsize=7)
  _finish(axes)
  return figure


def _draw_roofline(record):
  """Operations per byte and per second of each arm, under the roofline."""
  arms, styles = record['arms'], _styles(record)
  height = max(4.2, 1.6 + 0.2 * len(arms))
  figure = _figure(record, 8, height, 'Roofline of the machine')
  axes = figure.subplots()
  memory = record['limits']['bytes_per_second']
  roofs = record['limits']['flops_per_second']
  intensities = [arm['arithmetic_intensity'] for arm in arms.values()]
  low = min(*intensities, 0.5) / 2
  high = 2 * max(*intensities, *(roof / memory for roof in roofs.values()))
  top = max(roofs.values())
  x = np.geomspace(low, high, 200)
  axes.plot(x, np.minimum(memory * x, top) / 1e9, color='black', lw=1.3)
  for dtype, roof in roofs.items():
    axes.plot([roof / memory, high], [roof / 1e9] * 2, color='black', lw=1.3)
    text = f'{dtype}, {roof / 1e9:,.0f} GFLOP/s'
    axes.text(high, 1.05 * roof / 1e9, text, ha='right', fontsize=7.5)
  axes.text(
    1.3 * low,
    1.7 * memory * low / 1e9,
    f'memory, {memory / 1e9:,.1f} GB/s',
    # Parallel to the line: on logarithmic scales, doubling x doubles y.
    rotation=np.degrees(np.arctan2(1.7 * memory / 1e9, 1.3)),
    rotation_mode='anchor',
    transform_rotates_text=True,
    fontsize=7.5,
  )
  for (name, arm), intensity in zip(arms.items(), intensities, strict=True):
    axes.plot(
      intensity,
      arm['flops_per_second'] / 1e9,
      styles[name][1],
      color=styles[name][0],
      markersize=7,
      markeredgecolor='white',
      markeredgewidth=0.7,
      label=f'{_label(name, record)}: {intensity:.1f}',
    )
  lowest = min(arm['flops_per_second'] for arm in arms.values())
  axes.set(xscale='log', yscale='log', xlim=(low, high))
  axes.set_ylim(min(lowest, memory * low) / 2e9, 2.2 * top / 1e9)
  axes.tick_params(labelsize=7)
  axes.grid(which='major', lw=0.3)
  axes.set_xlabel('FLOP per byte read, all models', fontsize=8)
  axes.set_ylabel('attained GFLOP per second', fontsize=8)
  outside = {'loc': 'upper left', 'bbox_to_anchor': (1.01, 1), 'fontsize': 7}
  axes.legend(**outside, title='arm: FLOP per byte', title_fontsize=7)
  return figure
