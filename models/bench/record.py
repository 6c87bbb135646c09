"""Result files: measured figures with the machine, versions and settings."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

import jax


def prepare_output(path: str) -> None:
  """Raises OSError before measuring if the file cannot be written."""
  file = pathlib.Path(path)
  file.parent.mkdir(parents=True, exist_ok=True)
  file.touch()


def write_record(
  path: str, settings: dict[str, Any], figures: dict[str, Any]
) -> None:
  """Writes `record` as JSON."""
  text = json.dumps(record(settings, figures), indent=1)
  pathlib.Path(path).write_text(f'{text}\n')


def record(settings: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
  """Figures together with the machine and the settings."""
  return {'machine': describe_machine(), 'settings': settings} | figures


def describe_machine() -> dict[str, Any]:
  """Device, processor, and versions of Python and packages."""
  processor = platform.processor()
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.exists():
    names = [
      line.partition(':')[2].strip()
      for line in cpuinfo.read_text().splitlines()
      if line.startswith('model name')
    ]
    processor = names[0] if names else processor
  return {
    'device': jax.devices()[0].device_kind,
    'platform': jax.devices()[0].platform,
    'processor': processor,
    'cores': os.cpu_count(),
    'python': platform.python_version(),
  } | {
    package: importlib.metadata.version(package)
    for package in ('jax', 'jaxlib', 'flax', 'transformers')
  }


def to_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table whose columns are padded to equal width.

  Args:
    head: the titles of the columns.
    rows: each with one cell per column.
  """
  table = [head, *rows]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  table.insert(1, ['-' * width for width in widths])
  return '\n'.join(
    f'| {" | ".join(map(str.ljust, row, widths))} |' for row in table
  )


def rows_to_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """A Markdown table of dictionaries with the same keys."""
  show = lambda value: (
    f'{value:.4g}' if isinstance(value, float) else f'{value}'
  )
  return to_table(
    list(rows[0]), [[show(value) for value in row.values()] for row in rows]
  )
