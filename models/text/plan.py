"""Plans: how to decode with these models on this machine, as a small file.

Made by `models.planner` (scripts/tune.py), read by `models.load(plan=...)` and
by `--plan` of the decoding scripts.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from models.bench.record import to_table
from models.checkpoints import hub
from models.text.drafters import DraftSettings
from models.text.drafters import INNERS
from models.text.drafters import METHODS
from models.text.drafters import PLANNED
from specdec.draft.drafter import StageConfig
from specdec.draft.lookup import PromptLookup
from specdec.tree.topology import Topology
from specdec.tree.topology import TreeShape

SCHEMA = 1

_SAMPLE_BYTES = 1 << 16
_OF_TOPOLOGY = (
  'num_nodes',
  'width',
  'branching',
  'rounds',
  'max_depth',
  'capacity',
)
_RECORDS = {
  'tree': TreeShape,
  'stage': StageConfig,
  'inner_stage': StageConfig,
  'lookup': PromptLookup,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What a plan was made for.

  Attributes:
    models: digest of each of target, draft and vocabulary; None for no draft.
      A plan for others is refused.
    machine: as `models.results.describe_machine` says.
    dtype: of the target.
    draft_dtype: of the draft.
    batch_size: B.
    sampling: name and value of all that is set.
  """

  models: dict[str, str | None]
  machine: dict[str, Any]
  dtype: str
  draft_dtype: str
  batch_size: int
  sampling: dict[str, Any]

  def warnings(self, other: 'Context') -> list[str]:
    """In what a plan for `other` may be off the mark here."""
    found = []
    for name in ('device', 'processor', 'cores'):
      here, there = self.machine.get(name), other.machine.get(name)
      if here != there:
        found.append(f'{name} is {here}, the plan is for {there}')
    for name in ('dtype', 'draft_dtype', 'batch_size', 'sampling'):
      here, there = getattr(self, name), getattr(other, name)
      if here != there:
        found.append(f'{name} is {here}, the plan is for {there}')
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How to decode, why, and what for.

  Attributes:
    method: one of `models.drafters.METHODS`.
    drafting: the settings that go with it.
    min_block_efficiency: seconds of one of its steps over those of a step of
      plain decoding: with fewer tokens per step it loses. 1 for plain decoding.
    context: what it was made for.
    candidates: the figures of all that were tried, fastest first.
  """

  method: str
  drafting: DraftSettings
  min_block_efficiency: float
  context: Context
  candidates: tuple[dict[str, Any], ...] = ()

  def check_models(self, models: Mapping[str, str | None]) -> None:
    """Refuses a plan for other models.

    Args:
      models: digests of those at hand, see `Context`.

    Raises:
      ValueError: one of them differs; says which.
    """
    for name, digest in self.context.models.items():
      if name == 'draft' and self.method in ('plain', *INNERS[1:]):
        continue  # it does not take part
      if models.get(name) != digest:
        raise ValueError(
          f'the plan was made for another {name} ({digest}, here'
          f' {models.get(name)}); make one for these models with'
          ' scripts/tune.py'
        )

  def to_json(self) -> str:
    """All of it."""
    record = {
      'schema': SCHEMA,
      'method': self.method,
      'drafting': _differences(self.drafting, DraftSettings()),
      'min_block_efficiency': self.min_block_efficiency,
      'context': dataclasses.asdict(self.context),
      'candidates': list(self.candidates),
    }
    return json.dumps(record, indent=1) + '\n'

  def save(self, path: pathlib.Path) -> None:
    """Writes it whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{os.getpid()}.partial')
    partial.write_text(self.to_json(), 'utf-8')
    partial.replace(path)


def _differences(record: Any, default: Any) -> dict[str, Any]:
  """The fields that are not those of the default, as JSON."""
  topology = getattr(record, 'topology', None)
  found: dict[str, Any] = {}
  for field in dataclasses.fields(record):
    value, usual = (getattr(one, field.name) for one in (record, default))
    if value == usual or (topology and field.name in _OF_TOPOLOGY):
      continue
    if isinstance(value, Topology):
      value = [list(path) for path in value.paths]
    elif dataclasses.is_dataclass(value):
      value = _differences(value, usual)
    found[field.name] = list(value) if isinstance(value, tuple) else value
  return found


def _restore(kind: Any, default: Any, changes: Any, name: str) -> Any:
  """The inverse of `_differences`."""
  if not isinstance(changes, dict):
    raise ValueError(f'{name} must be an object, got {changes!r}')
  fields = {field.name for field in dataclasses.fields(kind)}
  unknown = changes.keys() - fields
  if unknown:
    raise ValueError(f'{name} has unknown entries {sorted(unknown)}')
  values = {}
  for key, value in changes.items():
    if key in _RECORDS and kind is DraftSettings:
      value = _restore(
        _RECORDS[key], getattr(default, key), value, f'{name}.{key}'
      )
    elif key == 'topology':
      value = Topology(tuple(map(tuple, value)))
    values[key] = tuple(value) if isinstance(value, list) else value
  return dataclasses.replace(default, **values)


def load_plan(path: str | os.PathLike[str]) -> Plan:
  """Reads a plan.

  Raises:
    ValueError: it cannot be read or is no plan; says why.
  """
  try:
    record = json.loads(pathlib.Path(path).read_text('utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(f'plan {path} cannot be read: {error}') from error
  schema = record.get('schema') if isinstance(record, dict) else None
  if schema != SCHEMA:
    raise ValueError(
      f'plan {path} has schema {schema!r}, expected {SCHEMA}; make it anew with'
      ' scripts/tune.py'
    )
  try:
    context = Context(**record['context'])
    missing = {'target', 'draft', 'vocabulary'} - context.models.keys()
    if missing:
      raise ValueError(f'context.models lacks {sorted(missing)}')
    methods = tuple(one for one in METHODS if one != PLANNED)
    if record['method'] not in methods:
      raise ValueError(f'method {record["method"]!r} is none of {methods}')
    ratio = float(record['min_block_efficiency'])
    if not ratio > 0:
      raise ValueError(f'min_block_efficiency must be positive, got {ratio}')
    return Plan(
      method=record['method'],
      drafting=_restore(
        DraftSettings, DraftSettings(), record['drafting'], 'drafting'
      ),
      min_block_efficiency=ratio,
      context=context,
      candidates=tuple(record['candidates']),
    )
  except KeyError as error:
    raise ValueError(f'plan {path} lacks the entry {error}') from error
  except (AttributeError, TypeError, ValueError) as error:
    raise ValueError(f'plan {path} is no plan: {error}') from error


def model_digest(folder: pathlib.Path) -> str:
  """Tells models apart, whatever dtype they are loaded in; 32 hex digits.

  Of the config, and of size, beginning and end of every file of weights: they
  hold names, shapes and some of the values, and gigabytes need not be read.
  """
  digest = hashlib.blake2b(digest_size=16)
  files = [folder / 'config.json', *sorted(folder.glob('*.safetensors'))]
  for file in files:
    with file.open('rb') as opened:
      size = opened.seek(0, os.SEEK_END)
      digest.update(f'{file.name} {size}\n'.encode())
      for start in (0, max(size - _SAMPLE_BYTES, 0)):
        opened.seek(start)
        digest.update(opened.read(_SAMPLE_BYTES))
  return digest.hexdigest()


def model_digests(
  target: str, draft: str | None, *, vocabulary: str, revision: str | None
) -> dict[str, str | None]:
  """As `Context.models`.

  Args:
    target: as `models.pair.load_pair` takes it.
    draft: likewise.
    vocabulary: digest of the tokenizer, see `models.vocabulary`.
    revision: of the target, on the hub.
  """
  of_draft = None
  if draft is not None:
    of_draft = model_digest(hub.locate(hub.draft_name(draft)))
  return {
    'target': model_digest(hub.locate(target, revision=revision)),
    'draft': of_draft,
    'vocabulary': vocabulary,
  }


def cache_path(context: Context) -> pathlib.Path:
  """Where the plan of this context is kept, in the user's cache folder."""
  root = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  record = dataclasses.asdict(context) | {'schema': SCHEMA}
  text = json.dumps(record, sort_keys=True)
  name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
  return pathlib.Path(root) / 'specdec' / 'plans' / f'{name}.json'


def table(plan: Plan) -> str:
  """The candidates as Markdown, fastest first."""
  head = (
    'candidate',
    'predicted tokens/s',
    'measured',
    'block eff.',
    'pays above',
    'ms drafting',
    'ms verifying',
  )
  rows = []
  for one in plan.candidates:
    measured = one['measured']
    rows.append(
      (
        one['name'],
        f'{one["tokens_per_second"]:.1f}',
        '' if measured is None else f'{measured:.1f}',
        f'{one["block_efficiency"]:.2f}',
        f'{one["min_block_efficiency"]:.2f}',
        f'{one["drafting_milliseconds"]:.2f}',
        f'{one["verification_milliseconds"]:.2f}',
      )
    )
  return to_table(head, rows)
