"""Plans: the fastest ways to decode with given models on a given machine.

A plan is a small JSON file, made by scripts/tune.py and read by
`specdec.load(plan=...)` and by `--plan` of the decoding scripts. It has the
speeds of a few ways of decoding, the prompt counted, by padded length of the
prompt. Each request takes the fastest way of its length (`choose`).
"""

from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from specdec import arguments as arguments_lib
from specdec.models import user_cache
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import sources as sources_lib
from specdec.text import text_files
from specdec.text import whole_files
from specdec.tree import topology as topology_lib

SCHEMA = 5

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
  cpu_kernels: bool = False  # Whether `models/nn/cpu` computed.
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
class Way:
  """A method of decoding and its settings, with what was measured.

  Attributes:
    name: unique in a plan.
    method: one of `settings.METHODS`.
    drafting: the settings of the method.
    break_even: the time of a step, in steps of plain decoding. With fewer
      tokens per step the way is slower than plain decoding.
    tokens_per_second: new tokens over seconds, the prompt counted, by padded
      length of the longest prompt of a batch.
  """

  name: str
  method: str
  drafting: settings_lib.DraftSettings
  break_even: float
  tokens_per_second: dict[int, float]

  @property
  def uses_draft(self) -> bool:
    """Whether the method has a draft model or a head."""
    return settings_lib.method_of(self.method).uses_draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Ways of decoding, from which a request takes the fastest of its length.

  Attributes:
    ways: at least one; plain decoding is one of those that a planner makes.
    context: what the plan was made for.
    usual_length: the most frequent padded length of the samples.
  """

  ways: tuple[Way, ...]
  context: Context
  usual_length: int

  @property
  def usual(self) -> Way:
    """The way of a request like the usual samples."""
    return choose(self, self.usual_length)

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
      way.name: {
        'method': way.method,
        'drafting': _to_record(way.drafting),
        'break_even': way.break_even,
        'tokens_per_second': way.tokens_per_second,
      }
      for way in self.ways
    }
    record = {
      'schema': SCHEMA,
      'usual_length': self.usual_length,
      'ways': ways,
      'context': dataclasses.asdict(self.context),
    }
    return text_files.to_json(record, indent=1) + '\n'

  def save(self, path: pathlib.Path) -> None:
    """Writes the file atomically; missing folders are made."""
    whole_files.write_text(path, self.to_json())


def choose(plan: Plan, prompt_length: int) -> Way:
  """The fastest way at the padded length of a prompt.

  A length that was not measured takes the next longer one. Beyond the longest,
  nobody knows how long a draft would read the prompt, so it takes the fastest
  way without such a draft.
  """
  length = arguments_lib.padded_length(prompt_length)
  measured = {size for way in plan.ways for size in way.tokens_per_second}
  at = min((size for size in measured if size >= length), default=max(measured))
  reads_all = lambda way: way.uses_draft and way.drafting.draft_prompt is None
  few = [way for way in plan.ways if length <= at or not reads_all(way)]
  ways = few or plan.ways
  return max(ways, key=lambda way: way.tokens_per_second.get(at, 0.0))


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
  return record


_TYPES = {
  'schema': int,
  'usual_length': int,
  'ways': dict[str, dict[str, Any]],
  'context': dict,
}
_TYPES_OF_WAY = {
  'method': str,
  'drafting': dict,
  'break_even': float,
  'tokens_per_second': dict[str, float],
}
_TYPES_OF_CONTEXT = {
  field.name: field.type for field in dataclasses.fields(Context)
}
_TYPES_OF_DRAFTING = {
  name: option.field.type for name, option in settings_lib.OPTIONS.items()
} | {'topology': list[list[int]], 'lookup_confidence': list[float]}


def _checked(
  record: dict[str, Any],
  types: Mapping[str, Any],
  place: str = '',
  optional: Collection[str] = (),
) -> dict[str, Any]:
  """A part of a plan; ValueError names unknown, missing or invalid keys."""
  if unknown := sorted(record.keys() - types.keys()):
    raise ValueError(f'{place}{unknown[0]} is not known')
  if missing := sorted(types.keys() - record.keys() - {*optional}):
    raise ValueError(f'the entry {place}{missing[0]} is missing')
  text_files.check_types(record, types, place)
  return record


def _way_from(name: str, record: dict[str, Any]) -> Way:
  place = f'ways.{name}.'
  _checked(record, _TYPES_OF_WAY, place)
  speeds = record['tokens_per_second']
  by_length = {int(length): speed for length, speed in speeds.items()}
  if (
    record['method'] not in settings_lib.METHODS
    or record['method'] == settings_lib.PLANNED
  ):
    raise ValueError(f'{place}method {record["method"]!r} is not known')
  if not min([record['break_even'], *speeds.values(), *by_length]) > 0:
    raise ValueError(f'ways.{name} must have positive numbers, got {record}')
  drafting = _from_record(record['drafting'], f'{place}drafting.')
  changes = {'drafting': drafting, 'tokens_per_second': by_length}
  return Way(name=name, **record | changes)


def _from_record(
  record: dict[str, Any], place: str
) -> settings_lib.DraftSettings:
  _checked(record, _TYPES_OF_DRAFTING, place, _TYPES_OF_DRAFTING)
  if 'topology' in record:
    record['topology'] = topology_lib.Topology(record['topology'])
  if 'lookup_confidence' in record:
    record['lookup_confidence'] = tuple(record['lookup_confidence'])
  return settings_lib.with_options(settings_lib.DraftSettings(), record)


def load_plan(path: str | os.PathLike[str]) -> Plan:
  """Reads a plan from a file.

  Raises:
    ValueError: the file cannot be read or is not a plan; gives the reason.
  """
  with whole_files.reading(f'plan {path}', 'make it again: scripts/tune.py'):
    record = text_files.read_object(path)
    if record.get('schema') != SCHEMA:
      raise ValueError(
        f'it has schema {record.get("schema")!r}, expected {SCHEMA}'
      )
    _checked(record, _TYPES)
    optional = ('draft_vocab', 'cpu_kernels', 'mesh')
    context = Context(
      **_checked(record['context'], _TYPES_OF_CONTEXT, 'context.', optional)
    )
    ways = tuple(_way_from(*entry) for entry in record['ways'].items())
    if not ways:
      raise ValueError('ways is empty')
    length = record['usual_length']
    return Plan(ways=ways, context=context, usual_length=length)


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
  """The digests for `Context.models`."""
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
