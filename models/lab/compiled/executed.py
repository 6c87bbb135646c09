"""Kernels and waits of a step as it is executed: loops times their rounds.

How often the loops of growth run depends on the texts, so they are taken from
the statistics of a real decode on this machine: the embedded pair with the
drafting settings of the compiled one, and its ratio of costs.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json

from models.lab.compiled import programs
from models.lab.compiled import report as report_lib
from models.text import choice as choice_lib
from models.text import drafters
from models.text import generator as generator_lib
from models.text import pair as pair_lib
from specdec.text import text_files

_DEMO_PROMPTS = drafters.DEMO_TABLE.parent / 'prompts.jsonl'
_PROMPTS, _NEW_TOKENS = 6, 64


@dataclasses.dataclass(frozen=True)
class Executed:
  """The mean work of a device in one step.

  `waits` are those of the device for the host: a condition that the host reads
  before it launches what follows. `rounds` are those of each stage whose loop
  has no known length.
  """

  method: str
  kernels: float
  bookkeeping: float
  keeping: float
  waits: float
  rounds: Mapping[str, float]


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
  report: report_lib.ProgramReport, rounds: Mapping[str, float]
) -> Executed:
  """The counts of a step, from those of its loops and their rounds."""
  step, *loops = report.loops
  names = [name for name in rounds if any(_is_of(one, name) for one in loops)]
  times = {name: rounds[name] for name in names}
  total = {
    what: step[what]
    + sum(
      _mean([one[what] for one in loops if _is_of(one, name)]) * times[name]
      for name in names
    )
    for what in ('kernels', 'bookkeeping', 'keeping', 'conditions')
  }
  # Each growth reads a condition before its first round and after each.
  growths, waits = 1.0, 1.0
  for name, number in rounds.items():
    waits += growths + number if name in times else 0.0
    growths += number
  return Executed(
    *(report.method, total['kernels'], total['bookkeeping']),
    *(total['keeping'], waits + total['conditions'], times),
  )


def _is_of(loop: Mapping[str, object], stage: str) -> bool:
  return str(loop['loop']).startswith(f'growth round of {stage},')


def _mean(numbers: Sequence[float]) -> float:
  return sum(numbers) / len(numbers)


def to_markdown(steps: Sequence[Executed]) -> str:
  """A table of all methods."""
  lines = [
    '| one step as executed | kernels | bookkeeping | of it, to keep the path'
    ' | waits for the host | rounds |',
    '| --- | --- | --- | --- | --- | --- |',
  ]
  for step in steps:
    rounds = ', '.join(
      f'{name} {number:.1f}' for name, number in step.rounds.items()
    )
    lines.append(
      f'| {step.method} | {step.kernels:.0f} | {step.bookkeeping:.0f} |'
      f' {step.keeping:.0f} | {step.waits:.1f} | {rounds} |'
    )
  return '\n'.join(lines)
