"""Speeds predicted from the measured cost of single forwards.

The time of a decode is predicted as its prefill plus its forwards, each as long
as a forward of that model over that number of tokens was when measured alone
(V(N) of `models.lab.study.costs`). Drafting without a model and all other work
of a step are counted as free, so that the ratio of measured to predicted speed
shows what they cost.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from models.lab.bench import arms as arms_lib
from models.lab.study import costs as costs_lib
from specdec import padding

_STEPS = 4


def predicted_speeds(
  arms: Mapping[str, arms_lib.ReadyArm],
  figures: Mapping[str, Mapping[str, Any]],
  *,
  prompts: Sequence[Sequence[int]],
  texts: Sequence[Sequence[int]],
  max_new_tokens: int,
) -> dict[str, float]:
  """The predicted tokens per second of each arm over those of the first.

  Arms without models (peers) are not predicted; if the first has none, no arm
  is. V(N) is measured on the tokens of `texts`, which are the prompts of a
  batch, continued. Figures are those of `timing.summarize_arms`, by name.
  """
  slots, room = padding.padded_shape(prompts, max_new_tokens)
  halfway = sum(map(len, prompts)) // len(prompts) + max_new_tokens // 2
  # By arm: model, number of forwards, and tokens per row of each.
  forwards: dict[str, list[tuple[Any, int, int]]] = {}
  for name, arm in arms.items():
    counts, forwards[name] = figures[name], []
    for stage, model in arm.models.items():
      width = arm.num_nodes
      if stage != 'target':
        count = max(counts['stage_forwards'][stage], 1)
        width = max(counts['positions'][stage] // count, 1)
      count = counts['reads'][stage]['forwards']
      forwards[name].append((model, count, width))
  used = [use for uses in forwards.values() for use in uses]
  costs = {
    id(model): costs_lib.measure_step_costs(
      model,
      texts,
      prompt_slots=slots,
      max_new_tokens=room,
      context=max(2, min(halfway, slots + room - 2 * _STEPS)),
      node_counts=sorted({width for other, _, width in used if other is model}),
      effort=costs_lib.Effort(num_steps=_STEPS, repeats=3),
    ).verification
    for model in {id(model): model for model, _, _ in used}.values()
  }
  rates = {}
  for name, uses in forwards.items():
    seconds = figures[name]['prefill_seconds'] + sum(
      count * costs[id(model)][width] for model, count, width in uses
    )
    if uses:
      rates[name] = figures[name]['new_tokens'] / max(seconds, 1e-9)
  baseline = rates.get(next(iter(arms)))
  return {name: rate / baseline for name, rate in rates.items() if baseline}
