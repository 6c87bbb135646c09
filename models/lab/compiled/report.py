"""Counts of compiled decode loops: records, and a table of them."""

from collections import Counter
import dataclasses

from models.lab.compiled.counts import count
from models.lab.compiled.counts import joined_axes
from models.lab.compiled.counts import Loop
from models.lab.compiled.hlo import parse
from models.lab.compiled.programs import Compiled
from models.lab.compiled.programs import Device
from models.lab.compiled.programs import Work

STEP = 'decode step'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopReport:
  """One round of a loop, without the loops within it; see `counts.Loop`.

  `floor_ms` is the time for `ideal_bytes` at peak bandwidth, or for the
  products at the peak rate, whichever is longer; `bandwidth_ms` is the time for
  `bytes` at peak bandwidth. Both are in milliseconds.
  """

  method: str
  loop: str  # `STEP`, or the name of the stage whose growth round it is.
  kernels: int
  kernels_per_layer: float
  bookkeeping: int  # Kernels outside of forwards.
  copies: dict[str, int]
  collectives: dict[str, int]  # Exchanges between devices, with their results.
  collectives_per_layer: float
  collective_bytes: int  # Of the results, on each device.
  whole_tensors: int  # Results of the shape of a divided weight or cache.
  host_transfers: int
  branches: int
  bytes: int
  ideal_bytes: int  # Weights once and full cache once; 0 if no model runs.
  floor_ms: float
  bandwidth_ms: float
  cycles: int


@dataclasses.dataclass(frozen=True)
class ProgramReport:
  """The counts of a compiled decode loop."""

  method: str
  temporary_bytes: int  # Memory that the program needs besides its arguments.
  held_bytes: int  # Of weights and caches, on each device.
  ideal_held_bytes: float  # If what is divided were divided evenly.
  loops: tuple[LoopReport, ...]  # The decode step, then its growth rounds.


def _by_text(collectives: Counter) -> dict[str, int]:
  found: Counter = Counter()
  for one, times in collectives.items():
    found[str(one)] += times
  return dict(found)


def _report(
  method: str, loop: Loop, depth: int, compiled: Compiled, device: Device
) -> list[LoopReport]:
  """Reports of a loop, at `depth` of the program, and of the loops within."""
  # Growth runs in the scope `grow_` and the name of the stage. Other loops
  # within the decode step keep their path as a label.
  growing = [
    name for name in compiled.work if loop.name.endswith(f'grow_{name}/while')
  ]
  label, worker = (STEP, 'target') if depth == 0 else (loop.name, '')
  if growing:
    worker = growing[0]
    where = 'before' if depth == 1 else 'within'
    label = f'growth round of {worker}, {where}'
  work = compiled.work.get(worker, Work())
  floor = max(work.bytes / device.bandwidth, work.flops / device.flops)
  report = LoopReport(
    method=method,
    loop=label,
    kernels=loop.kernels,
    kernels_per_layer=round(loop.kernels_per_layer, 2),
    bookkeeping=loop.other_kernels,
    copies=dict(loop.copies),
    collectives=_by_text(loop.collectives),
    collectives_per_layer=round(loop.collectives_per_layer, 2),
    collective_bytes=sum(
      times * found.num_bytes for found, times in loop.collectives.items()
    ),
    whole_tensors=sum(
      times
      for found, times in loop.collectives.items()
      if any(
        joined_axes(array.dims) & compiled.divided for array in found.arrays
      )
    ),
    host_transfers=len(loop.host_transfers),
    branches=loop.branches,
    bytes=loop.bytes,
    ideal_bytes=work.bytes,
    floor_ms=round(1000 * floor, 4),
    bandwidth_ms=round(1000 * loop.bytes / device.bandwidth, 4),
    cycles=loop.cycles,
  )
  reports = [report]
  for inner in loop.loops:
    reports += _report(method, inner, depth + 1, compiled, device)
  return reports


def analyse(method: str, compiled: Compiled, device: Device) -> ProgramReport:
  """Counts the work of a compiled decode loop.

  Raises:
    ValueError: the program does not have exactly one outermost loop.
  """
  top = count(parse(compiled.text))
  names = [loop.name for loop in top.loops]
  if len(names) != 1:
    raise ValueError(f'expected one decode loop, the program has {names}')
  loops = _report(method, top.loops[0], 0, compiled, device)
  return ProgramReport(
    method, compiled.temporary_bytes, *compiled.held, tuple(loops)
  )


def _columns(report: LoopReport, several: bool) -> dict[str, str]:
  copies = ', '.join(f'{n} {shape}' for shape, n in report.copies.items())
  ideal, layers = report.ideal_bytes, report.kernels_per_layer
  exchanges = ', '.join(f'{n} {kind}' for kind, n in report.collectives.items())
  between_devices = {
    'collectives': exchanges or '0',
    'of them per layer': f'{report.collectives_per_layer:.1f}',
    'their MB': f'{report.collective_bytes / 1e6:.3f}',
    'of whole tensors': str(report.whole_tensors),
  }
  return {
    'method': report.method,
    'loop (one round)': report.loop,
    'kernels': str(report.kernels),
    'per layer': f'{layers:.1f}' if layers else '',
    'bookkeeping': str(report.bookkeeping),
    'copies > 64 KB': copies or '0',
    **(between_devices if several else {}),
    'host transfers': str(report.host_transfers),
    'branches': str(report.branches),
    'MB moved': f'{report.bytes / 1e6:.1f}',
    'of ideal': f'{report.bytes / ideal:.2f}' if ideal else '',
    'floor ms': f'{report.floor_ms:.3f}' if ideal else '',
    'at bandwidth ms': f'{report.bandwidth_ms:.3f}',
    'compiler Mcycles': f'{report.cycles / 1e6:.2f}' if report.cycles else '',
  }


def to_markdown(reports: list[ProgramReport]) -> str:
  """A table of all loops, and a line about memory."""
  every = [loop for report in reports for loop in report.loops]
  several = any(loop.collectives for loop in every)
  loops = [_columns(loop, several) for loop in every]
  rows = [list(loops[0]), ['---'] * len(loops[0])]
  rows += [list(columns.values()) for columns in loops]
  temporary = ', '.join(
    f'{report.method} {report.temporary_bytes / 1e6:.1f} MB'
    for report in reports
  )
  lines = ['| ' + ' | '.join(row) + ' |' for row in rows]
  held = ', '.join(
    f'{report.method} {report.held_bytes / 1e9:.3f} GB'
    f' ({report.held_bytes / report.ideal_held_bytes:.4f} of ideal)'
    for report in reports
  )
  notes = [f'Temporary memory: {temporary}.', f'Weights and caches: {held}.']
  return '\n'.join([*lines, '', *notes])
