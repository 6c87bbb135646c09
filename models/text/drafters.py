"""Drafters by name: what the flags of the decoding scripts stand for."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any
from typing import Protocol

from absl import logging

from models.text.pair import Pair
from models.text.pair import vocabulary_digest
from specdec.draft.candidates import CandidateScorer
from specdec.draft.drafter import Drafter
from specdec.draft.drafter import fixed_drafter
from specdec.draft.drafter import PLAIN
from specdec.draft.drafter import Stage
from specdec.draft.drafter import StageConfig
from specdec.draft.language_model import LanguageModelScorer
from specdec.draft.lookup import PromptLookup
from specdec.draft.ngram import NGram
from specdec.ngram.table import load_table
from specdec.tree.topology import chain
from specdec.tree.topology import k_ary
from specdec.tree.topology import load_topology
from specdec.tree.topology import Topology
from specdec.tree.topology import TreeShape

INNERS = ('none', 'ngram', 'lookup', 'ngram+lookup')
PLANNED = 'plan'
METHODS = (
  'plain',
  'chain',
  'tree',
  'staged_chain',
  'staged',
  *INNERS[1:],
  PLANNED,
)

DEMO_TABLE = pathlib.Path(__file__).parents[1] / 'demo' / 'ngram.safetensors'


_TREE = TreeShape(num_nodes=64, max_depth=16, capacity=512)
_STAGE = StageConfig(width=16, branching=8, rounds=4, calibration=1.2)
# Its forwards cost next to nothing.
_INNER_STAGE = StageConfig(width=8, branching=3, rounds=3, cost_ratio=0.0)
_LOOKUP = PromptLookup()


class Planned(Protocol):
  """A method and its settings; a `models.plan.Plan` is one."""

  @property
  def method(self) -> str: ...

  @property
  def drafting(self) -> 'DraftSettings': ...

  @property
  def min_block_efficiency(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings:
  """How to draft, whatever the method; the defaults are those of the flags.

  Attributes:
    num_draft_tokens: of a chain.
    tree: limits of the tree that grows best first.
    stage: the outermost stage.
    topology: a fixed shape of the tree instead of `tree`, and of the width,
      children and rounds of `stage`; or None.
    inner: one of `INNERS`, who guesses for the draft, or instead of it. None:
      n-gram and lookup; the embedded n-gram only if it was built with the
      tokenizer of the pair.
    inner_stage: the inner drafter, in a stage.
    inner_rounds_alone: of the inner drafter where there is no draft.
    ngram: `demo` or a file made by scripts/build_ngram.py.
    lookup: how prompt lookup matches.
    plan: what the method `plan` stands for; the others do not look at it.
  """

  num_draft_tokens: int = 4
  tree: TreeShape = _TREE
  stage: StageConfig = _STAGE
  topology: Topology | None = None
  inner: str | None = None
  inner_stage: StageConfig = _INNER_STAGE
  inner_rounds_alone: int = 8
  ngram: str = 'demo'
  lookup: PromptLookup = _LOOKUP
  plan: Planned | None = None


def planned_break_even(method: str, settings: DraftSettings) -> float | None:
  """As `specdec.generation.Options.break_even`; None where no plan says."""
  if method != PLANNED or settings.plan is None:
    return None
  return settings.plan.min_block_efficiency


def parse_topology(text: str) -> Topology:
  """`chain:4`, `k_ary:2x3` (2 children, 3 levels) or a topology file.

  Raises:
    ValueError: it is none of these.
  """
  kind, _, size = text.partition(':')
  try:
    if kind == 'chain':
      return chain(int(size))
    if kind == 'k_ary':
      branching, depth = size.split('x')
      return k_ary(int(branching), int(depth))
  except ValueError as error:
    raise ValueError(
      f'topology {text!r}: expected chain:4, k_ary:2x3 or a file ({error})'
    ) from error
  return load_topology(text)


_INNER_PREFIX = 'inner_'

# What each option is made of, where a text says what it is to be; the names are
# those of the flags.
OPTIONS: Mapping[str, Callable[[str], Any]] = {
  'num_draft_tokens': int,
  'num_nodes': int,
  'width': int,
  'branching': int,
  'rounds': int,
  'max_depth': int,
  'capacity': int,
  'calibration': float,
  'cost_ratio': float,
  'topology': parse_topology,
  'inner': str,
  'inner_width': int,
  'inner_branching': int,
  'inner_rounds': int,
  'inner_calibration': float,
  'inner_rounds_alone': int,
  'ngram': str,
}


def with_options(
  settings: DraftSettings, options: Mapping[str, Any]
) -> DraftSettings:
  """Settings with some of them changed.

  Args:
    settings: that the others are taken from.
    options: by their names in `OPTIONS`; the values as texts, or as they are.

  Raises:
    ValueError: a value cannot be used; names it.
  """
  own, tree, stage, inner = {}, {}, {}, {}
  names_of = lambda record: {one.name for one in dataclasses.fields(record)}
  fields, of_tree = names_of(DraftSettings), names_of(TreeShape)
  for name, value in options.items():
    if isinstance(value, str):
      try:
        value = OPTIONS[name](value)
      except ValueError as error:
        raise ValueError(f'{name}={value}: {error}') from error
    if name in fields:
      own[name] = value
    elif name.startswith(_INNER_PREFIX):
      inner[name.removeprefix(_INNER_PREFIX)] = value
    elif name in of_tree:
      tree[name] = value
    else:
      stage[name] = value
  if own.get('num_draft_tokens', 1) < 1:
    raise ValueError(
      f'num_draft_tokens must be at least 1, got {own["num_draft_tokens"]}'
    )
  own['tree'] = dataclasses.replace(settings.tree, **tree)
  own['stage'] = dataclasses.replace(settings.stage, **stage)
  try:
    own['inner_stage'] = dataclasses.replace(settings.inner_stage, **inner)
  except ValueError as error:
    raise ValueError(f'{_INNER_PREFIX}{error}') from error
  return dataclasses.replace(settings, **own)


def _table_path(settings: DraftSettings) -> str | pathlib.Path:
  return DEMO_TABLE if settings.ngram == 'demo' else settings.ngram


def _load_ngram(settings: DraftSettings, pair: Pair) -> NGram:
  """The table, if it was built with the tokenizer of the pair.

  Raises:
    ValueError: it was not, and would guess tokens that mean other text.
  """
  path = _table_path(settings)
  table, provenance = load_table(path)
  ours = pair.target.spec.vocab_size
  theirs = provenance.get('tokenizer_blake2b')
  if theirs is None:  # Nobody knows; another size is certain to be wrong.
    fits = table.vocab_size == ours
  else:
    # Of one tokenizer, sizes can only differ by padding.
    fits = theirs == vocabulary_digest(pair.tokenizer)
  if not fits:
    raise ValueError(
      f'the n-gram table {path} ({table.vocab_size} tokens) was built with'
      f' another tokenizer than that of the target ({ours} tokens); build one'
      ' with scripts/build_ngram.py, or choose --inner=lookup'
    )
  return NGram(table.replace(vocab_size=ours))


def _proposers(inner: str, settings: DraftSettings, pair: Pair) -> tuple:
  # A match in the text itself is the better evidence, so it comes first.
  proposers: list = []
  if 'lookup' in inner.split('+'):
    proposers.append(settings.lookup)
  if 'ngram' in inner.split('+'):
    proposers.append(_load_ngram(settings, pair))
  return tuple(proposers)


def _alone(inner: str, settings: DraftSettings, pair: Pair) -> Drafter:
  """A table or the text itself as the only drafter, costing next to nothing."""
  scorer = CandidateScorer(_proposers(inner, settings, pair))
  if settings.topology is not None:
    return fixed_drafter(
      scorer, settings.topology, calibration=settings.stage.calibration
    )
  config = dataclasses.replace(
    settings.stage,
    rounds=settings.inner_rounds_alone,
    cost_ratio=0.0,
    calibration=settings.inner_stage.calibration,
  )
  return Drafter((Stage(scorer, config),), settings.tree)


def _default_inner(settings: DraftSettings, pair: Pair) -> str:
  if settings.ngram != 'demo':
    return 'ngram+lookup'  # asked for; if it does not fit, it is refused
  try:
    _load_ngram(settings, pair)
  except ValueError:
    logging.log_first_n(
      logging.WARNING,
      'the embedded n-gram is for another tokenizer and is left out;'
      ' scripts/build_ngram.py makes one for yours',
      1,
    )
    return 'lookup'
  return 'ngram+lookup'


def make_drafter(method: str, pair: Pair, settings: DraftSettings) -> Drafter:
  """The drafter of a method.

  Args:
    method: one of `METHODS`.
    pair: the target and perhaps a draft.
    settings: see `DraftSettings`.

  Raises:
    ValueError: the method is not known or does not fit the settings.
  """
  if method not in METHODS or settings.inner not in (None, *INNERS):
    raise ValueError(
      f'method {method!r} with inner {settings.inner!r} is not known; methods'
      f' are {METHODS}, inner drafters {INNERS}'
    )
  if method == PLANNED:
    if settings.plan is None:
      raise ValueError('the method plan needs one; give --plan=auto or a file')
    return make_drafter(settings.plan.method, pair, settings.plan.drafting)
  if method == 'plain':
    return PLAIN
  if method in INNERS:
    return _alone(method, settings, pair)
  draft = pair.draft
  inner = settings.inner
  if inner is None:
    inner = _default_inner(settings, pair)
  if draft is None:
    if method in ('tree', 'staged') and inner != 'none':
      return _alone(inner, settings, pair)
    raise ValueError(
      f'--method={method} with --inner={inner} needs a draft; give --draft,'
      ' or plain'
    )
  scorer = LanguageModelScorer(draft)
  length = settings.num_draft_tokens
  if method == 'chain':
    return fixed_drafter(scorer, chain(length))
  if method == 'tree' and settings.topology is not None:
    return fixed_drafter(
      scorer, settings.topology, calibration=settings.stage.calibration
    )
  if method == 'tree':
    return Drafter((Stage(scorer, settings.stage),), settings.tree)
  if inner == 'none':
    raise ValueError(
      '--method=staged with --inner=none is --method=tree; choose one of'
      f' {INNERS[1:]}'
    )
  if settings.topology is not None:
    raise ValueError(
      '--topology leaves no room for the candidates of an inner stage; leave'
      ' out --topology, or choose --method=tree'
    )
  tree, config = settings.tree, settings.stage
  if method == 'staged_chain':
    tree = dataclasses.replace(tree, num_nodes=length + 1, max_depth=length)
    config = dataclasses.replace(config, width=length + 1, branching=1)
  inner_scorer = CandidateScorer(_proposers(inner, settings, pair))
  return Drafter(
    (Stage(scorer, config), Stage(inner_scorer, settings.inner_stage)), tree
  )
