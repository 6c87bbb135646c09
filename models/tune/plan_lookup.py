"""Plans by name: a file, or the one of this machine, made if there is none."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from models.bench import record as results
from models.checkpoints import hub
from models.text.drafters import DraftSettings
from models.text.pair import load_pair
from models.text.pair import load_tokenizer
from models.text.pair import Pair
from models.text.pair import vocabulary_digest
from models.text.plan import cache_path
from models.text.plan import Context
from models.text.plan import load_plan
from models.text.plan import model_digests
from models.text.plan import Plan
from models.tune.planner import make_plan
import specdec


def _as_json(value: Any) -> Any:
  """A value of `Sampling`, as it comes back from a file."""
  if isinstance(value, Mapping):
    return {str(token): value[token] for token in sorted(value)}
  return np.asarray(value).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """What is to be decoded with: which plan is right depends on it.

  Attributes:
    target: see `models.pair.load_pair`.
    draft: likewise.
    revision: likewise.
    dtype: of the target.
    draft_dtype: of the draft; None: as the target.
    batch_size: B, at least 1.
    sampling: of all rows.

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
    """The models."""
    return load_pair(
      self.target,
      self.draft,
      dtype=self.dtype,
      draft_dtype=self.draft_dtype,
      revision=self.revision,
    )

  def context(self) -> Context:
    """What a plan for it, here, is for.

    Raises:
      ValueError: a model cannot be found.
    """
    tokenizer = load_tokenizer(hub.locate(self.target, revision=self.revision))
    named = {
      field.name: getattr(self.sampling, field.name)
      for field in dataclasses.fields(self.sampling)
    }
    return Context(
      models=model_digests(
        self.target,
        self.draft,
        vocabulary=vocabulary_digest(tokenizer),
        revision=self.revision,
      ),
      machine=results.describe_machine(),
      dtype=self.dtype,
      draft_dtype=self.draft_dtype or self.dtype,
      batch_size=self.batch_size,
      sampling={
        name: _as_json(value)
        for name, value in named.items()
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
  report: Callable[[str], None],
) -> Plan:
  """The plan of a file, or that of this machine, made first if need be.

  Args:
    name: a file, or `auto`.
    prompts: samples to make a plan with.
    setup: what it is for.
    drafting: see `make_plan`.
    seed: likewise.
    max_new_tokens: likewise.
    report: told what goes on, and in what the plan may be off the mark.

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
  report(f'none yet for this machine and these models: {path}; making it')
  plan = make_plan(
    setup.load(),
    prompts(),
    context=context,
    sampling=setup.sampling,
    drafting=drafting,
    seed=seed,
    max_new_tokens=max_new_tokens,
    report=report,
  )
  plan.save(path)
  report(f'{plan.method}, saved as {path}')
  return plan
