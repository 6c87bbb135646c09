"""What `--plan` says, and who decodes in the end."""

from collections.abc import Callable
import operator
import sys
from typing import Any

from absl import flags
import decoding_flags as options

# What a plan settles: where the settings have what the flag says.
_PLANNED = (
  (options.NUM_DRAFT_TOKENS, 'num_draft_tokens'),
  (options.INNER, 'inner'),
  (options.NGRAM, 'ngram'),
  (options.LOOKUP_CONFIDENCE, 'lookup.confidence'),
  (options.NUM_NODES, 'tree.num_nodes'),
  (options.WIDTH, 'tree.width'),
  (options.BRANCHING, 'tree.branching'),
  (options.ROUNDS, 'tree.rounds'),
  (options.MAX_DEPTH, 'tree.max_depth'),
  (options.CAPACITY, 'tree.capacity'),
  (options.CALIBRATION, 'tree.calibration'),
  (options.COST_RATIO, 'tree.cost_ratio'),
  (options.MIN_GAIN, 'tree.min_gain'),
  (options.TOPOLOGY, 'tree.topology'),
  (options.INNER_WIDTH, 'inner_tree.width'),
  (options.INNER_BRANCHING, 'inner_tree.branching'),
  (options.INNER_ROUNDS, 'inner_tree.rounds'),
  (options.INNER_CALIBRATION, 'inner_tree.calibration'),
  (options.INNER_ROUNDS_ALONE, 'inner_rounds_alone'),
)


def check_contradictions(plan: Any, method: flags.FlagHolder | None) -> None:
  """Refuses flags that were given and say other than the plan.

  Args:
    plan: a `models.Plan`.
    method: the flag of the script, if it has one.
  """
  settings = options.draft_settings()
  said: list[tuple[str, Any, Any]] = []
  for flag, path in _PLANNED:
    if flag.present:
      read = operator.attrgetter(path)
      said.append((flag.name, read(settings), read(plan.drafting)))
  if method is not None and method.present and method.value != 'plan':
    said.append((method.name, method.value, plan.method))
  for name, ours, of_plan in said:
    if ours != of_plan:
      raise ValueError(
        f'--{name} says {ours}, --plan={options.PLAN.value} says {of_plan};'
        ' leave out one of the two'
      )


def plan_setup(batch_size: int) -> Any:
  """What the flags say that a plan depends on: a `models.plan_lookup.Setup`."""
  from models.tune import plan_lookup

  return plan_lookup.Setup(
    target=options.TARGET.value,
    draft=options.draft_name(),
    revision=options.REVISION.value,
    dtype=options.DTYPE.value,
    draft_dtype=options.DRAFT_DTYPE.value,
    batch_size=batch_size,
    sampling=options.sampling(),
  )


def plan(batch_size: int, prompts: Callable[[], list[str]]) -> Any:
  """What `--plan` says: a `models.Plan`, or None.

  Args:
    batch_size: of the decodes to come.
    prompts: samples; asked for only if a plan has to be made.
  """
  from models.tune import plan_lookup

  if options.PLAN.value is None:
    return None
  if options.VERIFY.value != 'match':
    raise ValueError(
      f'--plan is for --verify=match, got {options.VERIFY.value}: by other'
      ' rules other guesses stand'
    )
  return plan_lookup.find_plan(
    options.PLAN.value,
    prompts,
    plan_setup(batch_size),
    drafting=options.draft_settings(),
    seed=options.SEED.value,
    max_new_tokens=options.MAX_NEW_TOKENS.value,
    plan_seconds=options.PLAN_SECONDS.value,
    report=lambda line: print(f'plan: {line}', file=sys.stderr),
  )


def generator(
  method: flags.FlagHolder, prompts: list[str], batch_size: int
) -> Any:
  """The `models.Generator` that the flags describe.

  Args:
    method: the flag of the script.
    prompts: samples, should a plan have to be made.
    batch_size: of the decodes to come.
  """
  import models

  found = plan(batch_size, lambda: prompts)
  if found is not None:
    check_contradictions(found, method)
  return models.load(
    options.TARGET.value,
    options.draft_name(),
    method=method.value,
    drafting=options.draft_settings(),
    plan=found,
    dtype=options.DTYPE.value,
    draft_dtype=options.DRAFT_DTYPE.value,
    revision=options.REVISION.value,
  )
