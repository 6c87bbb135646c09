"""Speculation over contexts that only a model with rotary positions has."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from models.language_model import as_model
from models.sweep import mixture
from models.sweep.fitting import described
from models.sweep.fitting import fit
from models.sweep.measuring import Effort
from models.sweep.measuring import measure_forwards
from models.sweep.studies import BATCH_NODE_COUNTS
from models.sweep.studies import make_bench
from models.sweep.studies import NODE_COUNTS
from models.sweep.studies import over_contexts
from specdec.buckets import padded_shape
from specdec.cost_model import Hardware

_ARM = 'chain'


def over_long_contexts(
  sizes: mixture.Mixture,
  machine: Hardware,
  *,
  contexts: Sequence[int],
  num_draft_tokens: int,
  effort: Effort,
) -> dict[str, Any]:
  """A free chain on the dense model of `models.sweep.mixture`, one row.

  Args:
    sizes: of the mixture whose dense twin it is.
    machine: what it can do at best.
    contexts: tokens of the prompts, rising.
    num_draft_tokens: of the chain.
    effort: how long to measure.

  Returns:
    A study, see `models.sweep.studies.over_contexts`; and `forwards`, what was
    fitted to what.
  """
  longest = padded_shape([[0] * max(contexts)], effort.max_new_tokens)
  # Room for a tree, too.
  room = sum(longest) + num_draft_tokens + 1
  sizes = dataclasses.replace(sizes, num_positions=room)
  subject = mixture.subject(
    'dense model',
    as_model(sizes.twin()),
    sizes.shape().dense_twin(),
    sizes.temperature,
  )
  times = [
    one
    for length, node_counts in (
      (min(contexts), NODE_COUNTS),
      (max(contexts), BATCH_NODE_COUNTS),
    )
    for one in measure_forwards(
      subject.target,
      subject.shape,
      subject.batches(batch_size=1, length=length, count=1)[0],
      node_counts=node_counts,
      sampling=subject.sampling,
      effort=effort,
    )
  ]
  fitted = fit(times, machine)
  drafters = {_ARM: mixture.free_chain(sizes, num_draft_tokens)}
  bench = make_bench(
    subject,
    fitted,
    drafters,
    batch_sizes=(1,),
    length=min(contexts),
    effort=effort,
  )
  study = over_contexts(bench, drafters, contexts=contexts, batch_size=1)
  return study | {
    'num_draft_tokens': num_draft_tokens,
    'sizes': dataclasses.asdict(sizes),
    'forwards': described(fitted, times),
  }
