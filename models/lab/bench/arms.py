"""The arms of a benchmark, by name: `method(option=value,...):dtype`."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import re

from models.lab import task as task_lib
from models.lab.bench import timing
from models.nn import matrices as matrices_lib
from models.text import settings as settings_lib

PEERS = ('transformers', 'llama.cpp')
"""Other programs that decode the same weights, see `peers` and `llama_cpp`."""
PEER_METHODS = (
  *('transformers', 'transformers-assisted', 'transformers-lookup'),
  *('llama.cpp', 'llama.cpp-draft', 'llama.cpp-lookup'),
)
UNKNOWN_OF_PEERS = (
  *('positions', 'reads', 'nodes_per_forward', 'relative_bandwidth'),
)
"""Figures of `specdec.statistics` that need more than tokens and forwards."""

# The dtypes of llama.cpp are those of the GGUF file.
_PEER_DTYPES = {
  'transformers': ('float32', 'bfloat16'),
  'llama.cpp': ('gguf',),
}

_INNER = (
  *(name for name in settings_lib.OPTIONS if name.startswith('inner')),
  'ngram',
)
_STOPPING = ('rounds', 'calibration', 'cost_ratio')
_CHAIN = ('num_draft_tokens', 'draft_prompt')
_TREE = tuple(
  name
  for name in settings_lib.OPTIONS
  if name not in (*_INNER, 'num_draft_tokens')
)
_TABLE = tuple(
  name for name in (*_TREE, *_INNER) if name not in (*_STOPPING, 'draft_prompt')
)

# The options that each method uses. Others are refused, because they would
# silently have no effect.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
  'chain': _CHAIN,
  'tree': (*_TREE, *_INNER),
  'staged': tuple(name for name in (*_TREE, *_INNER) if name != 'topology'),
  'staged_chain': (*_CHAIN, *_STOPPING, *_INNER),
  **dict.fromkeys(('ngram', 'lookup', 'ngram+lookup'), _TABLE),
  'transformers-assisted': (
    'num_assistant_tokens',
    'assistant_confidence_threshold',
  ),
  'transformers-lookup': ('prompt_lookup_num_tokens',),
  # Flags of llama-server.
  'llama.cpp-draft': ('spec_draft_n_max', 'spec_draft_p_min'),
  'llama.cpp-lookup': (
    'spec_type',
    'spec_ngram_simple_size_n',
    'spec_ngram_simple_size_m',
  ),
}


@dataclasses.dataclass(frozen=True)
class ArmSpec:
  """A method of decoding, with the options that differ from the common ones."""

  method: str  # One of `models.text.settings.METHODS` or `PEER_METHODS`.
  dtype: str  # Weights and cache have it; `gguf` for llama.cpp.
  options: tuple[tuple[str, str], ...] = ()  # Pairs of name and value.

  @property
  def peer(self) -> str | None:
    """Which of `PEERS` decodes; None if this library does."""
    return next((peer for peer in PEERS if self.method.startswith(peer)), None)

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
    peer = ArmSpec(method, '').peer
    dtypes = _PEER_DTYPES[peer] if peer else matrices_lib.DTYPES
    dtype = dtype or ('gguf' if peer == 'llama.cpp' else default_dtype)
    methods = (*settings_lib.METHODS, *PEER_METHODS)
    if method not in methods or dtype not in {*matrices_lib.DTYPES, *dtypes}:
      raise ValueError(
        f'arm {arm!r} is not known; it is method:dtype or'
        f' method(option=value):dtype, methods are {methods}, dtypes'
        f' {matrices_lib.DTYPES}'
      )
    if dtype not in dtypes:
      raise ValueError(
        f'arm {arm!r}: {peer} decodes in one of {dtypes}; give one of them,'
        f' e.g. {method}:{dtypes[0]}'
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
  peer: str, arms: Sequence[ArmSpec], *, has_draft: bool, batch_size: int
) -> list[ArmSpec]:
  """The possible arms of one of `PEERS` that are not in `arms`.

  Those of transformers are in the dtypes of `arms`. Speculation with a draft
  model needs a draft, and as prompt lookup a batch size of 1, as all of
  llama.cpp does.
  """
  methods = [name for name in PEER_METHODS if name.startswith(peer)]
  alone = batch_size == 1
  possible = (alone or peer != 'llama.cpp', has_draft and alone, alone)
  dtypes = {arm.dtype: None for arm in arms if arm.dtype in _PEER_DTYPES[peer]}
  peers = [
    ArmSpec(method, dtype)
    for dtype in dtypes or _PEER_DTYPES[peer][:1]
    for method in itertools.compress(methods, possible)
  ]
  return [arm for arm in peers if arm not in arms]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkTask(task_lib.Task):
  """The task of all arms.

  Attributes:
    llama_cpp: the folder of `llama-server`; None: it is on the path.
  """

  llama_cpp: str | None = None


@dataclasses.dataclass(frozen=True)
class ReadyArm:
  """An arm with its models loaded.

  Attributes:
    decode: decodes a batch of prompts.
    weight_bytes: of all weights and tables in memory; None for a peer, of which
      tokens, times and forwards are known alone.
  """

  decode: timing.Arm
  weight_bytes: int | None = None
