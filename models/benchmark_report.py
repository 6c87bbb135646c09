"""A benchmark's figures, as tables and as a file."""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

import numpy as np

from models.markdown import to_table
from models.results import write_record

_MISSING = '-'


@dataclasses.dataclass(frozen=True)
class Report:
  """Settings and figures of one run; `str` is two Markdown tables.

  Attributes:
    settings: of the run.
    limits: of the machine, see `models.machine_limits`.
    arms: figures by arm, see `models.benchmark.run`.
  """

  settings: Mapping[str, Any]
  limits: Mapping[str, Any]
  arms: Mapping[str, Mapping[str, Any]]

  @property
  def figures(self) -> dict[str, Any]:
    """What is measured."""
    return {'limits': self.limits, 'arms': self.arms}

  def write(self, path: str) -> None:
    """Writes all of it as JSON, and the tables as Markdown beside it."""
    write_record(path, dict(self.settings), self.figures)
    pathlib.Path(path).with_suffix('.md').write_text(f'{self}\n')

  def __str__(self):
    roofs = self.limits['flops_per_second'].items()
    roofs = ', '.join(
      f'{rate / 1e9:.0f} GFLOP/s {name}' for name, rate in roofs
    )
    memory = self.limits['bytes_per_second'] / 1e9
    speed = to_table(_SPEED_HEAD, map(_speed_row, *_columns(self.arms)))
    work = to_table(_WORK_HEAD, map(_work_row, *_columns(self.arms)))
    return (
      f'{speed}\n\n{work}\n\nIn this run the machine read {memory:.1f} GB/s and'
      f' computed {roofs}.'
    )


def _columns(arms):
  return arms.keys(), arms.values()


def _with_interval(value: float, interval: Any, unit: str = '') -> str:
  if interval is None:
    return f'{value:.2f}{unit}'
  return f'{value:.2f}{unit} ({interval[0]:.2f}-{interval[1]:.2f})'


_SPEED_HEAD = (
  'arm',
  'tokens/s (95 %)',
  'speed (95 %)',
  'per batch: least, median, most',
  'block eff.',
  'nodes',
  'forwards per token',
  'flips',
)


def _speed_row(name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
  per_batch = np.quantile(arm['speed_per_batch'], (0, 0.5, 1))
  tokens = max(arm['new_tokens'], 1)
  forwards = {'target': arm['target_forwards']} | arm['stage_forwards']
  return (
    name,
    _with_interval(arm['tokens_per_second'], arm['tokens_per_second_interval']),
    _with_interval(arm['speed'], arm['speed_interval'], 'x'),
    ' '.join(f'{one:.2f}' for one in per_batch),
    f'{arm["block_efficiency"]:.2f}',
    f'{arm["nodes_per_forward"]:.1f}',
    ', '.join(f'{one} {count / tokens:.2f}' for one, count in forwards.items()),
    _MISSING if arm['flips'] is None else f'{len(arm["flips"])}',
  )


_WORK_HEAD = (
  'arm',
  'ms per target forward',
  'of memory limit',
  'FLOP/byte',
  'GFLOP/s',
  'relative bandwidth',
  'at paper costs',
  'memory, MB: weights + beyond',
  'compile, s',
)


def _work_row(name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
  beyond = arm['beyond_weights_bytes']
  return (
    name,
    f'{1e3 * arm["seconds_per_target_forward"]:.2f}',
    f'{arm["of_memory_limit"]:.0%}',
    f'{arm["arithmetic_intensity"]:.2f}',
    f'{arm["flops_per_second"] / 1e9:.1f}',
    f'{arm["relative_bandwidth"]:.3f}',
    f'{arm["relative_bandwidth_at_paper_costs"]:.3f}',
    f'{arm["weight_bytes"] / 1e6:.1f} + '
    + (_MISSING if beyond is None else f'{beyond / 1e6:.1f}'),
    f'{arm["compile_seconds"]:.1f}',
  )
