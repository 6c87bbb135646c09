"""The models of the flags, their plan, and the generator made from them."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import sys
from typing import Any

from absl import flags
import options

from specdec.models.lab import task as task_lib
from specdec.models.lab.tune import plan_lookup
from specdec.models.nn import dtypes
from specdec.models.nn import matrices
from specdec.models.nn import sharding as sharding_lib
from specdec.models.text import chat_template
from specdec.models.text import choice as choice_lib
from specdec.models.text import generator as generator_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import sources as sources_lib


@functools.cache
def models() -> choice_lib.ModelChoice:
  """The models of the flags; starts the devices of a mesh.

  Prints which dtype `--dtype=auto` is.
  """
  choice = options.models()
  if choice.mesh is not None:
    with options.named_as_flag():
      mesh = sharding_lib.make_mesh(choice.mesh)
    choice = dataclasses.replace(choice, mesh=mesh)
  if choice.dtype == dtypes.AUTO:
    dtype = sources_lib.open_sources(choice.of_target).placement.form.name
    how = 'as stored in the file' if dtype == matrices.STORED else f'in {dtype}'
    print(f'computing with weights {how} (--dtype=auto)', file=sys.stderr)
    choice = dataclasses.replace(choice, dtype=dtype)
  return choice


def drafting(plan: plan_lib.Plan | None = None) -> settings_lib.DraftSettings:
  """The drafting settings of the flags, with a plan for the method `plan`.

  Flags of trees that were not given get the defaults of the platform. This
  starts the devices; with a mesh, `models` must have started them.
  """
  for name, value in settings_lib.usual_options().items():
    flags.set_default(options.DRAFTING[name], value)
  return options.draft_settings(plan)


def method() -> str:
  """The name of the method that decodes: with a plan it is `plan`."""
  planned = options.PLAN.value is not None
  return settings_lib.PLANNED if planned else str(flags.FLAGS.method)


def is_exact() -> bool:
  """Whether drafted tokens always equal the tokens of plain decoding."""
  return sources_lib.open_sources(models().of_target).is_exact


def task(batch_size: int, plan: plan_lib.Plan | None = None) -> task_lib.Task:
  """The task of the flags, with a plan for the method `plan`."""
  return task_lib.Task(
    models=models(),
    drafting=drafting(plan),
    batch_size=batch_size,
    **options.decoding(),
  )


def plan(
  batch_size: int, samples: Callable[[], Sequence[chat_template.Prompt]]
) -> plan_lib.Plan | None:
  """The plan of `--plan`, if there is one, for batches of a size.

  `samples` returns prompts, and is called only if a plan has to be made.
  """
  if options.PLAN.value is None:
    return None
  if not options.keeps_tokens():
    raise ValueError(
      f'--plan is for --verify=match, got {options.VERIFY.value}: other rules'
      ' accept other numbers of tokens'
    )
  return plan_lookup.find_plan(
    options.PLAN.value,
    samples,
    task(batch_size),
    plan_seconds=options.PLAN_SECONDS.value,
    report=lambda line: print(f'plan: {line}', file=sys.stderr),
  )


def _check_contradictions(plan: plan_lib.Plan) -> None:
  """Refuses flags that were given and differ from the plan's usual way."""
  settings, method = drafting(), flags.FLAGS['method']
  usual = plan.usual
  given = {
    name: (option.read(settings), option.read(usual.drafting))
    for name, option in settings_lib.OPTIONS.items()
    if options.DRAFTING[name].present
  }
  if method.present and method.value != settings_lib.PLANNED:
    given['method'] = method.value, usual.method
  for name, (value, planned) in given.items():
    if value != planned:
      raise ValueError(
        f'--{name}={value} contradicts --plan={options.PLAN.value}, which has'
        f' {planned}; leave out one of the two'
      )


def _load(
  plan: plan_lib.Plan | None, messages: Any = None
) -> generator_lib.Generator:
  if plan is not None:
    _check_contradictions(plan)
  with options.named_as_flags():
    loaded = generator_lib.load(
      **vars(models()),
      method=flags.FLAGS.method,
      drafting=drafting(),
      plan=plan,
      messages=messages,
    )
  drafts = plan is None and flags.FLAGS.method != 'plain'
  if (
    drafts
    and loaded.pair.drafting_model is None
    and not options.names_a_drafter()
  ):
    print(
      'without --draft, lookup and recycling draft, which gains less than a'
      ' smaller model of the same family',
      file=sys.stderr,
    )
  return loaded


def generator(
  samples: list[str], batch_size: int, messages: Any = None
) -> generator_lib.Generator:
  """The generator of the flags; see `plan`, and `specdec.load` for messages."""
  return _load(plan(batch_size, lambda: samples), messages)


def many(
  samples: Callable[[], list[str]], batch_size: int
) -> tuple[generator_lib.Generator, dict[int, int]]:
  """The generator of the flags, and the `tree_sizes` for many prompts.

  With `--plan=auto` there is a plan for the full batch and one for a single
  prompt, see `plan_lookup.join_plans`. It takes the arguments of `plan`.
  """
  full, sizes = plan(batch_size, samples), dict[int, int]()
  if full is not None and options.PLAN.value == 'auto' and batch_size > 1:
    alone = plan(1, samples)
    assert alone is not None
    full, sizes = plan_lookup.join_plans(alone, full, batch_size)
  return _load(full), sizes
