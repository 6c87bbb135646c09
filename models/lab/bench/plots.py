"""Pictures of benchmark records and plans, drawn with matplotlib."""

from collections.abc import Mapping
import importlib.util
import itertools
import pathlib
from typing import Any

import numpy as np

from specdec.models import extras

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
      f'--plots={plots} needs matplotlib: {extras.command("plot")}, or leave'
      ' --plots out'
    )
  folder = pathlib.Path(plots)
  folder.mkdir(parents=True, exist_ok=True)
  return folder


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
  axes.tick_params(labelsize=8)
  axes.spines[['top', 'right']].set_visible(False)
  return figure
