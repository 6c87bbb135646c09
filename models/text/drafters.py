"""Drafters by name, and the settings that flags, arms and plans are made of.

`DraftSettings` and the records in it are the only list of settings. `OPTIONS`
has the fields of all of them by the names of their flags.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any
from typing import get_args
from typing import Literal

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
from specdec.tree.topology import setting
from specdec.tree.topology import Topology
from specdec.tree.topology import TreeShape

Inner = Literal['none', 'ngram', 'lookup', 'ngram+lookup']
INNERS: tuple[str, ...] = get_args(Inner)
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


def parse_topology(text: str) -> Topology:
  """Reads `chain:4`, `k_ary:2x3` (2 children, 3 levels) or a topology file.

  Raises:
    ValueError: the text is none of these.
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


def _record(default: Any, prefix: str) -> Any:
  """A field whose own fields are options, under their names with a prefix."""
  return dataclasses.field(default=default, metadata={'prefix': prefix})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings:
  """How to draft, for every method; the defaults are those of the flags.

  Most fields have a help text. Of the others, `tree` limits a tree that grows
  best first, `stage` and `inner_stage` are for the draft model and the inner
  drafter, and `plan` is the `models.Plan` of the method `plan`. A `topology`
  replaces `tree` and the width, branching and rounds of `stage`.

  Raises:
    ValueError: a value is out of range; names it.
  """

  num_draft_tokens: int = setting(
    4, 'tokens drafted per target forward, in a chain'
  )
  tree: TreeShape = _record(TreeShape(num_nodes=64, capacity=512), '')
  stage: StageConfig = _record(
    StageConfig(width=16, branching=8, rounds=4, calibration=1.2), ''
  )
  topology: Topology | None = setting(
    None,
    'fixed tree in place of one that grows: chain:4, k_ary:2x3 (children x'
    ' levels) or a JSON file of paths',
  )
  inner: Inner | None = setting(
    None,
    'what drafts for the draft model (--method=staged), or in its place'
    ' (--draft=none); default: ngram+lookup if the n-gram has the vocabulary of'
    ' the target, else lookup',
  )
  # The forwards of tables cost next to nothing.
  inner_stage: StageConfig = _record(
    StageConfig(width=8, branching=3, rounds=3, cost_ratio=0.0), 'inner_'
  )
  inner_rounds_alone: int = setting(
    8, 'levels that --inner drafts without a draft model'
  )
  ngram: str = setting(
    'demo', 'demo (embedded) or a file made by build_ngram.py'
  )
  lookup: PromptLookup = PromptLookup()
  plan: Any = None

  def __post_init__(self):
    for name in ('num_draft_tokens', 'inner_rounds_alone'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} must be at least 1, got {getattr(self, name)}'
        )


@dataclasses.dataclass(frozen=True)
class Option:
  """A setting that has a flag."""

  record: str  # The field of `DraftSettings` that holds it; '' if it is one.
  field: dataclasses.Field  # Its name, type and help text.

  @property
  def kind(self) -> Any:
    """The type of its values other than None."""
    kinds = get_args(self.field.type)
    return kinds[0] if type(None) in kinds else self.field.type

  def read(self, settings: DraftSettings) -> Any:
    """Its value in the settings."""
    record = getattr(settings, self.record) if self.record else settings
    return getattr(record, self.field.name)

  def parse(self, text: str) -> Any:
    """Its value from a text; ValueError if the text is not of its kind."""
    parsers: dict[Any, Any] = {Topology: parse_topology, Inner: str}
    return parsers.get(self.kind, self.kind)(text)


def _options() -> dict[str, Option]:
  found, defaults = {}, DraftSettings()
  for field in dataclasses.fields(defaults):
    if 'help' in field.metadata:
      found[field.name] = Option('', field)
    elif 'prefix' in field.metadata:
      for part in dataclasses.fields(getattr(defaults, field.name)):
        name = field.metadata['prefix'] + part.name
        found[name] = Option(field.name, part)
  return found


OPTIONS: Mapping[str, Option] = _options()
"""All settings that have a flag, by the name of the flag."""


def with_options(
  settings: DraftSettings, options: Mapping[str, Any]
) -> DraftSettings:
  """Settings with new values by their names in `OPTIONS`; texts are parsed.

  Raises:
    ValueError: a value cannot be used; names the option.
  """
  changes: dict[str, dict[str, Any]] = {'': {}}
  for name, value in options.items():
    option = OPTIONS[name]
    if isinstance(value, str):
      try:
        value = option.parse(value)
      except ValueError as error:
        raise ValueError(f'{name}={value}: {error}') from error
    changes.setdefault(option.record, {})[option.field.name] = value
  own = changes.pop('')
  for record, values in changes.items():
    try:
      own[record] = dataclasses.replace(getattr(settings, record), **values)
    except ValueError as error:
      prefix = 'inner_' if record == 'inner_stage' else ''
      raise ValueError(f'{prefix}{error}') from error
  return dataclasses.replace(settings, **own)


def planned_break_even(method: str, settings: DraftSettings) -> float | None:
  """The `break_even` of a method: that of its plan, else None."""
  if method != PLANNED or settings.plan is None:
    return None
  return settings.plan.min_block_efficiency


def _load_ngram(settings: DraftSettings, pair: Pair) -> NGram:
  """The n-gram table; ValueError if it was built with another tokenizer."""
  path = DEMO_TABLE if settings.ngram == 'demo' else settings.ngram
  table, provenance = load_table(path)
  ours = pair.target.spec.vocab_size
  theirs = provenance.get('tokenizer_blake2b')
  if theirs is None:  # Without a digest only the size can be compared.
    fits = table.vocab_size == ours
  else:
    # Sizes of one tokenizer can only differ by padding.
    fits = theirs == vocabulary_digest(pair.tokenizer)
  if not fits:
    raise ValueError(
      f'the n-gram table {path} ({table.vocab_size} tokens) was built with'
      f' another tokenizer than that of the target ({ours} tokens); build one'
      ' with scripts/build_ngram.py, or choose --inner=lookup'
    )
  return NGram(table.replace(vocab_size=ours))


def _default_inner(settings: DraftSettings, pair: Pair) -> str:
  if settings.ngram != 'demo':
    return 'ngram+lookup'  # A chosen table that does not fit is refused.
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


def _tables(inner: str, settings: DraftSettings, pair: Pair) -> CandidateScorer:
  # A match in the text itself is the better evidence, so it comes first.
  proposers: list = []
  if 'lookup' in inner.split('+'):
    proposers.append(settings.lookup)
  if 'ngram' in inner.split('+'):
    proposers.append(_load_ngram(settings, pair))
  return CandidateScorer(tuple(proposers))


def _one_stage(
  scorer: Any, config: StageConfig, settings: DraftSettings
) -> Drafter:
  if settings.topology is None:
    return Drafter((Stage(scorer, config),), settings.tree)
  return fixed_drafter(
    scorer, settings.topology, calibration=settings.stage.calibration
  )


def _alone(inner: str, settings: DraftSettings, pair: Pair) -> Drafter:
  """N-gram or prompt lookup as the only drafter, without a draft model."""
  config = dataclasses.replace(
    settings.stage,
    rounds=settings.inner_rounds_alone,
    cost_ratio=0.0,
    calibration=settings.inner_stage.calibration,
  )
  return _one_stage(_tables(inner, settings, pair), config, settings)


def make_drafter(method: str, pair: Pair, settings: DraftSettings) -> Drafter:
  """The drafter of a method, one of `METHODS`.

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
  inner = settings.inner or _default_inner(settings, pair)
  if pair.draft is None:
    if method in ('tree', 'staged') and inner != 'none':
      return _alone(inner, settings, pair)
    raise ValueError(
      f'--method={method} with --inner={inner} needs a draft; give --draft,'
      ' or plain'
    )
  scorer = LanguageModelScorer(pair.draft)
  length = settings.num_draft_tokens
  if method == 'chain':
    return fixed_drafter(scorer, chain(length))
  tree, config = settings.tree, settings.stage
  if method == 'tree':
    return _one_stage(scorer, config, settings)
  if inner == 'none':
    raise ValueError(
      f'--method={method} with --inner=none has nothing to stage; choose one of'
      f' {INNERS[1:]}, or --method=tree'
    )
  if settings.topology is not None:
    raise ValueError(
      '--topology: a fixed topology leaves no room for the candidates of an'
      ' inner stage; leave it out, or choose --method=tree'
    )
  if method == 'staged_chain':
    tree = dataclasses.replace(tree, num_nodes=length + 1, max_depth=length)
    config = dataclasses.replace(config, width=length + 1, branching=1)
  tables = Stage(_tables(inner, settings, pair), settings.inner_stage)
  return Drafter((Stage(scorer, config), tables), tree)
