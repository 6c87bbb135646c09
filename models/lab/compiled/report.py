"""Counts of compiled decode loops, for tables and JSON."""

from typing import Any

from models.lab import hlo
from models.lab.compiled import counts
from models.lab.compiled import programs

STEP = 'decode step'


def loop_figures(
  loop: counts.Loop, compiled: programs.Compiled
) -> dict[str, Any]:
  """Figures of one round of a loop, without the loops within it.

  Besides those of `counts.Loop`: `whole_tensors`, results of collectives that
  have the shape of a divided weight or cache.
  """
  exchanges = loop.collectives.items()
  is_whole = lambda array: bool(
    counts.joined_axes(array.dims) & compiled.divided
  )
  collectives = dict[str, int]()
  for exchange, number in exchanges:
    name = str(exchange)
    collectives[name] = collectives.get(name, 0) + number
  return {
    'kernels': loop.kernels,
    'kernels_per_layer': round(loop.kernels_per_layer, 2),
    'bookkeeping': loop.other_kernels,
    'keeping': loop.keep_kernels,
    'copies': dict(loop.copies),
    'collectives': collectives,
    'collectives_per_layer': round(loop.collectives_per_layer, 2),
    'collective_bytes': sum(n * one.num_bytes for one, n in exchanges),
    'whole_tensors': sum(
      n for one, n in exchanges if any(map(is_whole, one.arrays))
    ),
    'host_transfers': len(loop.host_transfers),
    'branches': loop.branches,
    'conditions': loop.conditionals,
    'cycles': loop.cycles,
  }


def _label(loop: counts.Loop, depth: int, compiled: programs.Compiled) -> str:
  """Growth runs in the scope `grow_` and the name of the stage."""
  for stage in compiled.stages:
    if loop.name.endswith(f'grow_{stage}/while'):
      where = 'before' if depth == 1 else 'within'
      return f'growth round of {stage}, {where}'
  return loop.name if depth else STEP


def _all_figures(
  loop: counts.Loop, depth: int, compiled: programs.Compiled
) -> list[dict[str, Any]]:
  """Figures of a loop, at `depth` of the program, and of the loops within."""
  label = _label(loop, depth, compiled)
  found = [{'loop': label} | loop_figures(loop, compiled)]
  for inner in loop.loops:
    found += _all_figures(inner, depth + 1, compiled)
  return found


def analyse(compiled: programs.Compiled) -> list[dict[str, Any]]:
  """Counts the work of a compiled decode loop.

  Returns:
    `loop_figures` of the decode step, then of its growth rounds, each with the
    name of the `loop`.

  Raises:
    ValueError: the program does not have exactly one outermost loop.
  """
  top = counts.count(hlo.parse(compiled.text))
  names = [loop.name for loop in top.loops]
  if len(names) != 1:
    raise ValueError(f'expected one decode loop, the program has {names}')
  return _all_figures(top.loops[0], 0, compiled)
