"""How long a forward of a model takes, and where its time goes."""

from collections.abc import Sequence

import jax

from models.lab import machine
from models.lab import operations
from models.text import choice as choice_lib
from models.text import pair as pair_lib
from specdec import model as model_lib

_ROOM = 64  # for new tokens, in `forward`


def _operations(
  target: model_lib.LanguageModel, context: int, num_nodes: int, repeats: int
) -> list[machine.Row]:
  """Where the time of a forward goes."""
  verify, program = machine.forwards(
    target,
    [list(range(target.spec.vocab_size))],
    prompt_slots=context,
    max_new_tokens=_ROOM,
    context=context,
    most_nodes=num_nodes,
  )
  verify(num_nodes, 1)  # compiles
  call = lambda: verify(num_nodes, repeats)
  return operations.table(call, repeats, program(num_nodes))


def forward(
  models: choice_lib.ModelChoice,
  widths: Sequence[int],
  repeats: int,
  *,
  context: int,
  random_weights: bool = False,
  of_draft: bool = False,
  profile: bool = False,
) -> list[machine.Row]:
  """V(N) of a model as median milliseconds by N, which are 1 and the `widths`.

  Beside them is how long it takes to read its weights and states, at the
  bandwidth that is measured before and after.

  Args:
    models: the target and its format.
    widths: the N.
    repeats: how often each is measured.
    context: tokens in the cache.
    random_weights: whether only the shape of the target is read.
    of_draft: whether the draft is measured, with the tokens that it has.
    profile: whether the rows are the operations of a forward, see `operations`.

  Raises:
    ValueError: a width is below 1, or there is no draft.
  """
  widths = sorted({1, *widths})
  if widths[0] < 1:
    raise ValueError(f'--sizes={widths}: expected integers of at least 1')
  target = _model(models, random_weights=random_weights, of_draft=of_draft)
  dtype = models.draft_dtype if of_draft else models.dtype
  if profile:
    if jax.default_backend() != 'cpu':
      raise ValueError('--profile is for CPU; leave it out on other devices')
    return [
      {'dtype': dtype, 'N': n} | row
      for n in widths
      for row in _operations(target, context, n, repeats)
    ]
  bandwidth = machine.Bandwidth()
  bandwidth.sample()
  seconds = machine.measure_step_costs(
    target,
    [list(range(target.spec.vocab_size))],
    prompt_slots=context,
    max_new_tokens=_ROOM,
    context=context,
    node_counts=widths,
    effort=machine.Effort(num_steps=4, repeats=repeats),
  ).verification
  bandwidth.sample()
  rate = bandwidth.summary()['bytes_per_second']
  read = target.spec.weight_bytes + target.spec.state_bytes
  return [
    {
      'dtype': dtype,
      'N': n,
      'ms': 1e3 * seconds[n],
      'per_one': seconds[n] / seconds[1],
      'MB': read / 1e6,
      'GB_per_second': rate / 1e9,
      'per_reading': seconds[n] * rate / read,
    }
    for n in widths
  ]


def _model(
  models: choice_lib.ModelChoice, *, random_weights: bool, of_draft: bool
) -> model_lib.LanguageModel:
  """The target, or its draft."""
  if not of_draft:
    load = pair_lib.drawn_pair if random_weights else pair_lib.load_pair
    return load(models.of_target).target
  draft = pair_lib.load_pair(models).draft
  if draft is None:
    raise ValueError('--of_draft measures a draft model; give --draft')
  return draft
