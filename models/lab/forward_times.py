"""How long a forward of a model takes, and where its time goes on CPU.

The profiler of JAX gives a time to each operation of a compiled program on the
thread that runs it. Products and attention of `models/nn/cpu` are calls; what
their helper threads do meanwhile is part of them.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import functools
import pathlib
import tempfile
from typing import Any

import jax

from specdec import model as model_lib
from specdec.models.lab import hlo
from specdec.models.lab import machine
from specdec.models.text import choice as choice_lib
from specdec.models.text import pair as pair_lib

_ROOM = 64  # for new tokens
_SMALL = 0.01  # Operations that take a smaller share are put together.

_CONTROL = ('while', 'conditional', 'call', 'tuple', 'parameter')


def network(
  models: choice_lib.ModelChoice, *, random_weights: bool, of_draft: bool
) -> model_lib.LanguageModel:
  """The target, or its draft with the tokens that it has.

  Raises:
    ValueError: there is no draft.
  """
  if not of_draft:
    load = pair_lib.drawn_pair if random_weights else pair_lib.load_pair
    return load(models.of_target).target
  draft = pair_lib.load_pair(models).draft
  if draft is None:
    raise ValueError('--of_draft measures a draft model; give --draft')
  return draft


def _arguments(
  model: model_lib.LanguageModel, widths: Sequence[int], context: int
) -> tuple[list[int], dict[str, Any]]:
  """All N, and the arguments of both instruments of `machine`."""
  if min(widths, default=1) < 1:
    raise ValueError(f'--sizes={widths}: expected integers of at least 1')
  texts = [list(range(model.spec.vocab_size))]
  sizes = {'prompt_slots': context, 'max_new_tokens': _ROOM}
  return sorted({1, *widths}), {'texts': texts, 'context': context, **sizes}


def forward(
  model: model_lib.LanguageModel,
  widths: Sequence[int],
  repeats: int,
  *,
  context: int,
) -> list[machine.Row]:
  """V(N) of a model as median milliseconds by N, which are 1 and the `widths`.

  Beside them is how long it takes to read its weights and states, at the
  bandwidth that is measured before and after. `context` are the tokens in the
  cache. ValueError if a width is below 1.
  """
  widths, arguments = _arguments(model, widths, context)
  bandwidth = machine.Bandwidth()
  bandwidth.sample()
  effort = machine.Effort(num_steps=4, repeats=repeats)
  seconds = machine.measure_step_costs(
    model, node_counts=widths, effort=effort, **arguments
  ).verification
  bandwidth.sample()
  rate = bandwidth.summary()['bytes_per_second']
  read = model.spec.weight_bytes + model.spec.state_bytes
  return [
    {
      'N': n,
      'ms': 1e3 * seconds[n],
      'per_one': seconds[n] / seconds[1],
      'MB': read / 1e6,
      'GB_per_second': rate / 1e9,
      'per_reading': seconds[n] * rate / read,
    }
    for n in widths
  ]


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


def operations(
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


def profile(
  model: model_lib.LanguageModel,
  widths: Sequence[int],
  repeats: int,
  *,
  context: int,
) -> list[machine.Row]:
  """Where the time of a forward goes, by N; see `operations`.

  The arguments are those of `forward`. ValueError if a width is below 1, or the
  device is no CPU.
  """
  if jax.default_backend() != 'cpu':
    raise ValueError('--profile is for CPU; leave it out on other devices')
  widths, arguments = _arguments(model, widths, context)
  verify, program = machine.forwards(model, most_nodes=widths[-1], **arguments)
  rows = []
  for n in widths:
    verify(n, 1)  # compiles
    call = functools.partial(verify, n, repeats)
    found = operations(call, repeats, program(n))
    rows += [{'N': n} | row for row in found]
  return rows
