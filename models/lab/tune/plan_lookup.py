"""Plans by name: a file, or `auto`, the plan of this machine."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import heads
from models.lab.bench import record
from models.lab.tune import planner
from models.nn import sharding as sharding_lib
from models.nn.cpu import build
from models.text import chat_template
from models.text import draft_vocabulary
from models.text import pair as pair_lib
from models.text import plan as plan_lib
from models.text import settings as settings_lib
import specdec


def _as_json(value: Any) -> Any:
  """A value of `Sampling` as JSON."""
  if isinstance(value, Mapping):
    # JSON has no infinity.
    return {
      str(token): value[token] if np.isfinite(value[token]) else '-inf'
      for token in sorted(value)
    }
  return np.asarray(value).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """The models and options that a plan depends on.

  `sampling` is the same for all rows.

  Raises:
    ValueError: the batch size is below 1.
  """

  models: pair_lib.ModelChoice
  batch_size: int
  sampling: specdec.Sampling

  def __post_init__(self):
    if self.batch_size < 1:
      raise ValueError(
        f'--batch_size must be at least 1, got {self.batch_size}'
      )

  def context(self) -> plan_lib.Context:
    """What a plan made here is for.

    Raises:
      ValueError: a model cannot be found.
    """
    choice = self.models
    target, draft = pair_lib.find_checkpoints(choice)
    layout = sharding_lib.make_layout(choice.mesh)
    one_device = layout.num_devices == 1
    packed = choice.cpu_kernels and one_device and build.is_available()
    dtype = draft_dtype = checkpoint_lib.resolve_dtype(
      choice.dtype, target, packed=packed
    )
    drafting: checkpoint_lib.StoredTensors | None = draft
    if choice.head is not None:
      drafting = heads.locate(choice.head, target.config).stored
    if drafting is not None:
      draft_dtype = checkpoint_lib.resolve_draft_dtype(
        choice.draft_dtype, drafting, target_dtype=dtype, packed=packed
      )
    axes = dict(layout.mesh.shape) if layout.mesh else {}
    return plan_lib.Context(
      models=plan_lib.model_digests(target, draft, choice.head),
      machine=record.describe_machine(),
      dtype=dtype,
      draft_dtype=draft_dtype,
      draft_vocab=draft_vocabulary.size_of(choice.draft_vocab),
      cpu_kernels=packed,
      mesh=f'{axes}, {choice.draft_mesh}' if axes else '',
      batch_size=self.batch_size,
      sampling={
        name: _as_json(value)
        for name, value in vars(self.sampling).items()
        if value is not None
      },
    )


def find_plan(
  name: str,
  prompts: Callable[[], Sequence[chat_template.Prompt]],
  setup: Setup,
  *,
  report: Callable[[str], None],
  **options: Any,
) -> plan_lib.Plan:
  """Reads a plan; makes and saves that of this machine if there is none.

  The name is that of a file, or `auto`. `prompts` returns sample prompts and is
  called only to make a plan. `report` is called with each line of progress, and
  with warnings where the plan was made for another context. The options are
  other arguments of `make_plan`.

  Raises:
    ValueError: the plan cannot be read or is for other models.
  """
  context = setup.context()
  path = pathlib.Path(name)
  if name == 'auto':
    path = plan_lib.cache_path(context, options['drafting'])
  if name != 'auto' or path.exists():
    try:
      plan = plan_lib.load_plan(path)
      plan.check_models(context.models)
      for line in context.warnings(plan.context):
        report(f'warning: {line}')
      report(f'{plan.method}, from {path}')
      return plan
    except ValueError as error:
      if name != 'auto':
        raise
      report(f'warning: {error}')
  seconds = options.setdefault('plan_seconds', planner.PLAN_SECONDS)
  report(
    'there is no plan yet for this machine, these models and options; making it'
    f' in about {seconds:.0f} s (Ctrl-C: from what is known by then)'
  )
  options |= {'sampling': setup.sampling, 'context': context}
  plan = planner.make_plan(
    pair_lib.load_pair(setup.models), prompts(), report=report, **options
  )
  try:
    plan.save(path)
    report(f'{plan.method}, saved as {path}')
  except OSError as error:
    report(f'{plan.method}; warning: the plan is not saved: {error}')
  return plan


def _num_nodes(plan: plan_lib.Plan) -> int:
  """N of the trees of a plan without a topology."""
  if plan.method in ('chain', 'staged_chain'):
    return plan.drafting.num_draft_tokens + 1
  return plan.drafting.tree.num_nodes


def join_plans(
  alone: plan_lib.Plan, full: plan_lib.Plan, batch_size: int
) -> tuple[plan_lib.Plan, dict[int, int]]:
  """One way to decode batches that fill and run dry.

  Args:
    alone: the plan for one prompt.
    full: the plan for `batch_size` prompts.
    batch_size: at least 2.

  Returns:
    A plan, and the `tree_sizes` of `specdec.Slots`. If the plans differ only in
    tree size, or `full` is plain: the plan with the larger tree, and sizes that
    use the tree of `alone` up to a quarter of the batch and that of `full`
    above. Else `full` and `{}`.
  """
  resized = lambda plan: settings_lib.with_options(
    plan.drafting, {'num_nodes': 1}
  )
  if alone.method == 'plain' or alone.drafting.topology is not None:
    return full, {}
  few = max(batch_size // 4, 1)
  if full.method == 'plain':
    return alone, {few: _num_nodes(alone), batch_size: 1}
  if (full.method, resized(full)) != (alone.method, resized(alone)):
    return full, {}
  larger = max(alone, full, key=_num_nodes)
  return larger, {few: _num_nodes(alone), batch_size: _num_nodes(full)}


def table(plan: plan_lib.Plan) -> str:
  """The candidates of a plan as Markdown, fastest first."""
  columns = {
    'predicted tokens/s': ('tokens_per_second', '.1f'),
    'measured': ('measured', '.1f'),
    'block eff.': ('block_efficiency', '.2f'),
    'pays above': ('min_block_efficiency', '.2f'),
    'ms drafting': ('drafting_milliseconds', '.2f'),
    'ms verifying': ('verification_milliseconds', '.2f'),
  }
  show = lambda value, form: '' if value is None else format(value, form)
  rows = [
    [figures['name'], *(show(figures[key], f) for key, f in columns.values())]
    for figures in plan.candidates
  ]
  return record.to_table(['candidate', *columns], rows)
