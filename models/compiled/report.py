"""Counts of compiled decode loops as a table and as JSON."""

import dataclasses
import re
from typing import Any

from models.compiled.counts import count
from models.compiled.counts import Loop
from models.compiled.hlo import parse
from models.compiled.programs import Compiled
from models.compiled.programs import Device

_GROWTH = re.compile(r'grow_([^/]+)/while$')
STEP = 'decode step'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopReport:
  """One round of a loop; times are in milliseconds.

  Attributes:
    method: of the program.
    loop: `STEP`, or whose growth round it is.
    kernels: see `counts.Loop`; likewise what follows.
    kernels_per_layer: of the model, the mean.
    bookkeeping: kernels that belong to no forward.
    copies: the large ones, shape and number.
    host_transfers: how many.
    branches: conditionals and loops within.
    bytes: of main memory moved.
    ideal_bytes: weights once and full cache once; 0 where no model runs.
    floor_ms: what the ideal takes at full bandwidth, or the products at the
      full rate, whichever is longer.
    bandwidth_ms: what `bytes` take at full bandwidth.
    cycles: that the compiler expects, 0 where it does not say.
  """

  method: str
  loop: str
  kernels: int
  kernels_per_layer: float
  bookkeeping: int
  copies: dict[str, int]
  host_transfers: int
  branches: int
  bytes: int
  ideal_bytes: int
  floor_ms: float
  bandwidth_ms: float
  cycles: int


@dataclasses.dataclass(frozen=True)
class ProgramReport:
  """A compiled decode loop.

  Attributes:
    method: of decoding.
    temporary_bytes: see `programs.Compiled`.
    loops: the decode step, then the growth rounds within.
  """

  method: str
  temporary_bytes: int
  loops: tuple[LoopReport, ...]

  def as_dict(self) -> dict[str, Any]:
    """For JSON."""
    return dataclasses.asdict(self)


def _label(loop: Loop, is_step: bool, depth: int) -> tuple[str, str]:
  """Name of a loop, and of the stage whose forward it runs."""
  if is_step:
    return STEP, 'target'
  growth = _GROWTH.search(loop.name)
  if not growth:
    return loop.name, ''
  where = ', before' if depth == 1 else ', within'
  return f'growth round of {growth.group(1)}{where}', growth.group(1)


def _labelled(loop: Loop, depth: int = 0) -> list[tuple[str, str, Loop]]:
  label, worker = _label(loop, depth == 0, depth)
  rows = [(label, worker, loop)]
  for inner in loop.loops:
    rows += _labelled(inner, depth + 1)
  return rows


def analyse(method: str, compiled: Compiled, device: Device) -> ProgramReport:
  """Counts what a compiled decode loop does.

  Raises:
    ValueError: it has not one outermost loop.
  """
  top = count(parse(compiled.text))
  if len(top.loops) != 1:
    names = [loop.name for loop in top.loops]
    raise ValueError(f'expected one decode loop, the program has {names}')
  reports = []
  for label, worker, loop in _labelled(top.loops[0]):
    work = compiled.work.get(worker)
    floor = 0.0
    if work is not None:
      seconds = (work.bytes / device.bandwidth, work.flops / device.flops)
      floor = 1000 * max(seconds)
    reports.append(
      LoopReport(
        method=method,
        loop=label,
        kernels=loop.kernels,
        kernels_per_layer=round(loop.kernels_per_layer, 2),
        bookkeeping=loop.other_kernels,
        copies=dict(loop.copies),
        host_transfers=len(loop.host_transfers),
        branches=loop.branches,
        bytes=loop.bytes,
        ideal_bytes=0 if work is None else work.bytes,
        floor_ms=round(floor, 4),
        bandwidth_ms=round(1000 * loop.bytes / device.bandwidth, 4),
        cycles=loop.cycles,
      )
    )
  return ProgramReport(method, compiled.temporary_bytes, tuple(reports))


_HEADER = (
  'method',
  'loop (one round)',
  'kernels',
  'per layer',
  'bookkeeping',
  'copies > 64 KB',
  'host transfers',
  'branches',
  'MB moved',
  'of ideal',
  'floor ms',
  'at bandwidth ms',
  'compiler Mcycles',
)


def _row(report: LoopReport) -> list[str]:
  copies = ', '.join(f'{n} {shape}' for shape, n in report.copies.items())
  ideal = report.ideal_bytes
  return [
    report.method,
    report.loop,
    str(report.kernels),
    f'{report.kernels_per_layer:.1f}' if report.kernels_per_layer else '',
    str(report.bookkeeping),
    copies or '0',
    str(report.host_transfers),
    str(report.branches),
    f'{report.bytes / 1e6:.1f}',
    f'{report.bytes / ideal:.2f}' if ideal else '',
    f'{report.floor_ms:.3f}' if ideal else '',
    f'{report.bandwidth_ms:.3f}',
    f'{report.cycles / 1e6:.2f}' if report.cycles else '',
  ]


def to_markdown(reports: list[ProgramReport]) -> str:
  """A table of all loops, and one line on temporary memory."""
  rows = [list(_HEADER), ['---'] * len(_HEADER)]
  rows += [_row(loop) for report in reports for loop in report.loops]
  lines = ['| ' + ' | '.join(row) + ' |' for row in rows]
  temporary = ', '.join(
    f'{report.method} {report.temporary_bytes / 1e6:.1f} MB'
    for report in reports
  )
  return '\n'.join([*lines, '', f'Temporary memory: {temporary}.'])
