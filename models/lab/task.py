"""The decoding task of benchmarks, plans and compiled programs."""

import dataclasses

import specdec
from specdec.models.text import choice as choice_lib
from specdec.models.text import settings as settings_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """The models and options of a decode that is measured, planned or compiled.

  Attributes:
    models: the models; arms of a benchmark have dtypes of their own.
    drafting: the settings that arms and candidates of a plan do not vary.
    sampling: the same for all rows.
    verify: see `specdec.Options`, also for the next two.
    children: only for drafters.
    break_even: None: as the plan says, if there is a plan.
    seed: of the sampling.
    batch_size: the rows that are decoded at once.
    max_new_tokens: the limit of each row.

  Raises:
    ValueError: the batch size is below 1.
  """

  models: choice_lib.ModelChoice = choice_lib.ModelChoice()
  drafting: settings_lib.DraftSettings = settings_lib.DraftSettings()
  sampling: specdec.Sampling = specdec.Sampling()
  verify: str = 'match'
  children: str | None = None
  break_even: float | None = None
  seed: int = 0
  batch_size: int = 1
  max_new_tokens: int = 128

  def __post_init__(self):
    if self.batch_size < 1:
      raise ValueError(
        f'--batch_size must be at least 1, got {self.batch_size}'
      )
