"""Counts of compiled decode loops: records, and a table of them."""

from collections import Counter
from collections.abc import Mapping
import dataclasses
from typing import Any

from models.lab.compiled import counts
from models.lab.compiled import hlo
from models.lab.compiled import programs

STEP = 'decode step'


@dataclasses.dataclass(frozen=True)
class ProgramReport:
  """The counts of a compiled decode loop, as they are written to JSON."""

  method: str
  temporary_bytes: int  # Memory that the program needs besides its arguments.
  held_bytes: int  # Weights and caches on each device.
  ideal_held_bytes: float  # If what is divided were divided evenly.
  #: `loop_figures` of the decode step, then of its growth rounds.
  loops: tuple[dict[str, Any], ...]


def _by_text(collectives: Counter) -> dict[str, int]:
  found: Counter = Counter()
  for one, times in collectives.items():
    found[str(one)] += times
  return dict(found)


def loop_figures(
  loop: counts.Loop,
  work: programs.Work,
  compiled: programs.Compiled,
  device: programs.Device,
) -> dict[str, Any]:
  """Figures of one round of a loop, without the loops within it.

  Besides those of `counts.Loop`: `whole_tensors`, results of collectives that
  have the shape of a divided weight or cache; `ideal_bytes`, weights once and
  full cache once, or 0 if no model runs; `floor_ms`, the milliseconds for them
  at peak bandwidth or for the products at the peak rate, whichever is longer;
  `bandwidth_ms`, the milliseconds for `bytes` at peak bandwidth.
  """
  exchanges = loop.collectives.items()
  is_whole = lambda array: bool(
    counts.joined_axes(array.dims) & compiled.divided
  )
  floor = max(work.bytes / device.bandwidth, work.flops / device.flops)
  return {
    'kernels': loop.kernels,
    'kernels_per_layer': round(loop.kernels_per_layer, 2),
    'bookkeeping': loop.other_kernels,
    'keeping': loop.keep_kernels,
    'copies': dict(loop.copies),
    'collectives': _by_text(loop.collectives),
    'collectives_per_layer': round(loop.collectives_per_layer, 2),
    'collective_bytes': sum(n * one.num_bytes for one, n in exchanges),
    'whole_tensors': sum(
      n for one, n in exchanges if any(map(is_whole, one.arrays))
    ),
    'host_transfers': len(loop.host_transfers),
    'branches': loop.branches,
    'conditions': loop.conditionals,
    'bytes': loop.bytes,
    'ideal_bytes': work.bytes,
    'floor_ms': round(1000 * floor, 4),
    'bandwidth_ms': round(1000 * loop.bytes / device.bandwidth, 4),
    'cycles': loop.cycles,
  }


def _all_figures(
  method: str,
  loop: counts.Loop,
  depth: int,
  compiled: programs.Compiled,
  device: programs.Device,
) -> list[dict[str, Any]]:
  """Figures of a loop, at `depth` of the program, and of the loops within."""
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
  work = compiled.work.get(worker, programs.Work())
  figures = loop_figures(loop, work, compiled, device)
  found = [{'method': method, 'loop': label} | figures]
  for inner in loop.loops:
    found += _all_figures(method, inner, depth + 1, compiled, device)
  return found


def analyse(
  method: str, compiled: programs.Compiled, device: programs.Device
) -> ProgramReport:
  """Counts the work of a compiled decode loop.

  Raises:
    ValueError: the program does not have exactly one outermost loop.
  """
  top = counts.count(hlo.parse(compiled.text))
  names = [loop.name for loop in top.loops]
  if len(names) != 1:
    raise ValueError(f'expected one decode loop, the program has {names}')
  loops = _all_figures(method, top.loops[0], 0, compiled, device)
  return ProgramReport(
    method, compiled.temporary_bytes, *compiled.held, tuple(loops)
  )


def _columns(loop: Mapping[str, Any], several: bool) -> dict[str, str]:
  copies = ', '.join(f'{n} {shape}' for shape, n in loop['copies'].items())
  ideal, layers = loop['ideal_bytes'], loop['kernels_per_layer']
  exchanges = ', '.join(
    f'{n} {kind}' for kind, n in loop['collectives'].items()
  )
  between_devices = {
    'collectives': exchanges or '0',
    'of them per layer': f'{loop["collectives_per_layer"]:.1f}',
    'their MB': f'{loop["collective_bytes"] / 1e6:.3f}',
    'of whole tensors': str(loop['whole_tensors']),
  }
  return {
    'method': loop['method'],
    'loop (one round)': loop['loop'],
    'kernels': str(loop['kernels']),
    'per layer': f'{layers:.1f}' if layers else '',
    'bookkeeping': str(loop['bookkeeping']),
    'copies > 64 KB': copies or '0',
    **(between_devices if several else {}),
    'host transfers': str(loop['host_transfers']),
    'branches': str(loop['branches']),
    'MB moved': f'{loop["bytes"] / 1e6:.1f}',
    'of ideal': f'{loop["bytes"] / ideal:.2f}' if ideal else '',
    'floor ms': f'{loop["floor_ms"]:.3f}' if ideal else '',
    'at bandwidth ms': f'{loop["bandwidth_ms"]:.3f}',
    'compiler Mcycles': f'{loop["cycles"] / 1e6:.2f}' if loop['cycles'] else '',
  }


def to_markdown(reports: list[ProgramReport]) -> str:
  """A table of all loops, and a line about memory."""
  every = [loop for report in reports for loop in report.loops]
  several = any(loop['collectives'] for loop in every)
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
