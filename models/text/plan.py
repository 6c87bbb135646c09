"""Plans: saved settings of decoding for given models on a given machine.

A plan is a small JSON file, made by scripts/tune.py and read by
`models.load(plan=...)` and by `--plan` of the decoding scripts.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from typing import Any

from models import user_cache
from models.checkpoints import checkpoint as checkpoint_lib
from models.text import pair as pair_lib
from models.text import settings as settings_lib
from models.text import sources as sources_lib
from specdec.draft import lookup as lookup_lib
from specdec.text import text_files
from specdec.text import whole_files
from specdec.tree import topology as topology_lib

SCHEMA = 1

_SAMPLE_BYTES = 1 << 16


def _entry(name: str) -> tuple[str, str]:
  """The object of a plan's settings that holds an option, and its key there."""
  option = settings_lib.OPTIONS[name]
  if option.record == 'inner_stage':
    return 'inner_tree', option.field.name
  in_tree = option.record or name == 'topology'
  return 'tree' if in_tree else '', option.field.name


_ENTRIES = {_entry(name): name for name in settings_lib.OPTIONS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """The models, machine and options that a plan was made for.

  A plan for other models is refused, other differences give `warnings`.
  """

  models: dict[str, str | None]  # Digests of target, vocabulary, what drafts.
  machine: dict[str, Any]  # See `models.lab.bench.record.describe_machine`.
  dtype: str  # The target's.
  draft_dtype: str
  draft_vocab: int | None = None  # How many tokens the draft proposes, or all.
  batch_size: int
  sampling: dict[str, Any]  # The sampling options that are set.
  cpu_kernels: bool = False  # Whether those of `models.nn.cpu` were used.
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
class Plan:
  """A method of decoding, its settings and the measurements behind the choice.

  Attributes:
    method: one of `models.text.settings.METHODS`.
    drafting: the settings of the method.
    min_block_efficiency: the time of a step, in steps of plain decoding. With
      fewer tokens per step the method is slower than plain decoding.
    context: what the plan was made for.
    candidates: the figures of all candidates, fastest first.
  """

  method: str
  drafting: settings_lib.DraftSettings
  min_block_efficiency: float
  context: Context
  candidates: tuple[dict[str, Any], ...] = ()

  @property
  def uses_draft(self) -> bool:
    """Whether the method has a draft model."""
    return self.method not in ('plain', *settings_lib.INNERS[1:])

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
    record = {
      'schema': SCHEMA,
      'method': self.method,
      'drafting': _to_record(self.drafting),
      'min_block_efficiency': self.min_block_efficiency,
      'context': dataclasses.asdict(self.context),
      'candidates': list(self.candidates),
    }
    sealed = whole_files.sealed_record(record)
    return text_files.to_json(sealed, indent=1) + '\n'

  def save(self, path: pathlib.Path) -> None:
    """Writes the file atomically; missing folders are made."""
    whole_files.write_text(path, self.to_json())


def _to_record(settings: settings_lib.DraftSettings) -> dict[str, Any]:
  """The settings that are not the defaults, as JSON."""
  record: dict[str, Any] = {}
  for (group, key), name in _ENTRIES.items():
    value = settings_lib.OPTIONS[name].read(settings)
    if value != settings_lib.OPTIONS[name].read(settings_lib.DraftSettings()):
      if isinstance(value, topology_lib.Topology):
        value = [list(path) for path in value.paths]
      (record.setdefault(group, {}) if group else record)[key] = value
  lookup, usual = vars(settings.lookup), vars(lookup_lib.PromptLookup())
  changed = {key: lookup[key] for key in lookup if lookup[key] != usual[key]}
  return record | ({'lookup': changed} if changed else {})


def _kinds(group: str) -> dict[str, Any]:
  """The types of the settings of a group in JSON, by their keys."""
  fields = {
    key: settings_lib.OPTIONS[name].field
    for (own, key), name in _ENTRIES.items()
    if own == group
  }
  paths = {'topology': list[list[int]]} if group == 'tree' else {}
  return {key: field.type for key, field in fields.items()} | paths


_KINDS = {
  'schema': int,
  'method': str,
  'drafting': dict,
  'min_block_efficiency': float,
  'context': dict,
  'candidates': list[dict[str, Any]],
}
_KINDS_OF_CONTEXT = {one.name: one.type for one in dataclasses.fields(Context)}
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


def _from_record(record: dict[str, Any]) -> settings_lib.DraftSettings:
  """The inverse of `_to_record`."""
  groups = dict.fromkeys(('tree', 'inner_tree', 'lookup'), dict)
  _checked(record, _kinds('') | groups, 'drafting.')
  lookup = _checked(
    record.pop('lookup', {}), _KINDS_OF_LOOKUP, 'drafting.lookup.'
  )
  options: dict[str, Any] = {}
  for group in ('tree', 'inner_tree'):
    values = record.pop(group, {})
    _checked(values, _kinds(group), f'drafting.{group}.')
    options |= {_ENTRIES[group, key]: values[key] for key in values}
  options |= {_ENTRIES['', key]: record[key] for key in record}
  if 'topology' in options:
    options['topology'] = topology_lib.from_paths(options['topology'])
  if 'confidence' in lookup:
    lookup['confidence'] = tuple(lookup['confidence'])
  settings = settings_lib.with_options(settings_lib.DraftSettings(), options)
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
    if record['method'] not in settings_lib.METHODS[:-1]:  # Without `plan`.
      raise ValueError(f'method {record["method"]!r} is not known')
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
    ratio = record['min_block_efficiency']
    if not 0 < ratio < math.inf:
      raise ValueError(f'min_block_efficiency must be positive, got {ratio}')
    return Plan(
      method=record['method'],
      drafting=_from_record(record['drafting']),
      min_block_efficiency=float(ratio),
      context=context,
      candidates=tuple(record['candidates']),
    )


def model_digest(checkpoint: checkpoint_lib.StoredTensors) -> str:
  """A digest of a model, independent of the dtype it is loaded in, 32 digits.

  It is taken over the config, and over size, beginning and end of every file of
  weights: these have names, shapes and some of the values, so that gigabytes
  need not be read. The config of a GGUF file is at its beginning.
  """
  digest = hashlib.blake2b(digest_size=16)
  for file in checkpoint.files:
    with file.open('rb') as opened:
      size = opened.seek(0, os.SEEK_END)
      digest.update(f'{file.name} {size}\n'.encode())
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
