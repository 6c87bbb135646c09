"""Drafters by name, made from settings."""

from collections.abc import Mapping
import dataclasses
import pathlib

import jax

from specdec import decode_options
from specdec.draft import block as block_lib
from specdec.draft import candidates
from specdec.draft import drafter as drafter_lib
from specdec.draft import head as head_lib
from specdec.draft import language_model
from specdec.draft import lookup
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import text_store
from specdec.ngram import table as table_lib
from specdec.tree import topology as topology_lib

DEMO_TABLE = pathlib.Path(__file__).parents[1] / 'demo' / 'ngram.safetensors'


def _load_ngram(
  settings: settings_lib.DraftSettings, pair: pair_lib.Pair
) -> lookup.NGram:
  """The n-gram table; ValueError if it was built with another tokenizer."""
  path = DEMO_TABLE if settings.ngram == 'demo' else settings.ngram
  table, provenance = table_lib.load_table(path)
  vocab_size = pair.target.spec.vocab_size
  digest = provenance.get('tokenizer_blake2b')
  if digest is None:  # Then only the size can be compared.
    fits = table.vocab_size == vocab_size
  else:
    # Sizes of one tokenizer can only differ by padding.
    fits = digest == pair_lib.vocabulary_digest(pair.tokenizer)
  if not fits:
    raise ValueError(
      f'the n-gram table {path} ({table.vocab_size} tokens) was built with'
      f' another tokenizer than the target has ({vocab_size} tokens); build one'
      ' with scripts/build_ngram.py, or choose inner=lookup'
    )
  table = jax.device_put(table, pair.layout.everywhere)
  return lookup.NGram(table.replace(vocab_size=vocab_size))


def _default_inner(
  settings: settings_lib.DraftSettings, pair: pair_lib.Pair
) -> str:
  if settings.ngram != 'demo':
    return 'ngram+lookup'  # A chosen table that does not fit is refused.
  try:
    _load_ngram(settings, pair)
  except ValueError:
    # Next to a draft, which knows more of what follows a token, it gains less.
    return 'lookup+recycling' if pair.drafting_model is None else 'lookup'
  return 'ngram+lookup'


def open_store(
  settings: settings_lib.DraftSettings, pair: pair_lib.Pair
) -> text_store.TextStore | None:
  """The store of earlier texts, if the settings have one.

  Raises:
    ValueError: it cannot be read, or was filled with another tokenizer.
  """
  if settings.store is None:
    return None
  digest = pair_lib.vocabulary_digest(pair.tokenizer)
  return text_store.TextStore(
    settings.store,
    digest,
    pair.target.spec.vocab_size,
    place=pair.layout.everywhere,
  )


def _tables(
  inner: str,
  settings: settings_lib.DraftSettings,
  pair: pair_lib.Pair,
  store: text_store.TextStore | None,
) -> candidates.CandidateScorer:
  # A match in the text itself is the better evidence, so it comes first.
  proposers: list[candidates.Proposer] = []
  store = store or open_store(settings, pair)
  if 'lookup' in inner.split('+'):
    proposers.append(settings.lookup)
  if store is not None:
    proposers.append(store.index())
  if 'ngram' in inner.split('+'):
    proposers.append(_load_ngram(settings, pair))
  if 'recycling' in inner.split('+'):
    proposers.append(lookup.Recycling())
  return candidates.CandidateScorer(tuple(proposers))


def _one_stage(
  scorer: drafter_lib.Scorer,
  config: drafter_lib.StageConfig,
  settings: settings_lib.DraftSettings,
) -> drafter_lib.Drafter:
  if settings.topology is None:
    return drafter_lib.Drafter(
      (drafter_lib.Stage(scorer, config),), settings.tree
    )
  return drafter_lib.fixed_drafter(
    scorer, settings.topology, calibration=settings.stage.calibration
  )


def _model_scorer(
  pair: pair_lib.Pair, draft_prompt: int | None
) -> drafter_lib.Scorer:
  if pair.draft is None:
    assert pair.head is not None
    if draft_prompt is not None:
      raise ValueError(
        f'draft_prompt={draft_prompt} is for a draft model; a head reads hidden'
        ' states of the target at all tokens: leave it out'
      )
    if isinstance(pair.head, head_lib.Head):
      return head_lib.HeadScorer(pair.head)
    return block_lib.BlockScorer(pair.head)
  return language_model.LanguageModelScorer(
    pair.draft, most_tokens=draft_prompt
  )


def make_drafter(
  method: str,
  pair: pair_lib.Pair,
  settings: settings_lib.DraftSettings,
  store: text_store.TextStore | None = None,
) -> drafter_lib.Drafter:
  """The drafter of a method, one of `METHODS`.

  `store` is the store of the settings; None: it is opened if they have one.

  Raises:
    ValueError: the method is not known or does not fit the settings.
  """
  uses_draft, _ = settings_lib.method_of(method)
  if settings.inner not in (None, *settings_lib.INNERS):
    raise ValueError(
      f'inner={settings.inner} is not known; choose from {settings_lib.INNERS}'
    )
  if method == settings_lib.PLANNED:
    return make_planned(settings.plan, pair).usual[0]
  if method == 'plain':
    return drafter_lib.PLAIN
  inner = method
  if uses_draft:
    inner = settings.inner or _default_inner(settings, pair)
  if pair.drafting_model is None or not uses_draft:
    if uses_draft and (method not in ('tree', 'staged') or inner == 'none'):
      raise ValueError(
        f'method={method} with inner={inner} needs a draft; give draft= or'
        ' head=, or choose method=plain'
      )
    config = dataclasses.replace(
      settings.stage,
      rounds=settings.inner_rounds_alone,
      cost_ratio=0.0,
      calibration=settings.inner_stage.calibration,
    )
    return _one_stage(_tables(inner, settings, pair, store), config, settings)
  scorer = _model_scorer(pair, settings.draft_prompt)
  length = settings.num_draft_tokens
  if method == 'chain':
    return drafter_lib.fixed_drafter(scorer, topology_lib.chain(length))
  tree, config = settings.tree, settings.stage
  if isinstance(scorer, block_lib.BlockScorer):
    # Rounds after the first are look-ups.
    rounds = max(config.rounds, scorer.drafter.spec.depth)
    config = dataclasses.replace(config, rounds=rounds, cost_ratio=0.0)
  if method == 'tree':
    return _one_stage(scorer, config, settings)
  if inner == 'none':
    raise ValueError(
      f'method={method} with inner=none has nothing to stage; choose one of'
      f' {settings_lib.INNERS[1:]}, or method=tree'
    )
  if settings.topology is not None:
    raise ValueError(
      f'method={method} with topology=: a fixed topology leaves no room for the'
      ' candidates of an inner stage; leave it out, or choose method=tree'
    )
  if method == 'staged_chain':
    tree = dataclasses.replace(tree, num_nodes=length + 1, max_depth=length)
    config = dataclasses.replace(config, width=length + 1, branching=1)
  tables = drafter_lib.Stage(
    _tables(inner, settings, pair, store), settings.inner_stage
  )
  return drafter_lib.Drafter((drafter_lib.Stage(scorer, config), tables), tree)


@dataclasses.dataclass(frozen=True)
class Planned:
  """The drafters of all ways of a plan; a request takes one of them."""

  plan: plan_lib.Plan
  by_name: Mapping[str, drafter_lib.Drafter]

  def of_length(self, prompt_length: int) -> tuple[drafter_lib.Drafter, float]:
    """The drafter of a prompt and its `break_even`; see `plan.choose`."""
    way = plan_lib.choose(self.plan, prompt_length)
    return self.by_name[way.name], way.break_even

  @property
  def usual(self) -> tuple[drafter_lib.Drafter, float]:
    """`of_length` for a prompt like the usual samples of the plan."""
    return self.of_length(self.plan.usual_length)


def make_planned(
  plan: plan_lib.Plan | None,
  pair: pair_lib.Pair,
  store: text_store.TextStore | None = None,
) -> Planned:
  """The drafters of a plan; for the store see `make_drafter`.

  Raises:
    ValueError: there is no plan, or one of its methods does not fit the models.
  """
  if plan is None:
    raise ValueError('the method plan needs plan=, a specdec.Plan or its file')
  return Planned(
    plan,
    {
      way.name: make_drafter(way.method, pair, way.drafting, store)
      for way in plan.ways
    },
  )


def _break_even_of_lookups(
  pair: pair_lib.Pair, drafter: drafter_lib.Drafter, num_rows: int
) -> float | None:
  """The `break_even` of a drafter that only looks up; None: it is not known.

  Look-ups take no time, so it compares two forwards of the target: over all
  nodes of the trees, and over their roots alone.
  """
  if not (pair.row_cost and drafter.looks_up):
    return None
  time_of = lambda rows: 1 + pair.row_cost * (rows - 1)
  return time_of(num_rows * drafter.shape.num_nodes) / time_of(num_rows)


def of_batch(
  pair: pair_lib.Pair,
  drafter: drafter_lib.Drafter | Planned,
  options: decode_options.Options,
  num_rows: int,
  prompts: list[list[int]] | None = None,
) -> tuple[drafter_lib.Drafter, decode_options.Options]:
  """The drafter of a batch, and the options, with its `break_even` if unset.

  A plan chooses by the longest of the prompts, token ids; None: its usual way.
  """
  break_even: float | None
  if not isinstance(drafter, Planned):
    break_even = _break_even_of_lookups(pair, drafter, num_rows)
  elif prompts is None:
    drafter, break_even = drafter.usual
  else:
    drafter, break_even = drafter.of_length(max(map(len, prompts)))
  if options.get('break_even') is None:
    options = {**options, 'break_even': break_even}
  return drafter, options
