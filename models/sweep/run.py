"""The whole sweep: what scripts/sweep.py calls."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import json
from typing import Any

import jax.numpy as jnp

from models import hub
from models.drafters import DraftSettings
from models.drafters import make_drafter
from models.drafters import with_options
from models.mixtral import Mixtral
from models.pair import load_pair
from models.pair import load_tokenizer
from models.pair import Pair
from models.sweep import against_twin
from models.sweep import long_context
from models.sweep import routing
from models.sweep import studies
from models.sweep.fitting import described
from models.sweep.fitting import fit
from models.sweep.measuring import Effort
from models.sweep.measuring import Subject
from models.sweep.mixture import Mixture
from models.training.corpus import Corpus
import specdec
from specdec.cost_model import Hardware
from specdec.cost_model import ModelShape
from specdec.cost_model import shape_from_config
from specdec.drafter import Drafter

_OF_THE_PAIR = ('batch', 'context', 'nodes')
STUDIES = (*_OF_THE_PAIR, 'long', 'experts', 'routing')
DTYPES = ('bfloat16', 'float32')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
  """What is varied; everything else stays at the first value.

  Attributes:
    batch_sizes: B, rising.
    contexts: tokens of prompts, rising.
    long_contexts: likewise, of a model with rotary positions.
    context_batch_size: of the sweep over contexts.
    chain_nodes: N of chains.
    tree_nodes: N of staged trees.
    nodes_batch_size: of the sweep over nodes.
    expert_batch_sizes: of the sweep against experts.
    routed_nodes: N of the sweep over routing.
    routed_batch_sizes: B of it.

  Raises:
    ValueError: a list is empty, does not rise, or has a value that is too
      small; names the flag.
  """

  batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
  contexts: tuple[int, ...] = (64, 448, 960)
  long_contexts: tuple[int, ...] = (512, 2048, 4096)
  context_batch_size: int = 8
  chain_nodes: tuple[int, ...] = (2, 3, 5, 9, 17)
  tree_nodes: tuple[int, ...] = (8, 16, 32)
  nodes_batch_size: int = 1
  expert_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
  routed_nodes: tuple[int, ...] = (1, 2, 5, 9, 17, 33)
  routed_batch_sizes: tuple[int, ...] = (1, 4)

  def __post_init__(self):
    least = {'chain_nodes': 2, 'tree_nodes': 2}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      values = value if isinstance(value, tuple) else (value,)
      low = least.get(field.name, 1)
      if not values or list(values) != sorted(set(values)) or values[0] < low:
        raise ValueError(
          f'--{field.name} must be rising integers of at least {low}, got'
          f' {",".join(map(str, values)) or "nothing"}'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Who is measured, and how.

  Attributes:
    target: see `models.pair.load_pair`.
    draft: likewise.
    dtype: one of `DTYPES`, of both.
    corpus: what prompts are cut from: its held-out files.
    drafting: of the arms; see `models.drafters.make_drafter`.
    axes: what is varied.
    mixture: sizes of the mixture of the study `experts`, whose dense twin is
      that of the study `long`.
    routed: a trained mixture of experts, of the study `routing`.
    effort: how long to measure.
    studies: some of `STUDIES`.
    save: called with the name and the record of each study when it is done.
  """

  target: str
  draft: str
  dtype: str
  corpus: Corpus
  drafting: DraftSettings
  axes: Axes
  mixture: Mixture
  routed: str
  effort: Effort
  studies: tuple[str, ...] = STUDIES
  save: Callable[[str, Mapping[str, Any]], Any] = lambda name, record: None

  def __post_init__(self):
    unknown = [one for one in self.studies if one not in STUDIES]
    if unknown or not self.studies:
      raise ValueError(
        f'--studies={",".join(self.studies)}: choose from {",".join(STUDIES)}'
      )


def model_shape(name: str, dtype: str) -> ModelShape:
  """The sizes of a model folder, in a dtype; see `hub.locate`.

  Raises:
    ValueError: it has no config.json that the cost model knows.
  """
  path = hub.locate(name) / 'config.json'
  if not path.is_file():
    raise ValueError(f'{path.parent} has no config.json')
  shape = shape_from_config(
    json.loads(path.read_text('utf-8')), name=path.parent.name
  )
  size = jnp.dtype(dtype).itemsize
  # What lies between two products is float32, whatever the weights are.
  return dataclasses.replace(
    shape,
    weight_bytes=size,
    cache_bytes=size,
    activation_bytes=4,
    dtype=dtype,
  )


def _subject(plan: Plan) -> tuple[Subject, Pair]:
  pair = load_pair(plan.target, plan.draft, dtype=jnp.dtype(plan.dtype))
  assert pair.draft is not None
  scorer = specdec.LanguageModelScorer(pair.draft)
  shape = model_shape(plan.target, plan.dtype)
  name = Drafter(scorer, plan.drafting.tree).stages[0].name
  longest = pair.target.definition.max_positions
  needed = max(plan.axes.contexts) + plan.effort.max_new_tokens
  if needed > longest:
    raise ValueError(
      f'--contexts={max(plan.axes.contexts)} and'
      f' --max_new_tokens={plan.effort.max_new_tokens} exceed the context of'
      f' the target, {longest} tokens'
    )
  return Subject(
    name=shape.name,
    target=pair.target,
    shape=shape,
    draft=model_shape(hub.draft_name(plan.draft), plan.dtype),
    draft_model=pair.draft,
    draft_name=name,
    text=plan.corpus.tokens(pair.tokenizer, held_out=True),
    sampling=specdec.Sampling(),
  ), pair


def _drafters(plan: Plan, pair: Pair) -> dict[str, Drafter]:
  drafters = {
    'chain': make_drafter('chain', pair, plan.drafting),
    'staged': make_drafter('staged', pair, plan.drafting),
  }
  return {name: one for name, one in drafters.items() if one is not None}


def _families(plan: Plan, pair: Pair) -> dict[str, dict[int, Drafter]]:
  """Chains and staged trees by the number of verified tokens."""
  make = lambda method, **options: make_drafter(
    method, pair, with_options(plan.drafting, options)
  )
  families = {
    'chain': {
      size: make('chain', num_draft_tokens=size - 1)
      for size in plan.axes.chain_nodes
    },
    'staged': {
      size: make('staged', num_nodes=size) for size in plan.axes.tree_nodes
    },
  }
  return {
    name: {size: one for size, one in sizes.items() if one is not None}
    for name, sizes in families.items()
  }


def _save(plan: Plan, figures: Mapping[str, Any], name: str) -> None:
  shared = ('limits', 'forwards') if name in _OF_THE_PAIR else ('limits',)
  record = {key: figures[key] for key in shared} | {'study': figures[name]}
  plan.save(name, record)


def _run_pair(plan: Plan, machine: Hardware, figures: dict[str, Any]) -> None:
  subject, pair = _subject(plan)
  axes, effort = plan.axes, plan.effort
  length = axes.contexts[0]
  times = studies.time_forwards(subject, lengths=axes.contexts, effort=effort)
  fitted = fit(times, machine)
  overheads = lambda drafters, batch_sizes: studies.time_overheads(
    subject,
    drafters,
    fitted,
    batch_sizes=batch_sizes,
    length=length,
    effort=effort,
  )
  drafters = _drafters(plan, pair)
  bench = studies.Bench(subject, fitted, {}, effort)
  if {'batch', 'context'} & set(plan.studies):
    sizes = sorted({*axes.batch_sizes, axes.context_batch_size})
    bench = dataclasses.replace(bench, overheads=overheads(drafters, sizes))
  figures['forwards'] = described(fitted, times)
  if 'batch' in plan.studies:
    figures['batch'] = studies.over_batch_sizes(
      bench, drafters, batch_sizes=axes.batch_sizes, length=length
    )
    _save(plan, figures, 'batch')
  if 'context' in plan.studies:
    figures['context'] = studies.over_contexts(
      bench,
      drafters,
      contexts=axes.contexts,
      batch_size=axes.context_batch_size,
    )
    _save(plan, figures, 'context')
  if 'nodes' in plan.studies:
    families = _families(plan, pair)
    largest = {
      studies.node_arm(name, size): sizes[size]
      for name, sizes in families.items()
      for size in (max(sizes),)
    }
    found = overheads(largest, (axes.nodes_batch_size,))
    by_arm = {
      studies.node_arm(name, size): found[studies.node_arm(name, max(sizes))]
      for name, sizes in families.items()
      for size in sizes
    }
    figures['nodes'] = studies.over_nodes(
      dataclasses.replace(bench, overheads=by_arm),
      families,
      batch_size=axes.nodes_batch_size,
      length=length,
    )
    _save(plan, figures, 'nodes')


def _over_routing(plan: Plan) -> dict[str, Any]:
  module = hub.load_module(plan.routed)
  if not isinstance(module, Mixtral):
    raise ValueError(f'--routed={plan.routed} has no experts')
  tokenizer = load_tokenizer(hub.locate(plan.routed))
  return routing.over_nodes(
    module,
    plan.corpus.tokens(tokenizer, held_out=True),
    node_counts=plan.axes.routed_nodes,
    batch_sizes=plan.axes.routed_batch_sizes,
  )


def run(plan: Plan, machine: Hardware) -> Mapping[str, Any]:
  """All studies.

  Args:
    plan: what to measure.
    machine: what it can do at best, `models.machine_limits.this_machine`.

  Returns:
    `limits` (the machine); for the pair `forwards`, what was fitted to what;
    and by name the studies, see `models.sweep.studies`,
    `models.sweep.long_context`, `models.sweep.against_twin` and
    `models.sweep.routing`.

  Raises:
    ValueError: bad input; says what.
  """
  figures: dict[str, Any] = {'limits': dataclasses.asdict(machine)}
  if set(plan.studies) & set(_OF_THE_PAIR):
    _run_pair(plan, machine, figures)
  if 'long' in plan.studies:
    figures['long'] = long_context.over_long_contexts(
      plan.mixture,
      machine,
      contexts=plan.axes.long_contexts,
      num_draft_tokens=plan.drafting.num_draft_tokens,
      effort=plan.effort,
    )
    _save(plan, figures, 'long')
  if 'experts' in plan.studies:
    figures['experts'] = against_twin.over_batch_sizes(
      plan.mixture,
      machine,
      batch_sizes=plan.axes.expert_batch_sizes,
      length=plan.axes.contexts[0],
      num_draft_tokens=plan.drafting.num_draft_tokens,
      effort=plan.effort,
    )
    _save(plan, figures, 'experts')
  if 'routing' in plan.studies:
    figures['routing'] = _over_routing(plan)
    _save(plan, figures, 'routing')
  return figures
