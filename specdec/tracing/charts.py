"""Charts of how many guesses were accepted; they need matplotlib."""

from collections.abc import Mapping
from collections.abc import Sequence
import importlib.util
from typing import Any

_COLORS = ('#4477aa', '#ee6677', '#228833', '#ccbb44', '#aa3377', '#66ccee')
_HATCHES = ('', '///', '...', 'xxx', '\\\\\\', '++')
_MARKERS = 'oD^vsX'


def shares(histogram: Sequence[int]) -> list[float]:
  """What part of the target forwards emitted 1, 2, ... tokens."""
  total = max(sum(histogram), 1)
  return [count / total for count in histogram]


def survivors(histogram: Sequence[int]) -> list[float]:
  """In what part of the target forwards 1, 2, ... guesses were accepted.

  Args:
    histogram: entry i counts the forwards with i guesses accepted.
  """
  parts = shares(histogram)
  return [sum(parts[depth:]) for depth in range(1, len(parts))]


def _axes(xlabel: str, ylabel: str) -> Any:
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      'charts need matplotlib; pip install matplotlib (or the extra:'
      " 'specdec-jax[plot]')"
    )
  from matplotlib.figure import Figure

  figure = Figure(figsize=(6.4, 3.2), layout='constrained')
  axes: Any = figure.subplots()
  axes.set_xlabel(xlabel)
  axes.set_ylabel(ylabel)
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.spines[['top', 'right']].set_visible(False)
  return axes


def _longest(histograms: Mapping[str, Sequence[int]]) -> int:
  if not histograms:
    raise ValueError('histograms is empty; give at least one')
  return max(
    (
      size
      for histogram in histograms.values()
      for size, count in enumerate(histogram, 1)
      if count
    ),
    default=1,
  )


def accepted_lengths(histograms: Mapping[str, Sequence[int]]) -> Any:
  """A histogram of the tokens that target forwards emitted.

  Args:
    histograms: by name of the method; entry i counts the forwards that emitted
      i + 1 tokens, as in `stats['accepted_histogram']`.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ValueError: matplotlib is not there, or there is no histogram.
  """
  longest = _longest(histograms)
  axes = _axes('tokens emitted by a target forward', 'share of the forwards')
  width = 0.8 / len(histograms)
  for row, (name, histogram) in enumerate(histograms.items()):
    total = sum(size * count for size, count in enumerate(histogram, 1))
    mean = total / max(sum(histogram), 1)
    parts = [*shares(histogram), *[0.0] * longest][:longest]
    axes.bar(
      [
        size + width * (row - (len(histograms) - 1) / 2)
        for size in range(1, longest + 1)
      ],
      parts,
      width,
      color=_COLORS[row % len(_COLORS)],
      hatch=_HATCHES[row % len(_HATCHES)],
      edgecolor='white',
      label=f'{name}: {mean:.2f} on average',
    )
  axes.legend(frameon=False)
  return axes.figure


def survival(histograms: Mapping[str, Sequence[int]]) -> Any:
  """How often guesses are accepted down to a depth.

  Args:
    histograms: see `accepted_lengths`.

  Returns:
    A `matplotlib.figure.Figure`: at depth d the share of target forwards in
    which at least d guesses stood. A forward that was cut by the end of the
    text counts by what it emitted, not by what it accepted.

  Raises:
    ValueError: matplotlib is not there, or there is no histogram.
  """
  longest = _longest(histograms)
  axes = _axes(
    'depth (emitted tokens, less one)',
    'share of forwards whose\nguesses stood to this depth',
  )
  for row, (name, histogram) in enumerate(histograms.items()):
    parts = [1.0, *survivors(histogram), *[0.0] * longest][:longest]
    axes.plot(
      range(longest),
      parts,
      color=_COLORS[row % len(_COLORS)],
      marker=_MARKERS[row % len(_MARKERS)],
      label=name,
    )
  axes.set_ylim(0, 1.05)
  axes.legend(frameon=False)
  return axes.figure
