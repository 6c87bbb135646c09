"""The arms of a benchmark, by name: `method(option=value,...):dtype`."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import itertools
import re
from typing import Any

from specdec.models.checkpoints import hub
from specdec.models.lab.bench import llama_cpp
from specdec.models.lab.bench import peer as peer_lib
from specdec.models.lab.bench import transformers_peer
from specdec.models.lab.bench import vllm_peer
from specdec.models.nn import matrices as matrices_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import settings as settings_lib

PEERS: Mapping[str, peer_lib.Peer] = {
  'transformers': transformers_peer.Transformers(),
  'llama.cpp': llama_cpp.LlamaCpp(),
  'vllm': vllm_peer.Vllm(),
}
"""Other programs that decode the same weights, by name."""

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
  **{
    method: options
    for peer in PEERS.values()
    for method, options in peer.methods.items()
  },
}


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
    peer = next((p for p in PEERS.values() if method in p.methods), None)
    dtypes = peer.dtypes if peer else matrices_lib.DTYPES
    dtype = dtype or (dtypes[0] if len(dtypes) == 1 else default_dtype)
    others = [name for one in PEERS.values() for name in one.methods]
    methods = (*settings_lib.METHODS, *others)
    if method not in methods or dtype not in {*matrices_lib.DTYPES, *dtypes}:
      raise ValueError(
        f'arm {arm!r} is not known; it is method:dtype or'
        f' method(option=value):dtype, methods are {methods}, dtypes'
        f' {matrices_lib.DTYPES}'
      )
    if dtype not in dtypes:
      raise ValueError(
        f'arm {arm!r}: {peer_lib.ArmSpec(method, dtype).peer} decodes in one of'
        f' {dtypes}; give one of them, e.g. {method}:{dtypes[0]}'
      )
    alternatives = _parse_options(arm, method, options) if options else []
    combinations = itertools.product(*alternatives)
    arms += [peer_lib.ArmSpec(method, dtype, chosen) for chosen in combinations]
  if not arms:
    raise ValueError('no arm is given; e.g. plain,staged')
  if len(set(arms)) < len(arms):
    raise ValueError(f'arms are repeated: {[str(arm) for arm in arms]}')
  return arms


def peer_arms(
  name: str,
  arms: Sequence[peer_lib.ArmSpec],
  *,
  has_draft: bool,
  batch_size: int,
) -> list[peer_lib.ArmSpec]:
  """The possible arms of one of `PEERS` that are not in `arms`.

  They are in the dtypes of `arms` that the peer has, else in its first one.
  """
  peer = PEERS[name]
  dtypes = {arm.dtype: None for arm in arms if arm.dtype in peer.dtypes}
  possible = [
    peer_lib.ArmSpec(method, dtype)
    for dtype in dtypes or peer.dtypes[:1]
    for method in peer.methods
    if peer.can(method, has_draft=has_draft, batch_size=batch_size)
  ]
  return [arm for arm in possible if arm not in arms]


def _load(
  peer: peer_lib.Peer, models: choice_lib.ModelChoice, flag: str, dtype: str
) -> Any:
  """The model of a flag, `target` or `draft`."""
  name, revision = getattr(models, flag), models.revision
  if flag == 'draft':
    name, revision = hub.draft_name(name), None
  found = hub.locate(name, revision=revision)
  return peer.load(found, f'--{flag}={name}', dtype)


def make_peer_arms(
  specs: Sequence[peer_lib.ArmSpec],
  task: peer_lib.BenchmarkTask,
  eos_ids: Sequence[int],
) -> dict[peer_lib.ArmSpec, peer_lib.ReadyArm]:
  """Loads the arms of peers, each model once per dtype.

  Raises:
    ValueError: a program is missing, or an arm is not supported.
  """
  found = dict[peer_lib.ArmSpec, peer_lib.ReadyArm]()
  for name, peer in PEERS.items():
    chosen = [spec for spec in specs if spec.peer == name]
    for spec in chosen:
      if spec.method in peer.drafted and task.models.draft is None:
        raise ValueError(f'arm {str(spec)!r} needs a draft; give --draft')
      if task.batch_size > 1 and spec.method not in peer.batched:
        raise ValueError(
          f'arm {str(spec)!r} decodes one prompt at a time, not'
          f' {task.batch_size}; leave out the arm or --batch_size'
        )
      for field in peer.lacks:
        if getattr(task.sampling, field) is not None:
          raise ValueError(f'{name} arms have no --{field}; leave it out')
    # Even a draft that is the target, whose forwards are counted separately.
    load = functools.cache(functools.partial(_load, peer, task.models))
    for spec in chosen:
      models = {'target': load('target', spec.dtype)}
      if spec.method in peer.drafted:
        models['draft'] = load('draft', spec.dtype)
      arm = peer.make_arm(spec, task, models, eos_ids)
      found[spec] = peer_lib.ReadyArm(arm)
  return found
