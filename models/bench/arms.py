"""The arms of a benchmark, by name: `method(option=value,...):dtype`."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import re
from typing import Any

from models.bench import machine
from models.bench.machine import ModelSize
from models.nn.dtypes import DTYPES
from models.text.settings import DraftSettings
from models.text.settings import METHODS
from models.text.settings import OPTIONS
from specdec.model import LanguageModel
from specdec.sampling import Sampling
from specdec.study.timing import Arm

# Decoded by transformers with the same weights, see models/bench/peers.py.
PEER_METHODS = ('transformers', 'transformers-assisted', 'transformers-lookup')
PEER_DTYPES = ('float32', 'bfloat16')

_INNER = (*(name for name in OPTIONS if name.startswith('inner')), 'ngram')
_STOPPING = ('rounds', 'calibration', 'cost_ratio')
_TREE = tuple(
  name for name in OPTIONS if name not in (*_INNER, 'num_draft_tokens')
)
_TABLE = tuple(name for name in (*_TREE, *_INNER) if name not in _STOPPING)

# The options that each method uses. Others are refused, because they would
# silently have no effect.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
  'chain': ('num_draft_tokens',),
  'tree': (*_TREE, *_INNER),
  'staged': tuple(name for name in (*_TREE, *_INNER) if name != 'topology'),
  'staged_chain': ('num_draft_tokens', *_STOPPING, *_INNER),
  **dict.fromkeys(('ngram', 'lookup', 'ngram+lookup'), _TABLE),
  'transformers-assisted': (
    'num_assistant_tokens',
    'assistant_confidence_threshold',
  ),
  'transformers-lookup': ('prompt_lookup_num_tokens',),
}


@dataclasses.dataclass(frozen=True)
class ArmSpec:
  """A method of decoding, with the options that differ from the common ones."""

  method: str  # One of `models.text.settings.METHODS` or `PEER_METHODS`.
  dtype: str  # Of weights and cache.
  options: tuple[tuple[str, str], ...] = ()  # Pairs of name and value.

  @property
  def is_peer(self) -> bool:
    """Whether transformers decodes."""
    return self.method in PEER_METHODS

  def __str__(self):
    listed = ','.join(f'{name}={value}' for name, value in self.options)
    return f'{self.method}{f"({listed})" if listed else ""}:{self.dtype}'


def _parse_options(arm: str, method: str, text: str) -> list[list]:
  """For each option, a list of pairs: its name and an alternative value."""
  parsed: dict[str, list] = {}
  known = _OPTIONS.get(method, ())
  for option in text.split(','):
    name, equals, values = option.partition('=')
    if name not in known or not equals:
      raise ValueError(
        f'arm {arm!r}: option {option!r} is not known; {method} has'
        f' {", ".join(known) or "none"}, each as name=value'
      )
    if name in parsed:
      raise ValueError(f'arm {arm!r} has an option twice')
    parsed[name] = [(name, value) for value in values.split('|')]
  return list(parsed.values())


def parse_arms(text: str, default_dtype: str) -> list[ArmSpec]:
  """Parses a list of arms, separated by commas.

  An arm is a method, then optionally options in parentheses, named as the
  flags, then optionally a dtype: `plain,tree(num_nodes=16,rounds=2):bfloat16`.
  Alternative values are separated by `|`; every combination is an arm.

  Raises:
    ValueError: a name is unknown or repeated; lists the choices.
  """
  arms: list[ArmSpec] = []
  # Commas inside parentheses do not separate arms.
  for arm in filter(None, re.split(r',(?![^()]*\))', text)):
    match = re.fullmatch(r'([^():]*)(?:\(([^()]*)\))?(?::(.*))?', arm.strip())
    method, options, dtype = match.groups() if match else (arm, None, None)
    dtype = dtype or default_dtype
    methods = (*METHODS, *PEER_METHODS)
    if method not in methods or dtype not in DTYPES:
      raise ValueError(
        f'arm {arm!r} is not known; it is method:dtype or'
        f' method(option=value):dtype, methods are {methods}, dtypes {DTYPES}'
      )
    if method in PEER_METHODS and dtype not in PEER_DTYPES:
      raise ValueError(
        f'arm {arm!r}: transformers decodes in one of {PEER_DTYPES}; give one'
        f' of them, e.g. {method}:{PEER_DTYPES[0]}'
      )
    alternatives = _parse_options(arm, method, options) if options else []
    combinations = itertools.product(*alternatives)
    arms += [ArmSpec(method, dtype, chosen) for chosen in combinations]
  if not arms:
    raise ValueError('no arm is given; e.g. plain,staged')
  if len(set(arms)) < len(arms):
    raise ValueError(f'arms are repeated: {[str(arm) for arm in arms]}')
  return arms


def peer_arms(
  arms: Sequence[ArmSpec], *, has_draft: bool, batch_size: int
) -> list[ArmSpec]:
  """The arms of transformers that torch supports and that are not in `arms`.

  Assisted generation needs a draft, and as prompt lookup a batch size of 1.
  """
  possible = (True, has_draft and batch_size == 1, batch_size == 1)
  peers = [
    ArmSpec(method, dtype)
    for dtype in dict.fromkeys(arm.dtype for arm in arms)
    if dtype in PEER_DTYPES
    for method in itertools.compress(PEER_METHODS, possible)
  ]
  return [arm for arm in peers if arm not in arms]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """The decoding task that all arms share.

  Target, draft (None if no arm needs it), revision and `draft_dtype` (None: by
  the dtype of the arm) are those of `models.text.pair.load_pair`; `drafting` of
  `models.text.drafters.make_drafter`, but arms may differ from it; `sampling`,
  `max_new_tokens` and the entries `verify`, `children` and `break_even` of
  `verification` of `specdec.generate`.
  """

  target: str
  draft: str | None
  drafting: DraftSettings
  sampling: Sampling
  revision: str | None = None
  draft_dtype: str | None = None
  verification: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  seed: int = 0
  batch_size: int = 1
  max_new_tokens: int = 128


@dataclasses.dataclass(frozen=True)
class ReadyArm:
  """An arm with its models loaded.

  Attributes:
    decode: decodes a batch of prompts.
    sizes: of the target and of each stage that is a language model, by name.
    weight_bytes: of all weights and tables in memory.
    peak_beyond: see `models.bench.machine.peak_beyond`.
    models: the target and the drafting models, by name; none of a peer.
    num_nodes: N that a forward of the target verifies.
  """

  decode: Arm
  sizes: Mapping[str, ModelSize]
  weight_bytes: int
  peak_beyond: Callable[[Callable[[], Any]], int | None] = machine.peak_beyond
  models: Mapping[str, LanguageModel] = dataclasses.field(default_factory=dict)
  num_nodes: int = 1
