"""Result files: measured figures with the machine, versions and settings."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import jax

from specdec.models import locks
from specdec.text import text_files
from specdec.text import whole_files


def prepare_output(path: str | None) -> None:
  """Locks the file, if any, that will be written when all is measured.

  Raises:
    OSError: it cannot be written.
    ValueError: another run is about to write it.
  """
  if path and jax.process_index() == 0:
    locks.hold(pathlib.Path(path), 'give another --output')


def write_record(
  path: str | None, settings: dict[str, Any], figures: dict[str, Any]
) -> None:
  """Writes `record` as JSON, if there is a path; only the first host does."""
  if path and jax.process_index() == 0:
    text = text_files.to_json(record(settings, figures), indent=1)
    whole_files.write_text(path, f'{text}\n')


def record(settings: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
  """Figures together with the machine and the settings."""
  return {'machine': describe_machine(), 'settings': settings} | figures


def _processor() -> str:
  """The processor's name, its family and its model, as far as they are known.

  Clouds give many processors one name.
  """
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  facts: dict[str, str] = {}
  for line in lines:
    key, _, value = line.partition(':')
    facts[key.strip()] = value.strip()
  name = facts.get('model name', platform.processor())
  if 'cpu family' not in facts:
    return name
  return f'{name} (family {facts["cpu family"]}, model {facts["model"]})'


def describe_machine() -> dict[str, Any]:
  """Device, processor, and versions of Python and packages."""
  packages = ('jax', 'jaxlib', 'flax', 'transformers')
  return {
    'device': jax.devices()[0].device_kind,
    'platform': jax.devices()[0].platform,
    'processor': _processor(),
    'kernel_flags': os.environ.get('SPECDEC_CXXFLAGS', ''),
    'cores': os.cpu_count(),
    'python': platform.python_version(),
  } | {package: importlib.metadata.version(package) for package in packages}


def to_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table whose columns are padded to equal width."""
  table = [head, *rows]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  table.insert(1, ['-' * width for width in widths])
  return '\n'.join(
    f'| {" | ".join(map(str.ljust, row, widths))} |' for row in table
  )


def _cell(value: Any) -> str:
  if isinstance(value, Mapping):
    return ', '.join(f'{number} {name}' for name, number in value.items())
  return f'{value:.4g}' if type(value) is float else f'{value}'


def rows_to_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """A Markdown table of dictionaries with the same keys."""
  return to_table(list(rows[0]), [[*map(_cell, row.values())] for row in rows])
