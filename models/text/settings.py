"""The settings of drafting, which flags, arms and plans are made of.

`DraftSettings` and the records in it are the only list of settings. `OPTIONS`
has the fields of all of them by the names of their flags. As `choice`, this
module imports neither transformers nor Flax's modules.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import get_args
from typing import Literal
from typing import NamedTuple

import jax

from specdec.draft import drafter as drafter_lib
from specdec.draft import language_model
from specdec.draft import lookup as lookup_lib
from specdec.models.text import fields
from specdec.tree import topology as topology_lib

Inner = Literal['none', 'ngram', 'lookup', 'ngram+lookup', 'lookup+recycling']
INNERS: tuple[str, ...] = get_args(Inner)
PLANNED = 'plan'


def parse_topology(text: str) -> topology_lib.Topology:
  """Reads `chain:4`, `k_ary:2x3` (2 children, 3 levels) or a topology file.

  Raises:
    ValueError: the text is something else, or its numbers are out of range.
  """
  name, _, size = text.partition(':')
  try:
    if name == 'chain':
      return topology_lib.chain(int(size))
    if name == 'k_ary':
      branching, depth = size.split('x')
      return topology_lib.k_ary(int(branching), int(depth))
  except ValueError as error:
    raise ValueError(
      f'topology {text!r}: expected chain:4, k_ary:2x3 or a file ({error})'
    ) from error
  return topology_lib.load_topology(text)


@fields.documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings:
  """How to draft, for every method; the flags have the same defaults.

  `tree` limits a tree that grows best first, `stage` and `inner_stage` are for
  the draft model and the inner drafter, and `plan` is the `specdec.Plan` of the
  method `plan`. A `topology` replaces `tree` and the width, branching and
  rounds of `stage`.

  Raises:
    ValueError: a value is out of range; names it.
  """

  num_draft_tokens: int = topology_lib.setting(
    4,
    'tokens drafted per target forward, in a chain',
    high=topology_lib.LARGEST_DEPTH,
  )
  tree: topology_lib.TreeShape = fields.record(
    topology_lib.TreeShape(num_nodes=64, capacity=512), ''
  )
  stage: drafter_lib.StageConfig = fields.record(
    drafter_lib.StageConfig(width=16, branching=8, rounds=4, calibration=1.2),
    '',
  )
  draft_prompt: int | None = topology_lib.setting(
    None,
    'tokens of a prompt that the draft model reads, the last ones; default:'
    ' all',
    high=language_model.LARGEST_TAIL,
  )
  topology: topology_lib.Topology | None = fields.described(
    None,
    'fixed tree in place of one that grows: chain:4, k_ary:2x3 (children x'
    ' levels) or a JSON file of paths',
    parse=parse_topology,
  )
  inner: Inner | None = fields.described(
    None,
    'what drafts for the draft model (method staged), or in its place if there'
    ' is none; default: ngram+lookup if the n-gram has the vocabulary of the'
    ' target, else lookup, and without a draft lookup+recycling',
  )
  # The forwards of tables cost next to nothing.
  inner_stage: drafter_lib.StageConfig = fields.record(
    drafter_lib.StageConfig(width=8, branching=3, rounds=3, cost_ratio=0.0),
    'inner_',
  )
  inner_rounds_alone: int = topology_lib.setting(
    8,
    'levels that the inner drafter drafts without a draft model',
    high=topology_lib.LARGEST_DEPTH,
  )
  ngram: str = fields.described(
    'demo', 'demo (embedded) or a file made by build_ngram.py'
  )
  store: str | None = fields.described(
    None,
    'folder of earlier texts that lookup also searches; what is decoded is'
    ' added; made if need be; default: none',
  )
  lookup_confidence: tuple[float, ...] | None = fields.described(
    None,
    'probability that the text goes on as it did after a match of 1 token, 2'
    ' tokens and so on, separated by commas; 0: ignore such matches; default:'
    f' {",".join(map(str, lookup_lib.PromptLookup().confidence))}',
    parse=lambda text: tuple(map(float, text.split(','))),
  )
  plan: Any = None

  def __post_init__(self) -> None:
    topology_lib.check_settings(
      self, ('num_draft_tokens', 'draft_prompt', 'inner_rounds_alone')
    )
    _ = self.lookup

  @property
  def lookup(self) -> lookup_lib.PromptLookup:
    """The look-ups; ValueError if the confidence is out of range."""
    if self.lookup_confidence is None:
      return lookup_lib.PromptLookup()
    try:
      return lookup_lib.PromptLookup(self.lookup_confidence)
    except ValueError as error:
      raise ValueError(f'lookup_{error}') from error


ON_CPU: Mapping[str, int] = {'num_nodes': 8, 'width': 2, 'branching': 2}
"""Defaults on CPU, which verifies 8 tokens at the price of one, but not 64."""


def usual_options() -> dict[str, int]:
  """Options that have other defaults on this platform, by name."""
  return dict(ON_CPU) if jax.default_backend() == 'cpu' else {}


OPTIONS: Mapping[str, fields.Option] = fields.options_of(DraftSettings)
"""All settings that have a flag, by the name of the flag."""


class Method(NamedTuple):
  """The drafter and the options of a method of decoding."""

  uses_draft: bool  # Whether it has a draft model or a head.
  options: tuple[str, ...]  # Names in `OPTIONS`; others have no effect.


_INNER_OPTIONS = (
  *(name for name in OPTIONS if name.startswith('inner')),
  'ngram',
  'store',
  'lookup_confidence',
)
_STOPPING = ('rounds', 'calibration', 'cost_ratio')
_CHAIN = ('num_draft_tokens', 'draft_prompt')
_TREE = tuple(name for name in OPTIONS if name != 'num_draft_tokens')
_STAGED = tuple(name for name in _TREE if name != 'topology')
_TABLE = tuple(
  name for name in _TREE if name not in (*_STOPPING, 'draft_prompt')
)
METHODS: Mapping[str, Method] = {
  'plain': Method(uses_draft=False, options=()),
  'chain': Method(uses_draft=True, options=_CHAIN),
  'tree': Method(uses_draft=True, options=_TREE),
  'staged_chain': Method(
    uses_draft=True, options=(*_CHAIN, *_STOPPING, *_INNER_OPTIONS)
  ),
  'staged': Method(uses_draft=True, options=_STAGED),
  **dict.fromkeys(INNERS[1:], Method(uses_draft=False, options=_TABLE)),
  PLANNED: Method(uses_draft=True, options=()),
}
"""The methods by name; the last one takes others, as a plan says."""


def method_of(name: str) -> Method:
  """The method of a name; raises ValueError if there is none."""
  if name not in METHODS:
    raise ValueError(f'method={name} is not known; choose from {[*METHODS]}')
  return METHODS[name]


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
  outer = changes.pop('')
  for record, values in changes.items():
    try:
      outer[record] = dataclasses.replace(getattr(settings, record), **values)
    except ValueError as error:
      prefix = 'inner_' if record == 'inner_stage' else ''
      raise ValueError(f'{prefix}{error}') from error
  return dataclasses.replace(settings, **outer)
