"""Benchmarks of text prompts: what scripts/benchmark.py calls."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import tqdm

from models.bench import machine
from models.bench import peers
from models.bench.arms import ArmSpec
from models.bench.arms import ReadyArm
from models.bench.predict import predicted_speeds
from models.bench.record import to_table
from models.bench.record import write_record
from models.text.drafters import DraftSettings
from models.text.drafters import make_drafter
from models.text.drafters import planned_break_even
from models.text.drafters import with_options
from models.text.pair import load_pair
from models.text.pair import Pair
import specdec
from specdec.checks import row_keys
from specdec.draft.language_model import LanguageModelScorer
from specdec.statistics import relative_bandwidth
from specdec.study import timing
from specdec.study.exactness import choice_margin

_MISSING = '-'


@dataclasses.dataclass(frozen=True)
class Report:
  """Settings and figures of one run; `str` is two Markdown tables.

  Attributes:
    settings: of the run.
    limits: of `models.bench.machine.MachineLimits.summary`.
    arms: figures by arm, see `run`.
  """

  settings: Mapping[str, Any]
  limits: Mapping[str, Any]
  arms: Mapping[str, Mapping[str, Any]]

  @property
  def figures(self) -> dict[str, Any]:
    """Everything that was measured."""
    return {'limits': self.limits, 'arms': self.arms}

  def write(self, path: str) -> None:
    """Writes a JSON file, and the tables as Markdown beside it."""
    write_record(path, dict(self.settings), self.figures)
    pathlib.Path(path).with_suffix('.md').write_text(f'{self}\n')

  def __str__(self):
    rates = ', '.join(
      f'{rate / 1e9:.0f} GFLOP/s {name}'
      for name, rate in self.limits['flops_per_second'].items()
    )
    memory = self.limits['bytes_per_second'] / 1e9
    columns = self.arms.keys(), self.arms.values()
    return (
      f'{to_table(_SPEED_HEAD, map(_speed_row, *columns))}\n\n'
      f'{to_table(_WORK_HEAD, map(_work_row, *columns))}\n\n'
      f'In this run the machine read {memory:.1f} GB/s and computed {rates}.'
    )


def table_by_batch_size(reports: Mapping[int, Report]) -> str:
  """One Markdown table with the speeds at several batch sizes."""
  rows = [
    (f'{size}', *_speed_row(name, arm))
    for size, report in reports.items()
    for name, arm in report.arms.items()
  ]
  return to_table(('batch', *_SPEED_HEAD), rows)


def _with_interval(value: float, interval: Any, unit: str = '') -> str:
  if interval is None:
    return f'{value:.2f}{unit}'
  return f'{value:.2f}{unit} ({interval[0]:.2f}-{interval[1]:.2f})'


_SPEED_HEAD = (
  'arm',
  'tokens/s (95 %)',
  'speed (95 %)',
  'predicted',
  'per batch: least, median, most',
  'block eff.',
  'nodes',
  'forwards per token',
  'flips',
)


def _speed_row(name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
  per_batch = np.quantile(arm['speed_per_batch'], (0, 0.5, 1))
  tokens = max(arm['new_tokens'], 1)
  forwards = {'target': arm['target_forwards']} | arm['stage_forwards']
  predicted = arm['predicted_speed']
  return (
    name,
    _with_interval(arm['tokens_per_second'], arm['tokens_per_second_interval']),
    _with_interval(arm['speed'], arm['speed_interval'], 'x'),
    _MISSING if predicted is None else f'{predicted:.2f}x',
    ' '.join(f'{speed:.2f}' for speed in per_batch),
    f'{arm["block_efficiency"]:.2f}',
    f'{arm["nodes_per_forward"]:.1f}',
    ', '.join(
      f'{model} {count / tokens:.2f}' for model, count in forwards.items()
    ),
    _MISSING if arm['flips'] is None else f'{len(arm["flips"])}',
  )


_WORK_HEAD = (
  'arm',
  'ms per target forward',
  'of memory limit',
  'FLOP/byte',
  'GFLOP/s',
  'relative bandwidth',
  'at paper costs',
  'memory, MB: weights + beyond',
  'compile, s',
)


def _work_row(name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
  beyond = arm['beyond_weights_bytes']
  return (
    name,
    f'{1e3 * arm["seconds_per_target_forward"]:.2f}',
    f'{arm["of_memory_limit"]:.0%}',
    f'{arm["arithmetic_intensity"]:.2f}',
    f'{arm["flops_per_second"] / 1e9:.1f}',
    f'{arm["relative_bandwidth"]:.3f}',
    f'{arm["relative_bandwidth_at_paper_costs"]:.3f}',
    f'{arm["weight_bytes"] / 1e6:.1f} + '
    + (_MISSING if beyond is None else f'{beyond / 1e6:.1f}'),
    f'{arm["compile_seconds"]:.1f}',
  )


# The models of the staged speculative decoding paper (arXiv 2308.04623): GPT-2
# Large and a draft of 40 million parameters, in 16 bits. The shape of the draft
# is not published; its cache is counted as that of 8 layers of width 512.
PAPER_COSTS = {
  'target': {'per_forward': 2 * 773e6, 'per_slot': 2 * 2 * 36 * 1280},
  'draft': {'per_forward': 2 * 40e6, 'per_slot': 2 * 2 * 8 * 512},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """The decoding task that all arms share.

  Attributes:
    target: see `models.text.pair.load_pair`.
    draft: see `models.text.pair.load_pair`; None if no arm needs a draft.
    drafting: see `models.text.drafters.make_drafter`; arms may differ from it.
    sampling: see `specdec.generate`.
    revision: of the target, on the hub.
    draft_dtype: of the draft; None: the dtype of the arm.
    verification: the arguments `verify`, `children` and `break_even` of
      `specdec.generate`.
    seed: of the sampling.
    batch_size: prompts decoded together.
    max_new_tokens: the limit per row.
  """

  target: str
  draft: str | None
  drafting: DraftSettings
  sampling: specdec.Sampling
  revision: str | None = None
  draft_dtype: str | None = None
  verification: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  seed: int = 0
  batch_size: int = 1
  max_new_tokens: int = 128


def _our_arm(spec: ArmSpec, pair: Pair, task: Task) -> ReadyArm:
  try:
    drafting = with_options(task.drafting, dict(spec.options))
    drafter = make_drafter(spec.method, pair, drafting)
  except ValueError as error:
    raise ValueError(f'arm {str(spec)!r}: {error}') from error
  options = dict(task.verification)
  if options.get('break_even') is None:
    options['break_even'] = planned_break_even(spec.method, task.drafting)
  if not drafter.stages:
    options['children'] = None

  def decode(batch, limit):
    return specdec.generate(
      pair.target,
      jax.random.key(task.seed),
      batch,
      drafter=drafter,
      max_new_tokens=limit,
      room_for_new_tokens=task.max_new_tokens,
      sampling=task.sampling,
      eos_ids=pair.eos_ids,
      **options,
    )

  models = {'target': pair.target} | {
    stage.name: stage.scorer.model
    for stage in drafter.stages
    if isinstance(stage.scorer, LanguageModelScorer)
  }
  arrays = jax.tree.leaves((pair.target, drafter))
  return ReadyArm(
    decode=decode,
    sizes={name: machine.model_size(model) for name, model in models.items()},
    weight_bytes=sum(leaf.nbytes for leaf in arrays),
    models=models,
    num_nodes=drafter.shape.num_nodes,
  )


def make_batches(
  ids: Sequence[list[int]], *, batch_size: int, bucket: int | None
) -> list[list[list[int]]]:
  """Prompts in full batches; those that do not fill a batch are left out.

  Args:
    ids: token ids of the prompts.
    batch_size: prompts per batch.
    bucket: keep only prompts of bucket / 2 < length <= bucket tokens, which
      share their programs. None: keep all.

  Raises:
    ValueError: there are fewer prompts than `batch_size`.
  """
  if bucket is not None:
    ids = [row for row in ids if bucket // 2 < len(row) <= bucket]
    if not ids:
      raise ValueError(
        f'no prompt has {bucket // 2 + 1} to {bucket} tokens; choose another'
        ' --prompt_bucket'
      )
  if not 1 <= batch_size <= len(ids):
    raise ValueError(
      f'--batch_size must be between 1 and the number of prompts,'
      f' {len(ids)}; got {batch_size}'
    )
  starts = range(0, len(ids) - batch_size + 1, batch_size)
  return [list(ids[start : start + batch_size]) for start in starts]


def _find_flips(
  spec: ArmSpec,
  results: Mapping[str, Sequence[timing.Measurement]],
  batches: Sequence[Sequence[Sequence[int]]],
  pairs: Mapping[str, Pair],
  task: Task,
) -> list[dict[str, Any]] | None:
  """Rows that differ from the plain arm of the same dtype, with margins."""
  reference = results.get(str(ArmSpec('plain', spec.dtype)))
  draws_differ = (spec.is_peer and task.sampling.temperature > 0) or (
    task.verification.get('verify', 'match') != 'match'
  )
  if reference is None or spec.dtype not in pairs or draws_differ:
    return None
  keys = row_keys(jax.random.key(task.seed), task.batch_size)
  flips = []
  for flip in timing.find_flips(results[str(spec)], reference):
    tokens = reference[flip.batch].generation.tokens[flip.row]
    margin = choice_margin(
      pairs[spec.dtype].target,
      keys[flip.row],
      [*batches[flip.batch][flip.row], *tokens[: flip.offset]],
      task.sampling,
    )
    flips.append(dataclasses.asdict(flip) | {'margin': margin})
  return flips


def _load(
  specs: Sequence[ArmSpec], task: Task
) -> tuple[dict[str, Pair], dict[ArmSpec, ReadyArm]]:
  """The pairs by dtype, and all arms in the order of `specs`."""
  dtypes = sorted({spec.dtype for spec in specs if not spec.is_peer})
  if not dtypes:
    raise ValueError('--arms needs an arm other than transformers, e.g. plain')
  if any(spec.is_peer for spec in specs):
    peers.describe_torch()  # raises before loading if torch is missing
  pairs = {
    dtype: load_pair(
      task.target,
      task.draft,
      dtype=dtype,
      draft_dtype=task.draft_dtype,
      revision=task.revision,
    )
    for dtype in dtypes
  }
  arms = {
    spec: _our_arm(spec, pairs[spec.dtype], task)
    for spec in specs
    if not spec.is_peer
  } | peers.make_arms(
    [spec for spec in specs if spec.is_peer],
    target=task.target,
    draft=task.draft,
    revision=task.revision,
    sampling=task.sampling,
    eos_ids=pairs[dtypes[0]].eos_ids,
    seed=task.seed,
    batch_size=task.batch_size,
  )
  return pairs, {spec: arms[spec] for spec in specs}


def run(
  prompts: Sequence[str],
  *,
  arms: Sequence[ArmSpec],
  task: Task,
  settings: Mapping[str, Any],
  prompt_bucket: int | None = None,
  max_seconds: float | None = None,
  predict: bool = True,
) -> Report:
  """Decodes every prompt with every arm, interleaved.

  Args:
    prompts: texts; a last batch that is not full is left out.
    arms: different arms, of which the first is the baseline.
    task: the decoding task.
    settings: recorded unchanged.
    prompt_bucket: see `make_batches`.
    max_seconds: no batch begins after that time.
    predict: whether to measure V(N) and to predict the speeds.

  Returns:
    The report. For each arm it has the figures of
    `specdec.study.timing.summarize_arms` and `models.bench.machine.place`, and
    `relative_bandwidth_at_paper_costs`, that of the same forwards at
    `PAPER_COSTS`; `predicted_speed`, see `models.bench.predict`;
    `compile_seconds`; `weight_bytes`; `beyond_weights_bytes`, the peak memory
    of decoding the longest prompts without the weights; `flips`, the rows whose
    tokens differ from those of the plain arm of the same dtype, each with the
    margin of the choice, or None if there is no such arm or if tokens may
    differ.

  Raises:
    ValueError: an argument is out of range; the message names it.
  """
  if task.max_new_tokens < 1:
    raise ValueError(
      f'--max_new_tokens must be at least 1, got {task.max_new_tokens}'
    )
  pairs, ready = _load(arms, task)
  encode = next(iter(pairs.values())).encode
  batches = make_batches(
    [encode(prompt) for prompt in prompts],
    batch_size=task.batch_size,
    bucket=prompt_bucket,
  )
  limits = machine.MachineLimits(list(pairs))
  decoders = {str(spec): arm.decode for spec, arm in ready.items()}
  with tqdm.tqdm(
    total=len(arms) * (len(batches) + 1), unit='batch', file=sys.stderr
  ) as bar:
    compile_seconds = timing.warm_up(
      decoders, batches, max_new_tokens=task.max_new_tokens, report=bar.update
    )
    longest = max(batches, key=lambda batch: max(map(len, batch)))
    beyond = {
      spec: arm.peak_beyond(
        functools.partial(arm.decode, longest, min(8, task.max_new_tokens))
      )
      for spec, arm in ready.items()
    }
    results = timing.measure(
      decoders,
      batches,
      max_new_tokens=task.max_new_tokens,
      before_batch=limits.sample,
      max_seconds=max_seconds,
      report=bar.update,
    )
  figures = timing.summarize_arms(results, baseline=str(arms[0]))
  summary = limits.summary()
  predicted = {}
  if predict:
    first = results[str(arms[0])][0].generation.tokens
    texts = [[*row, *new] for row, new in zip(batches[0], first, strict=True)]
    predicted = predicted_speeds(
      {str(spec): arm for spec, arm in ready.items()},
      figures,
      prompts=batches[0],
      texts=texts,
      max_new_tokens=task.max_new_tokens,
    )
  for spec, arm in ready.items():
    own = figures[str(spec)]
    costs = results[str(spec)][0].generation.stats['costs']
    own |= machine.place(own, costs, arm.sizes, summary)
    own |= {
      'relative_bandwidth_at_paper_costs': relative_bandwidth(
        own['reads'], costs | PAPER_COSTS
      ),
      'predicted_speed': predicted.get(str(spec)),
      'compile_seconds': compile_seconds[str(spec)],
      'weight_bytes': arm.weight_bytes,
      'beyond_weights_bytes': beyond[spec],
      'flips': _find_flips(spec, results, batches, pairs, task),
    }
  run_settings = {
    'arms': [str(spec) for spec in arms],
    'batch_size': task.batch_size,
    'batches_measured': len(results[str(arms[0])]),
  }
  if any(spec.is_peer for spec in arms):
    run_settings |= peers.describe_torch()
  return Report(dict(settings) | run_settings, summary, figures)
