"""Benchmarks of text prompts: what scripts/benchmark.py calls."""

from collections.abc import Sequence
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from models.drafters import DraftSettings
from models.drafters import make_drafter
from models.drafters import METHODS
from models.pair import load_pair
import specdec
from specdec import benchmarking
from specdec.generation import row_keys
from specdec.margins import choice_margin
from specdec.statistics import relative_bandwidth

# The models of the staged speculative decoding paper (arXiv 2308.04623): GPT-2
# Large and a draft of 40 million parameters, in 16 bits. The shape of that
# draft is not given; its cache is counted as that of 8 layers of width 512.
PAPER_COSTS = {
  'target': {'per_forward': 2 * 773e6, 'per_slot': 2 * 2 * 36 * 1280},
  'draft': {'per_forward': 2 * 40e6, 'per_slot': 2 * 2 * 8 * 512},
}

DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class ArmSpec:
  """One way of decoding: `method:dtype`."""

  method: str
  dtype: str

  def __str__(self):
    return f'{self.method}:{self.dtype}'


def parse_arm(text: str, default_dtype: str) -> ArmSpec:
  """Parses `method` or `method:dtype`.

  Raises:
    ValueError: method or dtype is not known; lists the choices.
  """
  method, _, dtype = text.partition(':')
  dtype = dtype or default_dtype
  if method not in METHODS or dtype not in DTYPES:
    raise ValueError(
      f'arm {text!r} is not known; methods are {METHODS}, dtypes {DTYPES}'
    )
  return ArmSpec(method, dtype)


@dataclasses.dataclass(frozen=True)
class Report:
  """Settings and figures of one run; `str` is a table."""

  settings: dict[str, Any]
  arms: dict[str, dict[str, Any]]

  def write(self, path: str) -> None:
    """Writes all of it as JSON."""
    write_record(path, self.settings, {'arms': self.arms})

  def __str__(self):
    """A Markdown table."""
    rows: list[tuple[str, ...]] = [
      (
        'arm',
        'tokens/s',
        'speed',
        'per batch',
        'block eff.',
        'nodes',
        'forwards per token',
        'bandwidth',
        'at paper costs',
        'flips',
      )
    ]
    rows += [_row(name, arm) for name, arm in self.arms.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple('-' * width for width in widths))
    return '\n'.join(
      f'| {" | ".join(map(str.ljust, row, widths))} |' for row in rows
    )


def _row(name: str, arm: dict[str, Any]) -> tuple[str, ...]:
  low, middle, high = np.quantile(arm['speed_per_batch'], (0, 0.5, 1))
  tokens = max(arm['new_tokens'], 1)
  forwards = {'target': arm['target_forwards']} | arm['stage_forwards']
  return (
    name,
    f'{arm["tokens_per_second"]:.2f}',
    f'{arm["speed"]:.2f}x',
    f'{low:.2f} {middle:.2f} {high:.2f}',
    f'{arm["block_efficiency"]:.2f}',
    f'{arm["nodes_per_forward"]:.0f}',
    ', '.join(f'{one} {count / tokens:.2f}' for one, count in forwards.items()),
    f'{arm["relative_bandwidth"]:.3f}',
    f'{arm["relative_bandwidth_at_paper_costs"]:.3f}',
    '-' if arm['flips'] is None else f'{len(arm["flips"])}',
  )


def prepare_output(path: str) -> None:
  """Fails now, not after the measurements, where a file cannot be written."""
  file = pathlib.Path(path)
  file.parent.mkdir(parents=True, exist_ok=True)
  file.touch()


def write_record(
  path: str, settings: dict[str, Any], figures: dict[str, Any]
) -> None:
  """Writes figures as JSON, with what they depend on."""
  record = {'machine': describe_machine(), 'settings': settings} | figures
  pathlib.Path(path).write_text(json.dumps(record, indent=1) + '\n')


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


def run(
  prompts: Sequence[str],
  *,
  arms: Sequence[ArmSpec],
  target: str,
  draft: str | None,
  revision: str | None,
  seed: int,
  batch_size: int,
  max_new_tokens: int,
  drafting: DraftSettings,
  sampling: specdec.Sampling,
  verify: str,
  children: str | None,
  settings: dict[str, Any],
) -> Report:
  """Decodes every prompt with every arm, interleaved.

  Args:
    prompts: texts; a last batch that would not be full is left out.
    arms: the first is the baseline.
    target: see `models.pair.load_pair`.
    draft: likewise; None if no arm needs one.
    revision: of the target, on the hub.
    seed: of the sampling.
    batch_size: prompts decoded together.
    max_new_tokens: the limit per row.
    drafting: see `models.drafters.make_drafter`.
    sampling: how to choose tokens.
    verify: see `specdec.generation.Options`.
    children: likewise; plain arms have no use for it.
    settings: recorded as they are.

  Returns:
    The report. `relative_bandwidth_at_paper_costs` is that of the same
    forwards with `PAPER_COSTS`. `flips` list the rows whose tokens differ from
    those of the plain arm of the same dtype, each with the margin of the
    choice; None if there is no such arm, or the rule is not to match.

  Raises:
    ValueError: bad input; says what.
  """
  if len(set(arms)) < len(arms):
    raise ValueError(f'--arms has repetitions: {[str(arm) for arm in arms]}')
  if max_new_tokens < 1:
    raise ValueError(
      f'--max_new_tokens must be at least 1, got {max_new_tokens}'
    )
  if not 1 <= batch_size <= len(prompts):
    raise ValueError(
      f'--batch_size must be between 1 and the number of prompts,'
      f' {len(prompts)}; got {batch_size}'
    )
  pairs = {
    dtype: load_pair(target, draft, dtype=jnp.dtype(dtype), revision=revision)
    for dtype in sorted({arm.dtype for arm in arms})
  }
  tokenizer = pairs[arms[0].dtype]
  ids = [tokenizer.encode(prompt) for prompt in prompts]
  batches = [
    ids[start : start + batch_size]
    for start in range(0, len(ids) - batch_size + 1, batch_size)
  ]
  key = jax.random.key(seed)
  drafters = {
    arm: make_drafter(arm.method, pairs[arm.dtype], drafting) for arm in arms
  }

  def decode_with(arm):
    pair = pairs[arm.dtype]
    return lambda batch, limit: specdec.generate(
      pair.target,
      key,
      batch,
      drafter=drafters[arm],
      max_new_tokens=limit,
      room_for_new_tokens=max_new_tokens,
      sampling=sampling,
      eos_ids=pair.eos_ids,
      verify=verify,
      children=None if arm.method == 'plain' else children,
    )

  with tqdm.tqdm(
    total=2 * len(arms) * len(batches), unit='batch', file=sys.stderr
  ) as bar:
    results = benchmarking.measure(
      {str(arm): decode_with(arm) for arm in arms},
      batches,
      max_new_tokens=max_new_tokens,
      report=bar.update,
    )
  figures = benchmarking.summarize_arms(results, baseline=str(arms[0]))
  for arm in arms:
    figures[str(arm)]['relative_bandwidth_at_paper_costs'] = relative_bandwidth(
      figures[str(arm)]['reads'],
      results[str(arm)][0].generation.stats['costs'] | PAPER_COSTS,
    )
    plain = str(dataclasses.replace(arm, method='plain'))
    if plain not in results or verify != 'match':
      figures[str(arm)]['flips'] = None  # nothing to compare with
      continue
    reference = results[plain]
    figures[str(arm)]['flips'] = [
      dataclasses.asdict(flip)
      | {
        'margin': choice_margin(
          pairs[arm.dtype].target,
          row_keys(key, batch_size)[flip.row],
          batches[flip.batch][flip.row]
          + reference[flip.batch].generation.tokens[flip.row][: flip.offset],
          sampling,
        )
      }
      for flip in benchmarking.find_flips(results[str(arm)], reference)
    ]
  return Report(
    settings=settings | {'arms': [str(arm) for arm in arms]},
    arms=figures,
  )
