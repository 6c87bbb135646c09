"""How long a forward of a model takes, and where its time goes."""

from collections.abc import Sequence
import functools
from typing import Any

import jax

from models.lab import machine
from models.lab import operations
from models.text import choice as choice_lib
from models.text import pair as pair_lib
from specdec import model as model_lib

_ROOM = 64  # for new tokens


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
    found = operations.table(call, repeats, program(n))
    rows += [{'N': n} | row for row in found]
  return rows
