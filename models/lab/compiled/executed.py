"""Kernels and waits of a step as it is executed: loops times their rounds.

How often the loops of growth run depends on the texts, so they are taken from
the statistics of a real decode on this machine: the embedded pair with the
drafting settings of the compiled one, and its ratio of costs.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from models.lab.compiled import programs
from models.text import choice as choice_lib
from models.text import drafters
from models.text import generator as generator_lib
from models.text import pair as pair_lib
from specdec.text import text_files

_DEMO_PROMPTS = drafters.DEMO_TABLE.parent / 'prompts.jsonl'
_PROMPTS, _NEW_TOKENS = 6, 64


def rounds_per_step(
  method: str, task: programs.CompiledTask, cost_ratio: float | None
) -> dict[str, float]:
  """Forwards of each stage per target forward, of prompts for the demo.

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
    loops: of a program, from `report.analyse`.
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
