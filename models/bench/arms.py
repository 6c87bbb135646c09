"""Names of what a benchmark compares: `method(option=value,...):dtype`."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import re
from typing import Any

from models.bench import machine as peak_memory
from models.bench.machine import ModelSize
from models.checkpoints.hub import DTYPES
from models.text.drafters import METHODS
from models.text.drafters import OPTIONS
from specdec.study.timing import Arm

# What transformers on torch can do with the same weights (models/peers.py).
PEER_METHODS = (
  'transformers',
  'transformers-assisted',
  'transformers-lookup',
)
PEER_DTYPES = ('float32', 'bfloat16')

_INNER = tuple(name for name in OPTIONS if name.startswith('inner')) + (
  'ngram',
)
_GROWTH = ('calibration', 'cost_ratio', 'min_gain')
_SHAPE = ('num_nodes', 'width', 'branching', 'max_depth', 'capacity')
_ALONE = (*_SHAPE, 'min_gain', 'topology', *_INNER)

# What makes a difference to each method; an option that makes none is a mistake
# that would go unseen.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
  'chain': ('num_draft_tokens',),
  'tree': (*_SHAPE, 'rounds', *_GROWTH, 'topology', *_INNER),
  'staged': (*_SHAPE, 'rounds', *_GROWTH, *_INNER),
  'staged_chain': ('num_draft_tokens', 'rounds', *_GROWTH, *_INNER),
  'ngram': _ALONE,
  'lookup': _ALONE,
  'ngram+lookup': _ALONE,
  'transformers-assisted': (
    'num_assistant_tokens',
    'assistant_confidence_threshold',
  ),
  'transformers-lookup': ('prompt_lookup_num_tokens',),
}


@dataclasses.dataclass(frozen=True)
class ArmSpec:
  """One way of decoding.

  Attributes:
    method: one of `models.drafters.METHODS` or `PEER_METHODS`.
    dtype: of weights and cache.
    options: names and values, where they differ from the common settings.
  """

  method: str
  dtype: str
  options: tuple[tuple[str, str], ...] = ()

  @property
  def is_peer(self) -> bool:
    """Whether it is decoded by another library."""
    return self.method in PEER_METHODS

  def __str__(self):
    listed = ','.join(f'{name}={value}' for name, value in self.options)
    return f'{self.method}{f"({listed})" if listed else ""}:{self.dtype}'


def _split(text: str) -> list[str]:
  """At the commas that are not in parentheses."""
  return [one for one in re.split(r',(?![^()]*\))', text) if one]


def _parse_options(arm: str, method: str, text: str) -> list[list]:
  """Of each option, its name with each of its alternatives."""
  parsed = []
  known = _OPTIONS.get(method, ())
  for option in text.split(','):
    name, equals, values = option.partition('=')
    if name not in known or not equals:
      raise ValueError(
        f'arm {arm!r}: option {option!r} is not known; {method} has'
        f' {", ".join(known) or "none"}, each as name=value'
      )
    parsed.append([(name, value) for value in values.split('|')])
  names = [alternatives[0][0] for alternatives in parsed]
  if len(set(names)) < len(names):
    raise ValueError(f'arm {arm!r} has an option twice')
  return parsed


def parse_arms(text: str, default_dtype: str) -> list[ArmSpec]:
  """Parses a list of arms.

  Args:
    text: arms separated by commas. An arm is a method, then perhaps options in
      parentheses, whose names are those of the flags, then perhaps a dtype:
      `plain,tree(num_nodes=16,rounds=2):bfloat16`. Alternatives are separated
      by `|` and give an arm each, in all combinations:
      `tree(num_nodes=8|16,rounds=2|4)` are four.
    default_dtype: of arms that name none.

  Returns:
    The arms, in their order.

  Raises:
    ValueError: something is not known or there twice; lists the choices.
  """
  arms: list[ArmSpec] = []
  for arm in _split(text):
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
    arms += [
      ArmSpec(method, dtype, chosen)
      for chosen in itertools.product(*alternatives)
    ]
  if not arms:
    raise ValueError('no arm is given; e.g. plain,staged')
  if len(set(arms)) < len(arms):
    raise ValueError(f'arms are repeated: {[str(arm) for arm in arms]}')
  return arms


def peer_arms(
  arms: Sequence[ArmSpec], *, has_draft: bool, batch_size: int
) -> list[ArmSpec]:
  """What transformers can do of the same, in those dtypes that torch has.

  Args:
    arms: none of these is repeated.
    has_draft: whether there is an assistant model.
    batch_size: assisted generation and prompt lookup need 1.
  """
  possible = {
    'transformers': True,
    'transformers-assisted': has_draft and batch_size == 1,
    'transformers-lookup': batch_size == 1,
  }
  dtypes = list(dict.fromkeys(arm.dtype for arm in arms))
  every = [
    ArmSpec(method, dtype)
    for dtype in dtypes
    if dtype in PEER_DTYPES
    for method in PEER_METHODS
    if possible[method]
  ]
  return [arm for arm in every if arm not in arms]


@dataclasses.dataclass(frozen=True)
class ReadyArm:
  """An arm with its models loaded.

  Attributes:
    decode: how it decodes a batch.
    sizes: of its target and of each of its stages that is a language model.
    weight_bytes: of all that it needs in memory before it begins.
    peak_beyond: of a call, see `models.peak_memory.peak_beyond`.
  """

  decode: Arm
  sizes: Mapping[str, ModelSize]
  weight_bytes: int
  peak_beyond: Callable[[Callable[[], Any]], int | None] = (
    peak_memory.peak_beyond
  )
