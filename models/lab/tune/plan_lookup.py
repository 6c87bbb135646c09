"""Plans by name: a file, or `auto`, the plan of this machine."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import pathlib
from typing import Any

import numpy as np

from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import record
from specdec.models.lab.tune import planner
from specdec.models.text import chat_template
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import sources as sources_lib


def _as_json(value: Any) -> Any:
  """A value of `Sampling` as JSON."""
  if isinstance(value, Mapping):
    # JSON has no infinity.
    return {
      str(token): value[token] if np.isfinite(value[token]) else '-inf'
      for token in sorted(value)
    }
  return np.asarray(value).tolist()


def context_of(task: task_lib.Task) -> plan_lib.Context:
  """The facts that a plan depends on, if it is made here for a task.

  Raises:
    ValueError: a model cannot be used.
  """
  choice = task.models
  sources = sources_lib.open_sources(choice)
  mesh = sources.placement.layout.mesh
  return plan_lib.Context(
    models=plan_lib.model_digests(sources),
    machine=record.describe_machine(),
    dtype=sources.placement.form.name,
    draft_dtype=sources.draft_placement.form.name,
    draft_vocab=choice.draft_vocab_size,
    cpu_kernels=sources.placement.packed,
    mesh=f'{dict(mesh.shape)}, {choice.draft_mesh}' if mesh else '',
    batch_size=task.batch_size,
    sampling={
      name: _as_json(value)
      for name, value in vars(task.sampling).items()
      if value is not None
    },
  )


def find_plan(
  name: str,
  prompts: Callable[[], Sequence[chat_template.Prompt]],
  task: task_lib.Task,
  *,
  plan_seconds: float = planner.PLAN_SECONDS,
  report: Callable[[str], None],
) -> plan_lib.Plan:
  """Reads a plan, or makes and saves a plan for this machine.

  Args:
    name: of a file, or `auto`.
    prompts: returns sample prompts; called only to make a plan.
    task: what the plan is for.
    plan_seconds: the time budget for making a plan.
    report: called with each line of progress, and with warnings where the plan
      was made for another context.

  Raises:
    ValueError: the plan cannot be read or is for other models.
  """
  context = context_of(task)
  path = pathlib.Path(name)
  if name == 'auto':
    path = plan_lib.cache_path(context, task.drafting)
  if name != 'auto' or path.exists():
    try:
      plan = plan_lib.load_plan(path)
      plan.check_models(context.models)
      for line in context.warnings(plan.context):
        report(f'warning: {line}')
      report(f'{plan.usual.name}, from {path}')
      return plan
    except ValueError as error:
      if name != 'auto':
        raise
      report(f'warning: {error}')
  report(
    'there is no plan yet for this machine, these models and options; making it'
    f' in about {plan_seconds:.0f} s (Ctrl-C: from what is known by then)'
  )
  plan = planner.make_plan(
    pair_lib.load_pair(task.models),
    prompts(),
    task,
    context=context,
    plan_seconds=plan_seconds,
    report=report,
  )
  try:
    plan.save(path)
    report(f'{plan.usual.name}, saved as {path}')
  except OSError as error:
    report(f'{plan.usual.name}; warning: the plan is not saved: {error}')
  return plan


def _num_nodes(way: plan_lib.Way) -> int:
  """N of the trees of a way without a topology."""
  if way.method in ('chain', 'staged_chain'):
    return way.drafting.num_draft_tokens + 1
  return way.drafting.tree.num_nodes


def join_plans(
  alone: plan_lib.Plan, full: plan_lib.Plan, batch_size: int
) -> tuple[plan_lib.Plan, dict[int, int]]:
  """Joins two plans, for batches that fill up and run dry.

  Args:
    alone: the plan for one prompt.
    full: the plan for `batch_size` prompts.
    batch_size: at least 2.

  Returns:
    A plan, and the `tree_sizes` of `specdec.Slots`. If the usual ways of the
    plans differ only in tree size, or the usual way of `full` is plain: the
    plan with the larger tree, and sizes that use the tree of `alone` up to a
    quarter of the batch and the tree of `full` above. Else `full` and `{}`.
  """
  resized = lambda way: settings_lib.with_options(
    way.drafting, {'num_nodes': 1}
  )
  way, full_way = alone.usual, full.usual
  if way.method == 'plain' or way.drafting.topology is not None:
    return full, {}
  quarter = max(batch_size // 4, 1)
  if full_way.method == 'plain':
    return alone, {quarter: _num_nodes(way), batch_size: 1}
  if (full_way.method, resized(full_way)) != (way.method, resized(way)):
    return full, {}
  larger = max(alone, full, key=lambda plan: _num_nodes(plan.usual))
  return larger, {quarter: _num_nodes(way), batch_size: _num_nodes(full_way)}


def table(plan: plan_lib.Plan) -> str:
  """Tokens per second of the ways of a plan as Markdown, prompts counted."""
  lengths = sorted({n for way in plan.ways for n in way.tokens_per_second})
  show = lambda speed: '' if speed is None else f'{speed:.1f}'
  rows = [
    [
      way.name,
      f'{way.break_even:.2f}',
      *(show(way.tokens_per_second.get(length)) for length in lengths),
    ]
    for way in plan.ways
  ]
  columns = [f'{length} tokens' for length in lengths]
  return record.to_table(['way', 'break even', *columns], rows)
