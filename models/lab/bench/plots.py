"""Pictures of benchmark records and plans, drawn with matplotlib."""

from collections.abc import Mapping
import importlib.util
import itertools
import pathlib
from typing import Any

import numpy as np

from specdec.models.text import plan as plan_lib

_COLORS = (
  '#4477aa',
  '#ee6677',
  '#228833',
  '#ccbb44',
  '#aa3377',
  '#66ccee',
  '#994f00',
  '#117777',
)


def check_folder(plots: str | None) -> pathlib.Path | None:
  """The folder of the flag `--plots`, which is made; None for no pictures.

  Raises:
    ValueError: matplotlib is missing.
  """
  if plots is None:
    return None
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      f'--plots={plots} needs matplotlib; pip install matplotlib (or the extra:'
      " 'specdec-jax[plot]'), or leave it out"
    )
  folder = pathlib.Path(plots)
  folder.mkdir(parents=True, exist_ok=True)
  return folder


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


def draw_categories(record: Mapping[str, Any]) -> Any:
  """A figure of the record's categories and their mean, with a bar per arm."""
  from matplotlib.figure import Figure

  means = {'mean': record['mean_over_categories']}
  groups = {**record['categories'], **means}
  baseline, *others = record['arms']
  others = others or [baseline]
  size = 0.8 / len(others)
  width = 3 + max(0.12 * len(others), 0.35) * len(groups)
  title = f'Speed after the prompt over {_label(baseline, record)}'
  figure = Figure(figsize=(width, 4), layout='constrained')
  figure.suptitle(f'{title}\n{_subtitle(record)}', fontsize=9)
  axes = figure.subplots()
  for index, (name, color) in enumerate(
    zip(others, itertools.cycle(_COLORS), strict=False)
  ):
    axes.bar(
      np.arange(len(groups)) + size * (index - (len(others) - 1) / 2),
      [arms[name]['decoding_speed'] for arms in groups.values()],
      size,
      color=color,
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
    parts, starts, _COLORS, names, strict=False
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
