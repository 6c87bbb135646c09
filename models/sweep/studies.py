"""One axis at a time: measured, and what the cost model says of the same."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from models.sweep import overlay
from models.sweep.fitting import Fit
from models.sweep.fitting import ForwardTime
from models.sweep.measuring import Effort
from models.sweep.measuring import measure_decodes
from models.sweep.measuring import measure_drafting
from models.sweep.measuring import measure_forwards
from models.sweep.measuring import slots
from models.sweep.measuring import Subject
from specdec.cost_model import Deployment
from specdec.cost_model import forward_seconds
from specdec.cost_model import ModelShape
from specdec.cost_model import predict
from specdec.drafter import Drafter
from specdec.model import Model

PLAIN = 'plain'

# Of forwards that a machine is fitted to.
NODE_COUNTS = (1, 2, 5, 9, 17, 33)
BATCH_NODE_COUNTS = (1, 5)  # Of those that take long.
_BATCH = 8
_DRAFT_NODE_COUNTS = (1, 9)


@dataclasses.dataclass(frozen=True)
class Bench:
  """All that predictions are made from; none of it is a speedup.

  Attributes:
    subject: target and draft.
    fit: of the machine.
    overheads: by arm, seconds that a step takes besides its forwards, as a
      function of the batch size.
    effort: how long to measure.
  """

  subject: Subject
  fit: Fit
  overheads: Mapping[str, Callable[[float], float]]
  effort: Effort

  def deployment(self, name: str, batch_size: int) -> Deployment:
    """Who decodes on what, in an arm."""
    return Deployment(
      target=self.subject.shape,
      draft=self.subject.draft,
      hardware=self.fit.hardware,
      overlap=self.fit.overlap,
      step_overhead=self.overheads[name](batch_size),
    )


def time_forwards(
  subject: Subject, *, lengths: Sequence[int], effort: Effort
) -> list[ForwardTime]:
  """V(N) of target and draft, with few rows and many, short texts and long.

  Args:
    subject: target and draft.
    lengths: of prompts, the shortest and the longest.
    effort: how long to measure.
  """
  short, long = min(lengths), max(lengths)
  target = (subject.target, subject.shape)
  runs: list[tuple[Model, ModelShape, int, int, tuple[int, ...]]] = [
    (*target, 1, short, NODE_COUNTS),
    (*target, _BATCH, long, BATCH_NODE_COUNTS),
  ]
  if subject.draft_model is not None and subject.draft is not None:
    draft = (subject.draft_model, subject.draft)
    runs += [
      (*draft, 1, short, _DRAFT_NODE_COUNTS),
      (*draft, _BATCH, long, _DRAFT_NODE_COUNTS),
    ]
  return [
    one
    for model, shape, batch_size, length, node_counts in runs
    for one in measure_forwards(
      model,
      shape,
      subject.batches(batch_size=batch_size, length=length, count=1)[0],
      node_counts=node_counts,
      sampling=subject.sampling,
      effort=effort,
    )
  ]


def time_overheads(
  subject: Subject,
  drafters: Mapping[str, Drafter],
  fit: Fit,
  *,
  batch_sizes: Sequence[int],
  length: int,
  effort: Effort,
) -> dict[str, Callable[[float], float]]:
  """What a step takes besides forwards, from replays without the target.

  What the draft's forwards should take is subtracted.

  Args:
    subject: target and draft.
    drafters: by arm.
    fit: of the machine.
    batch_sizes: the smallest and the largest are measured; in between, a
      straight line.
    length: of the prompts.
    effort: how long to measure.
  """
  found = {}
  for name, drafter in drafters.items():
    ends = []
    for batch_size in (min(batch_sizes), max(batch_sizes)):
      (batch,) = subject.batches(batch_size=batch_size, length=length, count=1)
      replays = measure_drafting(subject, drafter, batch, effort)
      step = overlay.counted_step(replays, drafter, draft=subject.draft_name)
      drafting = 0.0
      if subject.draft is not None:
        drafting = step.draft_forwards * forward_seconds(
          subject.draft,
          fit.hardware,
          batch_size=batch_size,
          num_tokens=step.draft_width,
          context=slots([batch], effort),
          overlap=fit.overlap,
        )
      seconds = overlay.step_seconds(replays) - drafting
      ends.append((batch_size, max(seconds, 0.0)))
    found[name] = overlay.line_through(*ends)
  return found


def make_bench(
  subject: Subject,
  fitted: Fit,
  drafters: Mapping[str, Drafter],
  *,
  batch_sizes: Sequence[int],
  length: int,
  effort: Effort,
) -> Bench:
  """A bench with the overheads of its arms; see `time_overheads`."""
  overheads = time_overheads(
    subject,
    drafters,
    fitted,
    batch_sizes=batch_sizes,
    length=length,
    effort=effort,
  )
  return Bench(subject, fitted, overheads, effort)


def measure_point(
  bench: Bench,
  drafters: Mapping[str, Drafter],
  *,
  batch_size: int,
  length: int,
) -> dict[str, Any]:
  """Plain decoding and all drafters at one setting, and predictions.

  Returns:
    `batch_size`, `context` (the prompts), `slots`; of plain decoding
    `plain_step_seconds` and `predicted_plain_step_seconds`; by arm `speedup`
    (the median over `speedups`), `predicted`, `step_seconds`, and `step`, what
    was counted.
  """
  subject, effort = bench.subject, bench.effort
  batches = subject.batches(
    batch_size=batch_size, length=length, count=effort.repeats
  )
  results = measure_decodes(subject, {PLAIN: None, **drafters}, batches, effort)
  size = slots(batches, effort)
  point: dict[str, Any] = {
    'batch_size': batch_size,
    'context': length,
    'slots': size,
    'plain_step_seconds': overlay.step_seconds(results[PLAIN]),
  }
  point['arms'] = {}
  for name, drafter in drafters.items():
    step = overlay.counted_step(
      results[name], drafter, draft=subject.draft_name
    )
    expected = predict(
      bench.deployment(name, batch_size),
      step,
      batch_size=batch_size,
      context=size,
    )
    found = overlay.speedups(results[name], results[PLAIN])
    point['predicted_plain_step_seconds'] = expected.plain_seconds
    point['arms'][name] = {
      'speedup': sorted(found)[len(found) // 2],
      'speedups': found,
      'predicted': expected.speedup,
      'step_seconds': overlay.step_seconds(results[name]),
      'predicted_step_seconds': expected.seconds,
      'step': dataclasses.asdict(step),
    }
  return point


def over_batch_sizes(
  bench: Bench,
  drafters: Mapping[str, Drafter],
  *,
  batch_sizes: Sequence[int],
  length: int,
) -> dict[str, Any]:
  """Speedups over batch sizes, and where they end."""
  study = {
    'axis': 'batch size, rows',
    'x': list(batch_sizes),
    'arms': list(drafters),
    'points': [
      measure_point(bench, drafters, batch_size=one, length=length)
      for one in batch_sizes
    ],
  }
  return study | {'crossings': overlay.crossings(study)}


def over_contexts(
  bench: Bench,
  drafters: Mapping[str, Drafter],
  *,
  contexts: Sequence[int],
  batch_size: int,
) -> dict[str, Any]:
  """Speedups over lengths of prompts."""
  return {
    'axis': 'context of each row before decoding, tokens',
    'x': list(contexts),
    'arms': list(drafters),
    'points': [
      measure_point(bench, drafters, batch_size=batch_size, length=one)
      for one in contexts
    ],
  }


def over_nodes(
  bench: Bench,
  families: Mapping[str, Mapping[int, Drafter]],
  *,
  batch_size: int,
  length: int,
) -> dict[str, Any]:
  """Speedups over the number of verified tokens, the root included.

  Args:
    bench: see there; has an overhead by arm, `name: N`.
    families: by name, drafters by N.
    batch_size: B.
    length: of the prompts.
  """
  drafters = {
    node_arm(name, size): drafter
    for name, sizes in families.items()
    for size, drafter in sizes.items()
  }
  point = measure_point(bench, drafters, batch_size=batch_size, length=length)
  return {
    'axis': 'verified tokens of each row, the last one included',
    'arms': list(families),
    'sizes': {name: list(sizes) for name, sizes in families.items()},
    'points': [point],
  }


def node_arm(name: str, num_nodes: int) -> str:
  """The arm of a family that verifies so many."""
  return f'{name}: {num_nodes}'
