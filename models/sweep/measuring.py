"""Times decodes and forwards at one setting."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from models.sweep.fitting import ForwardTime
import specdec
from specdec.benchmarking import Measurement
from specdec.buckets import padded_shape
from specdec.cost_model import ModelShape
from specdec.drafter import Drafter
from specdec.model import Model
from specdec.replay import stand_in
from specdec.step_costs import measure_step_costs

_SEED = 0
_SHORTEST = 32
_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """A target, and who may draft for it.

  Attributes:
    name: for tables.
    target: the model.
    shape: its sizes.
    draft: the sizes of the draft; None if it costs next to nothing.
    draft_model: the draft itself; likewise.
    draft_name: of its stage in the counts; likewise.
    text: `[T]` int32, what prompts are cut from.
    sampling: how to choose tokens.
  """

  name: str
  target: Model
  shape: ModelShape
  draft: ModelShape | None
  draft_model: Model | None
  draft_name: str | None
  text: np.ndarray
  sampling: specdec.Sampling

  def batches(
    self, *, batch_size: int, length: int, count: int
  ) -> list[list[list[int]]]:
    """Prompts of `length` tokens each, different as long as the text lasts.

    Raises:
      ValueError: the text is shorter than a single one.
    """
    if len(self.text) < length:
      raise ValueError(
        f'a prompt needs {length} tokens, the text has {len(self.text)}; give a'
        ' larger --corpus or smaller --contexts'
      )
    starts = np.linspace(
      0, len(self.text) - length, batch_size * count, dtype=int
    )
    rows = [self.text[at : at + length].tolist() for at in starts]
    # A batch has rows from all over the text, so that batches are alike.
    return [rows[first::count] for first in range(count)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
  """How long to measure.

  Attributes:
    max_new_tokens: of each row.
    repeats: decodes of each arm at each setting, of different prompts.
    forward_repeats: of each forward; the median counts.
    report: told what is measured next.
  """

  max_new_tokens: int = 48
  repeats: int = 3
  forward_repeats: int = 3
  report: Callable[[str], Any] = lambda text: None


def slots(batches: Sequence[Sequence[Sequence[int]]], effort: Effort) -> int:
  """Of the cache of a row, as padded, the room for a tree apart."""
  return sum(padded_shape(batches[0], effort.max_new_tokens))


def _measure(
  target: Model,
  drafter: Drafter | None,
  batch: Sequence[Sequence[int]],
  subject: Subject,
  effort: Effort,
) -> Measurement:
  """One decode, timed from where the prompts have been read.

  Reading long prompts takes longer than the decode; timed with it, its noise
  would be most of the difference.
  """
  decoding = specdec.Decoding(
    target,
    jax.random.key(_SEED),
    batch,
    drafter=drafter,
    max_new_tokens=effort.max_new_tokens,
    sampling=subject.sampling,
  )
  decoding.step(0)
  start = time.perf_counter()
  decoding.run()
  return Measurement(time.perf_counter() - start, decoding.result())


def measure_decodes(
  subject: Subject,
  drafters: Mapping[str, Drafter | None],
  batches: Sequence[Sequence[Sequence[int]]],
  effort: Effort,
) -> dict[str, list[Measurement]]:
  """Every batch by every arm, in turns, once everything is compiled.

  Seconds are those of the decodes, without reading the prompts.
  """
  effort.report(
    f'{", ".join(drafters)} of {subject.name}, {len(batches[0])} x'
    f' {len(batches[0][0])} tokens'
  )
  measure = lambda name, batch: _measure(
    subject.target, drafters[name], batch, subject, effort
  )
  for name in drafters:
    measure(name, batches[0])
  found: dict[str, list[Measurement]] = {name: [] for name in drafters}
  for index, batch in enumerate(batches):
    for name in list(drafters)[:: -1 if index % 2 else 1]:
      found[name].append(measure(name, batch))
  return found


def measure_drafting(
  subject: Subject,
  drafter: Drafter,
  batch: Sequence[Sequence[int]],
  effort: Effort,
) -> list[Measurement]:
  """The same decodes without the target, by replay (`specdec.replay`)."""
  effort.report(f'drafting for {subject.name}, {len(batch)} rows')
  new = _measure(subject.target, None, batch, subject, effort).generation
  texts = [[*one, *more] for one, more in zip(batch, new.tokens, strict=True)]
  target = stand_in(subject.target.definition, texts)
  measure = lambda: _measure(target, drafter, batch, subject, effort)
  measure()
  return [measure() for _ in range(effort.repeats)]


def measure_forwards(
  model: Model,
  shape: ModelShape,
  texts: Sequence[Sequence[int]],
  *,
  node_counts: Sequence[int],
  sampling: specdec.Sampling,
  effort: Effort,
) -> list[ForwardTime]:
  """V(N) at one batch size.

  Args:
    model: whose forwards they are.
    shape: its sizes.
    texts: the prompts of a batch, of equal length.
    node_counts: N; 1 is added.
    sampling: of the loop around them.
    effort: how long to measure.
  """
  batch_size, length = len(texts), len(texts[0])
  effort.report(f'forwards of {shape.name}, {batch_size} rows')
  prompt_slots, room = padded_shape([[0] * length], effort.max_new_tokens)
  costs = measure_step_costs(
    model,
    texts,
    # As many slots, but no long prompts to be read.
    prompt_slots=_SHORTEST,
    max_new_tokens=prompt_slots + room - _SHORTEST,
    context=length,
    num_steps=_STEPS,
    sampling=sampling,
    node_counts=node_counts,
    repeats=effort.forward_repeats,
  )
  make = functools.partial(
    ForwardTime, shape=shape, batch_size=batch_size, slots=prompt_slots + room
  )
  return [
    make(num_tokens=size, seconds=seconds)
    for size, seconds in costs.verification.items()
  ]
