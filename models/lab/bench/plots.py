"""Pictures of benchmark records and plans, drawn with matplotlib."""

from collections.abc import Mapping
import importlib.util
import itertools
import pathlib
import re
import sys
from typing import Any

import numpy as np

from models.text import plan as plan_lib
from models.text import settings as settings_lib

COLORS = (
  *('#4477aa', '#ee6677', '#228833', '#ccbb44'),
  *('#aa3377', '#66ccee', '#994f00', '#117777'),
)
_PEER_COLORS = ('#777777', '#a5a5a5', '#404040')
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
  `..._tokens_per_second.png` and, if there are categories,
  `..._categories.png`.
  """
  kinds = {'tokens_per_second': _draw_rates}
  if 'categories' in record:
    kinds['categories'] = draw_categories
  stem = pathlib.Path(name).stem
  files = {kind: folder / f'{stem}_{kind}.png' for kind in kinds}
  for kind, draw_figure in kinds.items():
    draw_figure(record).savefig(files[kind], dpi=150)
  return list(files.values())


def _figure(record, width, height, title):
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout='constrained')
  figure.suptitle(f'{title}\n{_subtitle(record)}', fontsize=9)
  return figure


def _finish(axes):
  axes.tick_params(labelsize=8)
  axes.spines[['top', 'right']].set_visible(False)


def _subtitle(record: Mapping[str, Any]) -> str:
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
  return (
    f'{device}; target {settings["target"]}, {" and ".join(_dtypes(record))}\n'
    f'{sampling}, batch {batch}, {prompts} prompts, at most {limit} new tokens'
  )


def _dtypes(record) -> list[str]:
  return sorted({name.rpartition(':')[2] for name in record['arms']})


def _label(name: str, record) -> str:
  """The name of an arm, with its dtype only if the dtypes differ."""
  method, _, dtype = name.rpartition(':')
  return method if len(_dtypes(record)) == 1 else f'{method}, {dtype}'


def _colors(record) -> dict[str, str]:
  """The colour of each arm."""
  names = {True: itertools.cycle(_PEER_COLORS), False: itertools.cycle(COLORS)}
  is_peer = lambda name: re.split('[:(]', name)[0] not in settings_lib.METHODS
  return {name: next(names[is_peer(name)]) for name in record['arms']}


def _draw_rates(record):
  """Bars with intervals, one per arm; within each, one with the prompt read."""
  arms, colors = record['arms'], _colors(record)
  height, title = 1.7 + 0.32 * len(arms), 'Decoding speed, 95 % over prompts'
  figure = _figure(record, 7.5, height, title)
  axes = figure.subplots()
  ends = []
  for row, (name, arm) in enumerate(arms.items()):
    color = colors[name]
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
      color=_colors(record)[name],
      label=_label(name, record),
    )
  axes.axhline(1, color='black', lw=0.8, ls=':')
  axes.set_xticks(range(len(groups)), [*groups], rotation=30, ha='right')
  axes.set_ylabel('speed (dotted: no gain)', fontsize=8)
  axes.legend(loc='upper left', bbox_to_anchor=(1.01, 1), fontsize=7)
  _finish(axes)
  return figure


def draw_plan(plan: plan_lib.Plan, title: str) -> Any:
  """A figure of where the time goes: per token, a stacked bar per candidate.

  The parts of a step are the target's forward, and everything else: drafts,
  growth and verification. Both are divided by the tokens of a step.
  """
  from matplotlib.figure import Figure

  rows = plan.candidates
  figure = Figure(figsize=(7.5, 1.4 + 0.32 * len(rows)), layout='constrained')
  figure.suptitle(title, fontsize=9)
  axes, parts = figure.subplots(), np.zeros((2, len(rows)))
  for column, one in enumerate(rows):
    both = one['verification_milliseconds'], one['drafting_milliseconds']
    parts[:, column] = np.array(both) / one['block_efficiency']
    end, text = parts[:, column].sum(), f'{one["block_efficiency"]:.2f}'
    axes.text(
      1.01 * end, column, f'{text} tokens per step', va='center', fontsize=8
    )
  names = ("the target's forward", 'drafts and everything else')
  starts = (0, parts[0])
  for part, start, color, name in zip(
    parts, starts, COLORS, names, strict=False
  ):
    axes.barh(range(len(rows)), part, 0.7, start, color=color, label=name)
  axes.set_yticks(range(len(rows)), [one['name'] for one in rows])
  axes.invert_yaxis()
  axes.set_xlim(0, 1.3 * parts.sum(0).max())
  axes.set_xlabel(
    'milliseconds per token, after the prompt', loc='right', fontsize=8
  )
  axes.legend(fontsize=8)
  _finish(axes)
  return figure
