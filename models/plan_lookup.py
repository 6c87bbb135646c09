"""Plans by name: a file, or the one of this machine, made if there is none."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from models import hub
from models import results
from models.drafters import DraftSettings
from models.pair import load_pair
from models.pair import load_tokenizer
from models.plan import cache_path
from models.plan import Context
from models.plan import load_plan
from models.plan import model_digests
from models.plan import Plan
from models.planner import make_plan
from models.vocabulary import vocabulary_digest
import specdec


def _as_json(value: Any) -> Any:
  """A value of `Sampling`, as it comes back from a file."""
  if isinstance(value, Mapping):
    return {str(token): value[token] for token in sorted(value)}
  return np.asarray(value).tolist()


def make_context(
  *,
  target: str,
  draft: str | None,
  revision: str | None,
  dtype: str,
  draft_dtype: str | None = None,
  batch_size: int,
  sampling: specdec.Sampling,
) -> Context:
  """What a plan for these models, here, is for.

  Args:
    target: see `models.pair.load_pair`.
    draft: likewise.
    revision: likewise.
    dtype: of the target.
    draft_dtype: of the draft; None: as the target.
    batch_size: B, at least 1.
    sampling: of all rows.

  Raises:
    ValueError: a model cannot be found, or the batch size is below 1.
  """
  if batch_size < 1:
    raise ValueError(f'--batch_size must be at least 1, got {batch_size}')
  tokenizer = load_tokenizer(hub.locate(target, revision=revision))
  named = {
    field.name: getattr(sampling, field.name)
    for field in dataclasses.fields(sampling)
  }
  return Context(
    models=model_digests(
      target,
      draft,
      vocabulary=vocabulary_digest(tokenizer),
      revision=revision,
    ),
    machine=results.describe_machine(),
    dtype=dtype,
    draft_dtype=draft_dtype or dtype,
    batch_size=batch_size,
    sampling={
      name: _as_json(value)
      for name, value in named.items()
      if value is not None
    },
  )


def find_plan(
  name: str,
  prompts: Callable[[], Sequence[str]],
  *,
  target: str,
  draft: str | None,
  revision: str | None,
  dtype: str,
  draft_dtype: str | None = None,
  batch_size: int,
  sampling: specdec.Sampling,
  drafting: DraftSettings,
  seed: int,
  max_new_tokens: int,
  report: Callable[[str], None],
) -> Plan:
  """The plan of a file, or that of this machine, made first if need be.

  Args:
    name: a file, or `auto`.
    prompts: samples to make a plan with.
    target: see `make_context`.
    draft: likewise.
    revision: likewise.
    dtype: likewise.
    draft_dtype: likewise.
    batch_size: likewise.
    sampling: likewise.
    drafting: see `make_plan`.
    seed: likewise.
    max_new_tokens: likewise.
    report: told what goes on, and in what the plan may be off the mark.

  Raises:
    ValueError: the plan cannot be read or is for other models.
  """
  context = make_context(
    target=target,
    draft=draft,
    revision=revision,
    dtype=dtype,
    draft_dtype=draft_dtype,
    batch_size=batch_size,
    sampling=sampling,
  )
  path = cache_path(context) if name == 'auto' else pathlib.Path(name)
  if name != 'auto' or path.exists():
    plan = load_plan(path)
    plan.check_models(context.models)
    for line in context.warnings(plan.context):
      report(f'warning: {line}')
    report(f'{plan.method}, from {path}')
    return plan
  report(f'none yet for this machine and these models: {path}; making it')
  pair = load_pair(
    target, draft, dtype=dtype, draft_dtype=draft_dtype, revision=revision
  )
  plan = make_plan(
    pair,
    prompts(),
    context=context,
    sampling=sampling,
    drafting=drafting,
    seed=seed,
    max_new_tokens=max_new_tokens,
    report=report,
  )
  plan.save(path)
  report(f'{plan.method}, saved as {path}')
  return plan
