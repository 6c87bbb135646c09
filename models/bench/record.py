"""Files of measured figures, with what they depend on."""

from collections.abc import Iterable
from collections.abc import Sequence
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

import jax


def prepare_output(path: str) -> None:
  """Fails now, not after the measurements, where a file cannot be written."""
  file = pathlib.Path(path)
  file.parent.mkdir(parents=True, exist_ok=True)
  file.touch()


def write_record(
  path: str, settings: dict[str, Any], figures: dict[str, Any]
) -> None:
  """Writes figures as JSON, with what they depend on."""
  text = json.dumps(record(settings, figures), indent=1)
  pathlib.Path(path).write_text(f'{text}\n')


def record(settings: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
  """Figures with what they depend on."""
  return {'machine': describe_machine(), 'settings': settings} | figures


def describe_machine() -> dict[str, Any]:
  """What the figures depend on besides the code."""
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
  """A Markdown table with columns padded to the same width.

  Args:
    head: of each column.
    rows: as many cells each.
  """
  table = [head, *rows]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  table.insert(1, ['-' * width for width in widths])
  return '\n'.join(
    f'| {" | ".join(map(str.ljust, row, widths))} |' for row in table
  )
