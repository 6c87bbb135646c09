"""A profile of a call on CPU: which operations of XLA take how long.

The profiler of JAX gives a time to each operation of a compiled program on the
thread that runs it. Products and attention of `models.nn.cpu` are calls; what
their helper threads do meanwhile is part of them.
"""

import collections
from collections.abc import Callable
import pathlib
import tempfile
from typing import Any

import jax

from models.lab import hlo

_SMALL = 0.01  # Operations that take a smaller share are put together.

_CONTROL = ('while', 'conditional', 'call', 'tuple', 'parameter')


def labels(program: str) -> dict[str, str]:
  """The operations of a program by name, told apart by what they compute.

  A call is named by its target, and the shapes of its first operand and of its
  result; an operation of XLA by its kind and the operation of JAX it is from.

  Args:
    program: the text of compiled HLO.
  """
  found = {}
  for instructions in hlo.parse(program).computations.values():
    for name, one in instructions.items():
      if one.opcode in _CONTROL:
        continue
      what = f'{one.opcode} {one.op_name.rpartition("/")[2]}'.strip()
      if one.target:
        shapes = one.attributes.partition('operand_layout_constraints=')[2]
        operands = hlo.parse_arrays(shapes)
        what = f'{one.target} {operands[0] if operands else ""}'
      found[name] = f'{what} -> {"".join(map(str, one.arrays[:1]))}'
  return found


def table(
  call: Callable[[], float], repeats: int, program: str
) -> list[dict[str, Any]]:
  """The operations of a compiled call, those that take longest first.

  Args:
    call: returns seconds of one of its repeats.
    repeats: how often it repeats what is profiled.
    program: the text of its compiled HLO.

  Returns:
    By operation `calls` and `ms`, both per repeat and summed over threads; then
    the time that no operation takes, in which threads wait or control flow is
    decided, and the whole time with and without the profiler.
  """
  known, alone = labels(program), call()
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      seconds = call()
    (file,) = pathlib.Path(folder).rglob('*.xplane.pb')
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [
      (known[event.name], event.duration_ns)
      for plane in planes
      for line in plane.lines
      for event in line.events
      if event.name in known
    ]
  ms = dict.fromkeys((name for name, _ in events), 0.0)
  calls = collections.Counter(name for name, _ in events)
  for name, duration in events:
    ms[name] += duration / repeats / 1e6
  small = [name for name in ms if ms[name] < 1e3 * _SMALL * seconds]
  rows = [
    (name, calls[name], ms[name]) for name in sorted(ms, key=lambda n: -ms[n])
  ]
  rows = [row for row in rows if row[0] not in small]
  others = sum(calls[n] for n in small), sum(ms[n] for n in small)
  rows.append((f'{len(small)} small operations', *others))
  return [
    *({'operation': n, 'calls': k / repeats, 'ms': t} for n, k, t in rows),
    *(
      {'operation': name, 'calls': 1.0, 'ms': time}
      for name, time in (
        ('between operations', 1e3 * seconds - sum(ms.values())),
        ('all', 1e3 * seconds),
        ('all, without the profiler', 1e3 * alone),
      )
    ),
  ]
