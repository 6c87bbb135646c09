"""A chart of the numbers of accepted tokens; drawing it needs matplotlib."""

from collections.abc import Mapping
from collections.abc import Sequence
import importlib.util
from typing import Any

COLORS = (
  *('#4477aa', '#ee6677', '#228833', '#ccbb44'),
  *('#aa3377', '#66ccee', '#994f00', '#117777'),
)
_HATCHES = ('', '///', '...', 'xxx', '\\\\\\', '++')
_MARKERS = 'oD^vsX'


def shares(histogram: Sequence[int]) -> list[float]:
  """The fractions of the target forwards that emitted 1, 2, ... tokens."""
  total = max(sum(histogram), 1)
  return [count / total for count in histogram]


def survivors(histogram: Sequence[int]) -> list[float]:
  """The fractions of the forwards that accepted at least 1, 2, ... tokens.

  Entry i of the histogram is the number of forwards that accepted i tokens.
  """
  parts = shares(histogram)
  return [sum(parts[depth:]) for depth in range(1, len(parts))]


def accepted_lengths(histograms: Mapping[str, Sequence[int]]) -> Any:
  """Draws the numbers of tokens that target forwards emitted.

  Args:
    histograms: for each method, by name, a histogram; entry i is the number of
      forwards that emitted i + 1 tokens, as in `stats['accepted_histogram']`.

  Returns:
    A `matplotlib.figure.Figure`: at the left the histograms, at the right the
    share of the forwards that emitted more than d tokens, by depth d; these are
    d accepted tokens and the bonus token, unless the end of the text cut them.
  """
  if not histograms:
    raise ValueError('histograms is empty; give at least one')
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      'charts need matplotlib; pip install matplotlib (or the extra:'
      " 'specdec-jax[plot]')"
    )
  from matplotlib.figure import Figure

  figure: Any = Figure(figsize=(9.6, 3.2), layout='constrained')
  bars, lines = figure.subplots(1, 2)
  every = [enumerate(counts, 1) for counts in histograms.values()]
  longest = max((n for x in every for n, count in x if count), default=1)
  width = 0.8 / len(histograms)
  for row, (name, histogram) in enumerate(histograms.items()):
    color, padding = COLORS[row % len(COLORS)], [0.0] * longest
    total = sum(size * count for size, count in enumerate(histogram, 1))
    shift = width * (row - (len(histograms) - 1) / 2)
    bars.bar(
      [size + shift for size in range(1, longest + 1)],
      [*shares(histogram), *padding][:longest],
      width,
      color=color,
      hatch=_HATCHES[row % len(_HATCHES)],
      edgecolor='white',
      label=f'{name}: {total / max(sum(histogram), 1):.2f} on average',
    )
    survived = [1.0, *survivors(histogram), *padding][:longest]
    marker = _MARKERS[row % len(_MARKERS)]
    lines.plot(range(longest), survived, color=color, marker=marker, label=name)
  bars.set(xlabel='tokens emitted by a forward', ylabel='share of forwards')
  lines.set(
    xlabel='depth', ylabel='share of forwards that\naccepted to a depth'
  )
  lines.set_ylim(0, 1.05)
  for axes in (bars, lines):
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False)
  return figure
