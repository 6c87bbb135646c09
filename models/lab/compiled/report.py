"""Counts of compiled decode loops, and of a step as it is executed."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from specdec.models.lab import hlo
from specdec.models.lab.compiled import counts
from specdec.models.lab.compiled import programs
from specdec.models.text import choice as choice_lib
from specdec.models.text import drafters
from specdec.models.text import generator as generator_lib
from specdec.models.text import pair as pair_lib
from specdec.text import text_files

STEP = 'decode step'

_DEMO_PROMPTS = drafters.DEMO_TABLE.parent / 'prompts.jsonl'
_PROMPTS, _NEW_TOKENS = 6, 64


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


def memory_figures(compiled: programs.Compiled) -> dict[str, float]:
  """Bytes of a program, without those that its compiler does not say."""
  held, ideal = compiled.held
  figures = {
    'temporary_bytes': compiled.temporary_bytes,
    'accessed_bytes': compiled.accessed_bytes,
    'held_bytes': held,
    'ideal_held_bytes': ideal,
  }
  return {key: one for key, one in figures.items() if one is not None}


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


def rounds_per_step(
  method: str, task: programs.CompiledTask, cost_ratio: float | None
) -> dict[str, float]:
  """Forwards of each stage per target forward, of prompts for the demo.

  How often the loops of growth run depends on the texts, so this is counted in
  a real decode on this machine: the embedded pair with the drafting settings of
  the compiled one, and its ratio of costs.

  Args:
    method: one of `programs.METHODS`.
    task: its drafting and sampling are used.
    cost_ratio: of a forward of the draft in those of the target.
  """
  settings = task.drafting
  if settings.stage.cost_ratio is None:
    stage = dataclasses.replace(settings.stage, cost_ratio=cost_ratio)
    settings = dataclasses.replace(settings, stage=stage)
  pair = pair_lib.load_pair(choice_lib.ModelChoice())
  drafter = drafters.make_drafter(method, pair, settings)
  lm = generator_lib.Generator(pair, drafter)
  lines = text_files.read(_DEMO_PROMPTS).splitlines()
  steps, forwards = 0, dict.fromkeys((one.name for one in drafter.stages), 0)
  for line in lines[:_PROMPTS]:  # One by one, as rows share their forwards.
    stats = lm.generate(
      json.loads(line)['prompt'],
      max_new_tokens=_NEW_TOKENS,
      sampling=task.sampling,
    ).stats
    steps += stats.target_forwards
    for name, number in stats.stage_forwards.items():
      forwards[name] += number
  return {name: number / steps for name, number in forwards.items()}


def per_step(
  loops: Sequence[Mapping[str, Any]], rounds: Mapping[str, float]
) -> dict[str, Any]:
  """The mean work of a device in one step.

  Args:
    loops: of a program, from `analyse`.
    rounds: from `rounds_per_step`.

  Returns:
    The counts of a step, from those of its loops and their rounds: `kernels`,
    `bookkeeping`, `keeping` and `waits`, which are conditions that the host
    reads before it launches what follows; and the `rounds` of each stage whose
    loop has no known length.
  """
  step, *inner = loops
  loops_of = {
    name: [
      one
      for one in inner
      if str(one['loop']).startswith(f'growth round of {name},')
    ]
    for name in rounds
  }
  times = {name: rounds[name] for name, found in loops_of.items() if found}
  total = {
    what: step[what]
    + sum(
      number * sum(one[what] for one in loops_of[name]) / len(loops_of[name])
      for name, number in times.items()
    )
    for what in ('kernels', 'bookkeeping', 'keeping', 'conditions')
  }
  # Each growth reads a condition before its first round and after each.
  growths, waits = 1.0, 1.0 + total.pop('conditions')
  for name, number in rounds.items():
    waits += growths + number if name in times else 0.0
    growths += number
  return total | {'waits': waits, 'rounds': times}
