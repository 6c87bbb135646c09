"""Plans: the fastest ways to decode with given models on a given machine.

A plan is a small JSON file, made by scripts/tune.py and read by
`specdec.load(plan=...)` and by `--plan` of the decoding scripts. It has a few
ways of decoding and what they cost. Each request is decoded in the way that is
expected to take the least time (`choose`).
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from specdec import arguments as arguments_lib
from specdec.draft import lookup as lookup_lib
from specdec.models import user_cache
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import sources as sources_lib
from specdec.text import text_files
from specdec.text import whole_files
from specdec.tree import topology as topology_lib

SCHEMA = 4

_SAMPLE_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """The models, machine and options that a plan was made for.

  A plan for other models is refused, other differences give `warnings`.
  """

  models: dict[str, str | None]  # Digests of target, vocabulary, what drafts.
  machine: dict[str, Any]  # See `record.describe_machine`.
  dtype: str  # The target's.
  draft_dtype: str
  draft_vocab: int | None = None  # How many tokens the draft proposes, or all.
  batch_size: int
  sampling: dict[str, Any]  # The sampling options that are set.
  cpu_kernels: bool = False  # Whether those of `models/nn/cpu` were used.
  mesh: str = ''  # Axes of the mesh, and where the draft lies on it.

  def warnings(self, other: 'Context') -> list[str]:
    """The differences that make a plan for `other` less reliable here."""
    here, there = self._compared(), other._compared()
    return [
      f'{name} is {value}, the plan is for {there[name]}'
      for name, value in here.items()
      if value != there[name]
    ]

  def _compared(self) -> dict[str, Any]:
    machine = ('device', 'processor', 'cores')
    facts = {name: self.machine.get(name) for name in machine} | vars(self)
    del facts['models'], facts['machine']
    return facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """A method of decoding and its settings.

  `name` is unique in a plan, `method` one of `settings.METHODS`.
  """

  name: str
  method: str
  drafting: settings_lib.DraftSettings

  @property
  def uses_draft(self) -> bool:
    """Whether the method has a draft model."""
    return self.method not in ('plain', *settings_lib.INNERS[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way(Candidate):
  """A way of decoding that a request may be given.

  Times are those of batches, by the padded length of the longest prompt.

  Attributes:
    min_block_efficiency: the time of a step, in steps of plain decoding. With
      fewer tokens per step the method is slower than plain decoding.
    reading_seconds: the time in which the target and a draft read a prompt.
    new_token_seconds: the time after the prompt, per new token of a row, when
      all rows of a batch go on.
  """

  min_block_efficiency: float
  reading_seconds: dict[int, float]
  new_token_seconds: dict[int, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Ways of decoding, from which a request chooses one.

  Attributes:
    ways: at least one; the first is chosen among ways that take as long.
    context: what the plan was made for.
    ends_per_token: the share of the new tokens of the samples that ended a
      text, from 0 to 1.
    prompt_length: of the longest sample of the usual length, in tokens.
    new_tokens: the limit of the samples.
    candidates: the figures of all candidates, fastest first.
  """

  ways: tuple[Way, ...]
  context: Context
  ends_per_token: float
  prompt_length: int
  new_tokens: int
  candidates: tuple[dict[str, Any], ...] = ()

  @property
  def usual(self) -> Way:
    """The way of a request like the usual samples."""
    return choose(self, self.prompt_length, self.new_tokens)

  @property
  def uses_draft(self) -> bool:
    """Whether any of its methods has a draft model."""
    return any(way.uses_draft for way in self.ways)

  def check_models(self, models: Mapping[str, str | None]) -> None:
    """Raises ValueError if the digests of the models in use are others."""
    for name, digest in self.context.models.items():
      if name in ('draft', 'head') and not self.uses_draft:
        continue
      if models.get(name) != digest:
        raise ValueError(
          f'the plan was made for another {name} ({digest}, here'
          f' {models.get(name)}); make one for these models with'
          ' scripts/tune.py'
        )

  def to_json(self) -> str:
    """The plan as JSON; of the settings, those that are not the defaults."""
    ways = {
      way.name: vars(way) | {'drafting': _to_record(way.drafting)}
      for way in self.ways
    }
    for way in ways.values():
      del way['name']
    record = {'schema': SCHEMA} | vars(self)
    record |= {'ways': ways, 'context': dataclasses.asdict(self.context)}
    sealed = whole_files.sealed_record(record)
    return text_files.to_json(sealed, indent=1) + '\n'

  def save(self, path: pathlib.Path) -> None:
    """Writes the file atomically; missing folders are made."""
    whole_files.write_text(path, self.to_json())


def seconds_at(seconds: Mapping[int, float], length: int) -> float:
  """The seconds of a length, interpolated; beyond the ends as at the ends."""
  lengths = sorted(seconds)
  return float(np.interp(length, lengths, [seconds[one] for one in lengths]))


def expected_seconds(
  plan: Plan, way: Way, prompt_length: int, new_tokens: int
) -> float:
  """The time in which a request is expected to be decoded.

  It is that of reading the prompt, with its padding, and of the new tokens.
  More tokens of a prompt than were measured take as long as the last of these.

  Args:
    plan: says when texts end.
    way: has the costs.
    prompt_length: tokens of the longest prompt of a batch.
    new_tokens: the largest limit of its rows. A text is expected to end earlier
      as often as those of the samples did.
  """
  length, ends = arguments_lib.padded_length(prompt_length), plan.ends_per_token
  tokens = (1 - (1 - ends) ** new_tokens) / ends if ends else new_tokens
  known = {0: 0.0} | way.reading_seconds
  *_, before, last = sorted(known)
  slope = max(known[last] - known[before], 0.0) / (last - before)
  reading = seconds_at(known, length) + slope * max(length - last, 0)
  return reading + tokens * seconds_at(way.new_token_seconds, length)


def choose(plan: Plan, prompt_length: int, new_tokens: int) -> Way:
  """The way in which a request is expected to take the least time.

  Prompts that are padded to one length have one way, and no program of their
  own. The arguments are those of `expected_seconds`.
  """
  return min(
    plan.ways,
    key=lambda way: expected_seconds(plan, way, prompt_length, new_tokens),
  )


def _to_record(settings: settings_lib.DraftSettings) -> dict[str, Any]:
  """The settings that are not the defaults, by their names in `OPTIONS`."""
  usual = settings_lib.DraftSettings()
  record = {
    name: option.read(settings)
    for name, option in settings_lib.OPTIONS.items()
    if option.read(settings) != option.read(usual)
  }
  if settings.topology is not None:
    record['topology'] = settings.topology.paths
  if settings.lookup != usual.lookup:
    record['lookup'] = vars(settings.lookup)
  return record


def _kinds_of(record: Any, **others: Any) -> dict[str, Any]:
  """The types of the fields of a dataclass, in JSON."""
  return {one.name: one.type for one in dataclasses.fields(record)} | others


_KINDS = _kinds_of(
  Plan,
  schema=int,
  ways=dict[str, dict[str, Any]],
  context=dict,
  candidates=list[dict[str, Any]],
)
_TIMES = ('reading_seconds', 'new_token_seconds')
_KINDS_OF_WAY = _kinds_of(Way, drafting=dict) | dict.fromkeys(
  _TIMES, dict[str, float]
)
del _KINDS_OF_WAY['name']
_KINDS_OF_CONTEXT = _kinds_of(Context)
_KINDS_OF_DRAFTING = {
  name: option.field.type for name, option in settings_lib.OPTIONS.items()
} | {'topology': list[list[int]], 'lookup': dict}
_KINDS_OF_LOOKUP = {'confidence': list[float], 'num_matches': int}


def _checked(
  record: dict[str, Any],
  kinds: Mapping[str, Any],
  place: str = '',
  needed: Iterable[str] = (),
) -> dict[str, Any]:
  """A part of a plan; ValueError names keys that are unknown, lack or wrong."""
  if unknown := sorted(record.keys() - kinds.keys()):
    raise ValueError(f'{place}{unknown[0]} is not known')
  if missing := [key for key in needed if key not in record]:
    raise ValueError(f'it lacks the entry {place}{missing[0]}')
  text_files.check_types(record, kinds, place)
  return record


def _way_from(name: str, record: dict[str, Any]) -> Way:
  """A way from its JSON object."""
  place = f'ways.{name}.'
  _checked(record, _KINDS_OF_WAY, place, needed=_KINDS_OF_WAY)
  if not record['min_block_efficiency'] > 0:
    raise ValueError(
      f'{place}min_block_efficiency must be positive, got'
      f' {record["min_block_efficiency"]}'
    )
  if record['method'] not in settings_lib.METHODS[:-1]:  # Without `plan`.
    raise ValueError(f'{place}method {record["method"]!r} is not known')
  changes: dict[str, Any] = {
    'drafting': _from_record(record['drafting'], f'{place}drafting.')
  }
  for key in _TIMES:
    times = record[key].items()
    right = all(n.isdecimal() and int(n) and t > 0 for n, t in times)
    if not times or not right:
      raise ValueError(
        f'{place}{key} must have positive seconds by length, got {record[key]}'
      )
    changes[key] = {int(length): seconds for length, seconds in times}
  return Way(name=name, **record | changes)


def _from_record(
  record: dict[str, Any], place: str
) -> settings_lib.DraftSettings:
  """The inverse of `_to_record`."""
  _checked(record, _KINDS_OF_DRAFTING, place)
  lookup, paths = record.pop('lookup', {}), record.pop('topology', None)
  _checked(lookup, _KINDS_OF_LOOKUP, f'{place}lookup.')
  if 'confidence' in lookup:
    lookup['confidence'] = tuple(lookup['confidence'])
  if paths is not None:
    record['topology'] = topology_lib.from_paths(paths)
  settings = settings_lib.with_options(settings_lib.DraftSettings(), record)
  return dataclasses.replace(settings, lookup=lookup_lib.PromptLookup(**lookup))


def load_plan(path: str | os.PathLike[str]) -> Plan:
  """Reads a plan from a file.

  Raises:
    ValueError: the file cannot be read or is no plan; gives the reason.
  """
  with whole_files.reading(f'plan {path}', 'make it anew with scripts/tune.py'):
    record = text_files.read_object(path)
    if record.get('schema') != SCHEMA:
      raise ValueError(
        f'it has schema {record.get("schema")!r}, expected {SCHEMA}'
      )
    whole_files.check_record(record)
    record.pop(whole_files.ENTRY, None)
    _checked(record, _KINDS, needed=_KINDS)
    if not 0 <= (ends := record['ends_per_token']) <= 1:
      raise ValueError(f'ends_per_token must be from 0 to 1, got {ends}')
    for key in ('prompt_length', 'new_tokens'):
      if record[key] < 0:
        raise ValueError(f'{key} must not be negative, got {record[key]}')
    needed = (
      field.name
      for field in dataclasses.fields(Context)
      if field.default is dataclasses.MISSING
    )
    context = Context(
      **_checked(record['context'], _KINDS_OF_CONTEXT, 'context.', needed)
    )
    missing = {'target', 'draft', 'vocabulary'} - context.models.keys()
    if missing:
      raise ValueError(f'context.models lacks {min(missing)}')
    ways = tuple(_way_from(*entry) for entry in record['ways'].items())
    if not ways:
      raise ValueError('ways is empty')
    del record['schema']
    candidates = tuple(record['candidates'])
    entries = {'ways': ways, 'context': context, 'candidates': candidates}
    return Plan(**record | entries)


def model_digest(checkpoint: checkpoint_lib.Checkpoint) -> str:
  """A digest of a model, independent of the dtype it is loaded in, 32 digits.

  It is taken over the config, and over size, beginning and end of every file of
  weights: these have names, shapes and some of the values, so that gigabytes
  need not be read. The config of a GGUF file is at its beginning.
  """
  digest = hashlib.blake2b(digest_size=16)
  for file in checkpoint.files:
    with file.open('rb') as opened:
      size = opened.seek(0, os.SEEK_END)
      digest.update(os.fsencode(f'{file.name} {size}\n'))
      for start in (0, max(size - _SAMPLE_BYTES, 0)):
        opened.seek(start)
        digest.update(opened.read(_SAMPLE_BYTES))
  return digest.hexdigest()


def model_digests(sources: sources_lib.Sources) -> dict[str, str | None]:
  """The digests of `Context.models`."""
  digests = {
    'target': model_digest(sources.target),
    'draft': None if sources.draft is None else model_digest(sources.draft),
    'vocabulary': pair_lib.vocabulary_digest(sources.tokenizer),
  }
  if sources.head is not None:
    digests['head'] = model_digest(sources.head.stored)
  return digests


def cache_path(
  context: Context,
  drafting: settings_lib.DraftSettings = settings_lib.DraftSettings(),
) -> pathlib.Path:
  """The file of the plan for a context, in the user's cache folder.

  `drafting` are the settings that all candidates of the plan share.
  """
  record = dataclasses.asdict(context) | {'schema': SCHEMA}
  record |= {'drafting': repr(drafting)}
  text = json.dumps(record, sort_keys=True)
  name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
  return user_cache.folder('plans') / f'{name}.json'
