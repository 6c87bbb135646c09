"""The arms of a benchmark, by name: `method(option=value,...):dtype`."""

import itertools
import re

from specdec.models.lab.bench import peer as peer_lib
from specdec.models.nn import matrices as matrices_lib
from specdec.models.text import settings as settings_lib


def _parse_options(arm: str, method: str, text: str) -> list[list]:
  """For each option, a list of pairs: its name and an alternative value."""
  parsed: dict[str, list] = {}
  known = settings_lib.METHODS[method].options
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


def parse_arms(text: str, default_dtype: str) -> list[peer_lib.ArmSpec]:
  """Parses a list of arms, separated by commas.

  An arm is a method, then optionally options in parentheses, named as the
  flags, then optionally a dtype: `plain,tree(num_nodes=16,rounds=2):bfloat16`.
  Alternative values are separated by `|`; every combination is an arm.

  Raises:
    ValueError: a name is unknown or repeated; lists the choices.
  """
  arms: list[peer_lib.ArmSpec] = []
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
    arms += [peer_lib.ArmSpec(method, dtype, chosen) for chosen in combinations]
  if not arms:
    raise ValueError('no arm is given; e.g. plain,staged')
  if len(set(arms)) < len(arms):
    raise ValueError(f'arms are repeated: {[str(arm) for arm in arms]}')
  return arms
