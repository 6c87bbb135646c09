"""Plans by name: a file, or `auto`, the plan of this machine."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from models.bench.record import describe_machine
from models.bench.record import to_table
from models.text.drafters import DraftSettings
from models.text.pair import find_checkpoints
from models.text.pair import load_pair
from models.text.pair import Pair
from models.text.plan import cache_path
from models.text.plan import Context
from models.text.plan import load_plan
from models.text.plan import model_digests
from models.text.plan import Plan
from models.tune.planner import make_plan
from models.tune.planner import PLAN_SECONDS
import specdec


def _as_json(value: Any) -> Any:
  """A value of `Sampling` as JSON."""
  if isinstance(value, Mapping):
    return {str(token): value[token] for token in sorted(value)}
  return np.asarray(value).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """The models and options that a plan depends on.

  Attributes:
    target: `demo`, a folder or a hub id; see `models.text.pair.load_pair`.
    draft: the draft model, named in the same way, or None.
    revision: of the target, on the hub.
    dtype: dtype of the target.
    draft_dtype: dtype of the draft; None for that of the target.
    batch_size: B, at least 1.
    sampling: options of all rows.

  Raises:
    ValueError: the batch size is below 1.
  """

  target: str
  draft: str | None
  revision: str | None = None
  dtype: str
  draft_dtype: str | None = None
  batch_size: int
  sampling: specdec.Sampling

  def __post_init__(self):
    if self.batch_size < 1:
      raise ValueError(
        f'--batch_size must be at least 1, got {self.batch_size}'
      )

  def load(self) -> Pair:
    """Loads the models."""
    return load_pair(
      self.target,
      self.draft,
      dtype=self.dtype,
      draft_dtype=self.draft_dtype,
      revision=self.revision,
    )

  def context(self) -> Context:
    """What a plan made here is for.

    Raises:
      ValueError: a model cannot be found.
    """
    sampling = {
      field.name: getattr(self.sampling, field.name)
      for field in dataclasses.fields(self.sampling)
    }
    return Context(
      models=model_digests(
        *find_checkpoints(self.target, self.draft, revision=self.revision)
      ),
      machine=describe_machine(),
      dtype=self.dtype,
      draft_dtype=self.draft_dtype or self.dtype,
      batch_size=self.batch_size,
      sampling={
        name: _as_json(value)
        for name, value in sampling.items()
        if value is not None
      },
    )


def find_plan(
  name: str,
  prompts: Callable[[], Sequence[str]],
  setup: Setup,
  *,
  drafting: DraftSettings,
  seed: int,
  max_new_tokens: int,
  plan_seconds: float = PLAN_SECONDS,
  report: Callable[[str], None],
) -> Plan:
  """Reads a plan; makes and saves that of this machine if there is none.

  Args:
    name: a file, or `auto`.
    prompts: returns sample prompts; called only to make a plan.
    setup: what the plan is for.
    drafting: settings that `make_plan` does not vary.
    seed: random seed of the sampling in `make_plan`.
    max_new_tokens: limit per row in `make_plan`.
    plan_seconds: time budget of `make_plan`.
    report: called with each line of progress, and with warnings where the plan
      was made for another context.

  Raises:
    ValueError: the plan cannot be read or is for other models.
  """
  context = setup.context()
  path = cache_path(context) if name == 'auto' else pathlib.Path(name)
  if name != 'auto' or path.exists():
    plan = load_plan(path)
    plan.check_models(context.models)
    for line in context.warnings(plan.context):
      report(f'warning: {line}')
    report(f'{plan.method}, from {path}')
    return plan
  report(
    f'there is none yet for this machine, these models and options; making it'
    f' in about {plan_seconds:.0f} s (Ctrl-C: from what is known by then)'
  )
  plan = make_plan(
    setup.load(),
    prompts(),
    context=context,
    sampling=setup.sampling,
    drafting=drafting,
    seed=seed,
    max_new_tokens=max_new_tokens,
    plan_seconds=plan_seconds,
    report=report,
  )
  plan.save(path)
  report(f'{plan.method}, saved as {path}')
  return plan


def table(plan: Plan) -> str:
  """The candidates of a plan as Markdown, fastest first."""
  head = (
    'candidate',
    'predicted tokens/s',
    'measured',
    'block eff.',
    'pays above',
    'ms drafting',
    'ms verifying',
  )
  rows = []
  for figures in plan.candidates:
    measured = figures['measured']
    rows.append(
      (
        figures['name'],
        f'{figures["tokens_per_second"]:.1f}',
        '' if measured is None else f'{measured:.1f}',
        f'{figures["block_efficiency"]:.2f}',
        f'{figures["min_block_efficiency"]:.2f}',
        f'{figures["drafting_milliseconds"]:.2f}',
        f'{figures["verification_milliseconds"]:.2f}',
      )
    )
  return to_table(head, rows)
