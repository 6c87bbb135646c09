"""Benchmarks of text prompts: what scripts/benchmark.py calls."""

from collections.abc import Callable
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

from models.bench import machine as roofline
from models.bench import peers
from models.bench.arms import ArmSpec
from models.bench.arms import ReadyArm
from models.bench.machine import MachineLimits
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
from specdec.study import timing as benchmarking
from specdec.study.exactness import choice_margin

_MISSING = '-'


@dataclasses.dataclass(frozen=True)
class Report:
  """Settings and figures of one run; `str` is two Markdown tables.

  Attributes:
    settings: of the run.
    limits: of the machine, see `models.machine_limits`.
    arms: figures by arm, see `models.benchmark.run`.
  """

  settings: Mapping[str, Any]
  limits: Mapping[str, Any]
  arms: Mapping[str, Mapping[str, Any]]

  @property
  def figures(self) -> dict[str, Any]:
    """What is measured."""
    return {'limits': self.limits, 'arms': self.arms}

  def write(self, path: str) -> None:
    """Writes all of it as JSON, and the tables as Markdown beside it."""
    write_record(path, dict(self.settings), self.figures)
    pathlib.Path(path).with_suffix('.md').write_text(f'{self}\n')

  def __str__(self):
    roofs = self.limits['flops_per_second'].items()
    roofs = ', '.join(
      f'{rate / 1e9:.0f} GFLOP/s {name}' for name, rate in roofs
    )
    memory = self.limits['bytes_per_second'] / 1e9
    speed = to_table(_SPEED_HEAD, map(_speed_row, *_columns(self.arms)))
    work = to_table(_WORK_HEAD, map(_work_row, *_columns(self.arms)))
    return (
      f'{speed}\n\n{work}\n\nIn this run the machine read {memory:.1f} GB/s and'
      f' computed {roofs}.'
    )


def _columns(arms):
  return arms.keys(), arms.values()


def _with_interval(value: float, interval: Any, unit: str = '') -> str:
  if interval is None:
    return f'{value:.2f}{unit}'
  return f'{value:.2f}{unit} ({interval[0]:.2f}-{interval[1]:.2f})'


_SPEED_HEAD = (
  'arm',
  'tokens/s (95 %)',
  'speed (95 %)',
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
  return (
    name,
    _with_interval(arm['tokens_per_second'], arm['tokens_per_second_interval']),
    _with_interval(arm['speed'], arm['speed_interval'], 'x'),
    ' '.join(f'{one:.2f}' for one in per_batch),
    f'{arm["block_efficiency"]:.2f}',
    f'{arm["nodes_per_forward"]:.1f}',
    ', '.join(f'{one} {count / tokens:.2f}' for one, count in forwards.items()),
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
# Large and a draft of 40 million parameters, in 16 bits. The shape of that
# draft is not given; its cache is counted as that of 8 layers of width 512.
PAPER_COSTS = {
  'target': {'per_forward': 2 * 773e6, 'per_slot': 2 * 2 * 36 * 1280},
  'draft': {'per_forward': 2 * 40e6, 'per_slot': 2 * 2 * 8 * 512},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What every arm is asked to do.

  Attributes:
    target: see `models.pair.load_pair`.
    draft: likewise; None if no arm needs one.
    drafting: see `models.drafters.make_drafter`; arms may differ from it.
    sampling: how to choose tokens.
    revision: of the target, on the hub.
    draft_dtype: of the draft; None: that of the arm.
    verify: see `specdec.generation.Options`.
    children: likewise; plain arms have no use for it.
    break_even: see `specdec.generation.Options`; None: what the plan says, in
      the arm `plan`.
    seed: of the sampling.
    batch_size: prompts decoded together.
    max_new_tokens: the limit per row.
    prompt_bucket: only prompts of more than half of it, and at most so many
      tokens; they share their programs. None: all prompts.
    max_seconds: no batch is begun after measuring for so long.
  """

  target: str
  draft: str | None
  drafting: DraftSettings
  sampling: specdec.Sampling
  revision: str | None = None
  draft_dtype: str | None = None
  verify: str = 'match'
  children: str | None = None
  break_even: float | None = None
  seed: int = 0
  batch_size: int = 1
  max_new_tokens: int = 128
  prompt_bucket: int | None = None
  max_seconds: float | None = None


def _our_arm(spec: ArmSpec, pair: Pair, task: Task) -> ReadyArm:
  try:
    drafting = with_options(task.drafting, dict(spec.options))
    drafter = make_drafter(spec.method, pair, drafting)
  except ValueError as error:
    raise ValueError(f'arm {str(spec)!r}: {error}') from error
  break_even = task.break_even or planned_break_even(spec.method, task.drafting)
  key = jax.random.key(task.seed)

  def decode(batch, limit):
    return specdec.generate(
      pair.target,
      key,
      batch,
      drafter=drafter,
      max_new_tokens=limit,
      room_for_new_tokens=task.max_new_tokens,
      sampling=task.sampling,
      eos_ids=pair.eos_ids,
      verify=task.verify,
      children=None if drafter is None else task.children,
      break_even=break_even,
    )

  stages = drafter.stages if drafter is not None else ()
  models = {'target': pair.target} | {
    stage.name: stage.scorer.model
    for stage in stages
    if isinstance(stage.scorer, LanguageModelScorer)
  }
  arrays = jax.tree.leaves((pair.target, drafter))
  return ReadyArm(
    decode=decode,
    sizes={name: roofline.model_size(model) for name, model in models.items()},
    weight_bytes=sum(leaf.nbytes for leaf in arrays),
  )


def _make_batches(
  prompts: Sequence[str], encode: Callable[[str], list[int]], task: Task
) -> list[list[list[int]]]:
  """Prompts as ids, those in the bucket, in full batches."""
  ids = [encode(prompt) for prompt in prompts]
  size, bucket = task.batch_size, task.prompt_bucket
  if bucket is not None:
    ids = [one for one in ids if bucket // 2 < len(one) <= bucket]
    if not ids:
      raise ValueError(
        f'no prompt has {bucket // 2 + 1} to {bucket} tokens; choose another'
        ' --prompt_bucket'
      )
  if not 1 <= size <= len(ids):
    raise ValueError(
      f'--batch_size must be between 1 and the number of prompts,'
      f' {len(ids)}; got {size}'
    )
  return [
    ids[start : start + size] for start in range(0, len(ids) - size + 1, size)
  ]


def _find_flips(
  spec: ArmSpec,
  results: Mapping[str, Sequence[benchmarking.Measurement]],
  batches: Sequence[Sequence[Sequence[int]]],
  pair: Pair | None,
  task: Task,
) -> list[dict[str, Any]] | None:
  """Where an arm leaves the plain one of its dtype, with margins."""
  reference = results.get(str(ArmSpec('plain', spec.dtype)))
  is_random = spec.is_peer and task.sampling.temperature > 0
  if reference is None or pair is None or task.verify != 'match' or is_random:
    return None  # nothing to compare with
  keys = row_keys(jax.random.key(task.seed), task.batch_size)
  flips = []
  for flip in benchmarking.find_flips(results[str(spec)], reference):
    tokens = reference[flip.batch].generation.tokens[flip.row]
    margin = choice_margin(
      pair.target,
      keys[flip.row],
      [*batches[flip.batch][flip.row], *tokens[: flip.offset]],
      task.sampling,
    )
    flips.append(dataclasses.asdict(flip) | {'margin': margin})
  return flips


def _load(
  specs: Sequence[ArmSpec], task: Task
) -> tuple[dict[str, Pair], dict[ArmSpec, ReadyArm]]:
  """The pairs by dtype, and all arms in their order."""
  dtypes = sorted({spec.dtype for spec in specs if not spec.is_peer})
  if not dtypes:
    raise ValueError('--arms needs one of our own, e.g. plain')
  if any(spec.is_peer for spec in specs):
    peers.describe_torch()  # Fails now, not after loading, without torch.
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
  settings: dict[str, Any],
) -> Report:
  """Decodes every prompt with every arm, interleaved.

  Args:
    prompts: texts; a last batch that would not be full is left out.
    arms: different ones; the first is the baseline.
    task: what they are to do.
    settings: recorded as they are.

  Returns:
    The report. Of every arm it has what `specdec.benchmarking.summarize_arms`
    and `models.roofline.place` say, and
    `relative_bandwidth_at_paper_costs`, that of the same forwards with
    `PAPER_COSTS`; `compile_seconds`; `weight_bytes`, and in
    `beyond_weights_bytes` the most memory that a decode of the longest prompts
    needed besides; `flips`, the rows whose tokens differ from those of the
    plain arm of the same dtype, each with the margin of the choice, or None if
    there is no such arm, or tokens need not be the same.

  Raises:
    ValueError: bad input; says what.
  """
  if task.max_new_tokens < 1:
    raise ValueError(
      f'--max_new_tokens must be at least 1, got {task.max_new_tokens}'
    )
  pairs, ready = _load(arms, task)
  pair = next(iter(pairs.values()))
  batches = _make_batches(prompts, pair.encode, task)
  limits = MachineLimits(list(pairs))
  decoders = {str(spec): arm.decode for spec, arm in ready.items()}
  with tqdm.tqdm(
    total=len(arms) * (len(batches) + 1), unit='batch', file=sys.stderr
  ) as bar:
    compile_seconds = benchmarking.warm_up(
      decoders, batches, max_new_tokens=task.max_new_tokens, report=bar.update
    )
    longest = max(batches, key=lambda batch: max(map(len, batch)))
    beyond = {
      spec: arm.peak_beyond(
        functools.partial(arm.decode, longest, min(8, task.max_new_tokens))
      )
      for spec, arm in ready.items()
    }
    results = benchmarking.measure(
      decoders,
      batches,
      max_new_tokens=task.max_new_tokens,
      before_batch=limits.sample,
      max_seconds=task.max_seconds,
      report=bar.update,
    )
  figures = benchmarking.summarize_arms(results, baseline=str(arms[0]))
  summary = limits.summary()
  for spec, arm in ready.items():
    own = figures[str(spec)]
    costs = results[str(spec)][0].generation.stats['costs']
    own |= roofline.place(own, costs, arm.sizes, summary)
    own |= {
      'relative_bandwidth_at_paper_costs': relative_bandwidth(
        own['reads'], costs | PAPER_COSTS
      ),
      'compile_seconds': compile_seconds[str(spec)],
      'weight_bytes': arm.weight_bytes,
      'beyond_weights_bytes': beyond[spec],
      'flips': _find_flips(spec, results, batches, pairs.get(spec.dtype), task),
    }
  torch = peers.describe_torch() if any(one.is_peer for one in arms) else {}
  return Report(
    settings=settings
    | {
      'arms': [str(spec) for spec in arms],
      'batches_measured': len(results[str(arms[0])]),
    }
    | torch,
    limits=summary,
    arms=figures,
  )
