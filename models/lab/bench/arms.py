"""The arms of a benchmark: methods of this library, and servers of others.

An arm is written as `method(option=value,...):dtype`.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import re

from specdec import generation as generation_lib
from specdec import statistics as statistics_lib
from specdec.models.nn import matrices as matrices_lib
from specdec.models.text import settings as settings_lib

UNKNOWN = ('positions', 'reads', 'nodes_per_forward', 'relative_bandwidth')
"""Figures of `specdec.statistics` that need more than tokens and forwards."""


@dataclasses.dataclass(frozen=True)
class ArmSpec:
  """A method of decoding, with the options that differ from the common ones."""

  # One of `settings.METHODS`, or the address of a server.
  method: str
  dtype: str = ''  # The dtype of weights and cache; '': a server
  options: tuple[tuple[str, str], ...] = ()  # Pairs of name and value.

  @property
  def is_peer(self) -> bool:
    """Whether a server decodes, and not this process."""
    return self.method not in settings_lib.METHODS

  def __str__(self):
    if self.is_peer:
      return self.method
    listed = ','.join(f'{name}={value}' for name, value in self.options)
    return f'{self.method}{f"({listed})" if listed else ""}:{self.dtype}'


def as_generation(
  rows: Sequence[Sequence[int]], eos_ids: Sequence[int], forwards: int
) -> generation_lib.Generation:
  """The result of a peer, cut after EOS, without the figures of `UNKNOWN`.

  `forwards` counts target forwards, for all rows together.
  """
  tokens, reasons = list[list[int]](), list[str]()
  for row in rows:
    ends = [end for end, token in enumerate(row, 1) if token in eos_ids]
    tokens.append([*row[: ends[0] if ends else None]])
    reasons.append('eos' if ends else 'length')
  nothing = {'forwards': 0, 'slots': 0}
  return generation_lib.Generation(
    tokens=tokens,
    origins=[],
    labels=('target',),
    log_probs=None,
    finish_reasons=reasons,
    errors=[None] * len(tokens),
    stats=statistics_lib.Statistics(
      new_tokens=sum(map(len, tokens)),
      target_forwards=max(forwards, 0),
      stage_forwards={},
      positions={'target': 0},
      reads={'plain': nothing, 'target': nothing},
      costs={'target': {'per_forward': 0, 'per_slot': 0}},
    ),
  )


def _parse_options(arm: str, method: str, text: str) -> list[list]:
  """For each option, a list of pairs: its name and an alternative value."""
  parsed: dict[str, list] = {}
  names = settings_lib.METHODS[method].options
  for option in text.split(','):
    name, equals, values = option.partition('=')
    if name not in names or not equals:
      raise ValueError(
        f'arm {arm!r}: option {option!r} is not known; {method} has'
        f' {", ".join(names) or "none"}, each as name=value'
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
    methods, dtypes = (*settings_lib.METHODS,), matrices_lib.DTYPES
    if method not in methods or dtype not in dtypes:
      raise ValueError(
        f'arm {arm!r} is not known; it is method:dtype or'
        f' method(option=value):dtype, methods are {methods}, dtypes {dtypes};'
        ' other programs are servers: --peer=URL'
      )
    alternatives = _parse_options(arm, method, options) if options else []
    combinations = itertools.product(*alternatives)
    arms += [ArmSpec(method, dtype, chosen) for chosen in combinations]
  if not arms:
    raise ValueError('no arm is given; e.g. plain,staged')
  if len(set(arms)) < len(arms):
    raise ValueError(f'arms are repeated: {[str(arm) for arm in arms]}')
  return arms
