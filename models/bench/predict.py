"""Speeds predicted from the measured cost of single forwards.

The time of a decode is predicted as its prefill plus its forwards, each as long
as a forward of that model over that number of tokens was when measured alone
(V(N) of `specdec.study.costs`). Drafting without a model and all other work of
a step are counted as free, so that the ratio of measured to predicted speed
shows what they cost.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from models.bench.arms import ReadyArm
from specdec.checks import padded_shape
from specdec.study.costs import measure_step_costs

_STEPS = 4


def _width(stage: str, arm: ReadyArm, figures: Mapping[str, Any]) -> int:
  """Tokens per row and forward of a model."""
  if stage == 'target':
    return arm.num_nodes
  forwards = max(figures['stage_forwards'][stage], 1)
  return max(figures['positions'][stage] // forwards, 1)


def predicted_speeds(
  arms: Mapping[str, ReadyArm],
  figures: Mapping[str, Mapping[str, Any]],
  *,
  prompts: Sequence[Sequence[int]],
  texts: Sequence[Sequence[int]],
  max_new_tokens: int,
) -> dict[str, float]:
  """The predicted speed of each arm over the first.

  Args:
    arms: by name; those without models (peers) are not predicted.
    figures: by name, of `specdec.study.timing.summarize_arms`.
    prompts: a batch.
    texts: the same prompts, continued; V(N) is measured on their tokens.
    max_new_tokens: the limit per row.

  Returns:
    Ratios of tokens per second; empty if the first arm has no models.
  """
  widths: dict[int, set[int]] = {}
  models = {}
  for name, arm in arms.items():
    for stage, model in arm.models.items():
      models[id(model)] = model
      widths.setdefault(id(model), set()).add(_width(stage, arm, figures[name]))
  prompt_slots, room = padded_shape(prompts, max_new_tokens)
  mean_length = sum(map(len, prompts)) // len(prompts)
  halfway = mean_length + max_new_tokens // 2
  costs = {
    key: measure_step_costs(
      model,
      texts,
      prompt_slots=prompt_slots,
      max_new_tokens=room,
      context=max(2, min(halfway, prompt_slots + room - 2 * _STEPS)),
      node_counts=sorted(widths[key]),
      num_steps=_STEPS,
      repeats=3,
    ).verification
    for key, model in models.items()
  }
  rates = {}
  for name, arm in arms.items():
    own = figures[name]
    seconds = own['prefill_seconds'] + sum(
      own['reads'][stage]['forwards']
      * costs[id(model)][_width(stage, arm, own)]
      for stage, model in arm.models.items()
    )
    if arm.models:
      rates[name] = own['new_tokens'] / max(seconds, 1e-9)
  baseline = rates.get(next(iter(arms)))
  return {name: rate / baseline for name, rate in rates.items() if baseline}
