"""Benchmarks of decoding methods on text prompts, for scripts/benchmark.py."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import tqdm

import specdec
from specdec import arguments as arguments_lib
from specdec import decode_options
from specdec import sampling as sampling_lib
from specdec import statistics as statistics_lib
from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import arms as arms_lib
from specdec.models.lab.bench import endpoint as endpoint_lib
from specdec.models.lab.bench import exactness
from specdec.models.lab.bench import questions as questions_lib
from specdec.models.lab.bench import record
from specdec.models.lab.bench import times
from specdec.models.lab.bench import timing
from specdec.models.text import chat_template
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib
from specdec.text import whole_files

Figures = Mapping[str, Any]


def _interval(arm: Figures, name: str, unit: str = '') -> str:
  value, ends = f'{arm[name]:.2f}{unit}', arm[f'{name}_interval']
  return value if ends is None else f'{value} ({ends[0]:.2f}-{ends[1]:.2f})'


def _forwards_per_token(arm: Figures) -> str:
  counts = {'target': arm['target_forwards']} | arm['stage_forwards']
  tokens = max(arm['new_tokens'], 1)
  return ', '.join(f'{name} {n / tokens:.2f}' for name, n in counts.items())


_Columns = Mapping[str, Callable[[Figures], str]]
_SPEED: _Columns = {
  'tokens/s (95 %)': lambda arm: _interval(arm, 'tokens_per_second'),
  'speed (95 %)': lambda arm: _interval(arm, 'speed', 'x'),
  'after the prompt: tokens/s': lambda arm: _interval(
    arm, 'decoding_tokens_per_second'
  ),
  'speed': lambda arm: _interval(arm, 'decoding_speed', 'x'),
  'first token, s': lambda arm: (
    f'{arm["first_token_seconds"]:.2f}' if 'first_token_seconds' in arm else '-'
  ),
  'block eff.': lambda arm: f'{arm["block_efficiency"]:.2f}',
  'accepted at 1, 2, ...': lambda arm: (
    ' '.join(f'{x:.2f}' for x in arm['acceptance_by_position'] if x) or '-'
  ),
  'nodes': lambda arm: (
    f'{arm["nodes_per_forward"]:.1f}' if 'nodes_per_forward' in arm else '-'
  ),
  'forwards per token': _forwards_per_token,
  'flips': lambda arm: '-' if arm['flips'] is None else f'{len(arm["flips"])}',
}
_WORK: _Columns = {
  'ms per target forward': lambda arm: (
    f'{1e3 * arm["seconds_per_target_forward"]:.2f}'
  ),
  'of memory limit': lambda arm: f'{arm["of_memory_limit"]:.0%}',
  'relative bandwidth': lambda arm: f'{arm["relative_bandwidth"]:.3f}',
  'at paper costs': lambda arm: (
    f'{arm["relative_bandwidth_at_paper_costs"]:.3f}'
  ),
  'weights, MB': lambda arm: f'{arm["weight_bytes"] / 1e6:.1f}',
}


_CATEGORY: _Columns = {
  'tokens': lambda arm: f'{arm["new_tokens"] or "-"}',
  'after the prompt: speed (95 %)': lambda arm: _interval(
    arm, 'decoding_speed', 'x'
  ),
  'speed (95 %)': _SPEED['speed (95 %)'],
  'block eff.': _SPEED['block eff.'],
  'accepted at 1, 2, ...': _SPEED['accepted at 1, 2, ...'],
  'flips': _SPEED['flips'],
}
# Figures that are averaged over categories.
_MEANS = (
  'tokens_per_second',
  'decoding_tokens_per_second',
  'block_efficiency',
  'speed',
  'decoding_speed',
  'acceptance_by_position',
)


def _rows(arms: Mapping[str, Figures], columns: _Columns) -> list[list[str]]:
  return [
    [name, *(column(arm) for column in columns.values())]
    for name, arm in arms.items()
  ]


def _to_table(
  title: str, groups: Mapping[str, Mapping[str, Figures]], columns: _Columns
) -> str:
  """A Markdown table of groups of arms; `title` heads the names of groups."""
  rows = [
    [name, *row]
    for name, arms in groups.items()
    for row in _rows(arms, columns)
  ]
  return record.to_table((title, 'arm', *columns), rows)


@dataclasses.dataclass(frozen=True)
class Report:
  """Settings and figures of one run; `str` is Markdown tables.

  Attributes:
    settings: of the run.
    limits: of `times.Bandwidth.summary`.
    arms: by name the figures of `timing.summarize_arms`, and `flips`: the rows
      where the plain arm of the same dtype gives other tokens, each with the
      margin of the choice; None without such an arm, or if tokens may differ.
      Arms of this library also have `weight_bytes` and the figures of
      `_reading`.
    categories: by category and by arm, the figures of `timing.summarize_arms`
      and the `flips`; empty for prompts without categories.
  """

  settings: Figures
  limits: Figures
  arms: Mapping[str, Figures]
  categories: Mapping[str, Mapping[str, Figures]]

  @property
  def mean_over_categories(self) -> dict[str, dict[str, Any]]:
    """By arm, arithmetic means in which each category counts the same."""
    mean = lambda arm, key: np.mean(
      [arms[arm][key] for arms in self.categories.values()], axis=0
    ).tolist()
    return {arm: {key: mean(arm, key) for key in _MEANS} for arm in self.arms}

  @property
  def figures(self) -> dict[str, Any]:
    """Everything that was measured."""
    figures = {'limits': self.limits, 'arms': self.arms}
    if self.categories:
      figures['categories'] = self.categories
      figures['mean_over_categories'] = self.mean_over_categories
    return figures

  def write(self, path: str) -> None:
    """Writes a JSON file, and next to it the tables as Markdown."""
    record.write_record(path, dict(self.settings), self.figures)
    whole_files.write_text(pathlib.Path(path).with_suffix('.md'), f'{self}\n')

  def __str__(self):
    # Nobody knows what peers read.
    ours = {k: arm for k, arm in self.arms.items() if 'weight_bytes' in arm}
    tables = [
      record.to_table(('arm', *columns), _rows(arms, columns))
      for columns, arms in ((_SPEED, self.arms), (_WORK, ours))
    ]
    memory = self.limits['bytes_per_second'] / 1e9
    if self.categories:
      tables += self._category_tables()
    return '\n\n'.join(
      [*tables, f'In this run the machine read {memory:.1f} GB/s.']
    )

  def _category_tables(self) -> list[str]:
    """The speeds of all arms side by side, and all figures by category."""
    unknown = {'new_tokens': None, 'flips': None}
    for name in ('decoding_speed', 'speed'):
      unknown[f'{name}_interval'] = None
    means = self.mean_over_categories
    groups = {
      **self.categories,
      'all, pooled': self.arms,
      'mean of categories': {arm: means[arm] | unknown for arm in means},
    }
    head = 'speed after the prompt', *self.arms
    speeds = [
      [name, *(f'{arm["decoding_speed"]:.2f}x' for arm in arms.values())]
      for name, arms in groups.items()
    ]
    return [
      record.to_table(head, speeds),
      _to_table('category', groups, _CATEGORY),
    ]


def table_by_batch_size(reports: Mapping[int, Report]) -> str:
  """One Markdown table with the speeds at several batch sizes."""
  groups = {f'{size}': report.arms for size, report in reports.items()}
  return _to_table('batch', groups, _SPEED)


# The models of the staged speculative decoding paper (arXiv 2308.04623): GPT-2
# Large and a draft of 40 million parameters, in 16 bits. The shape of the draft
# is not published; its cache is counted as 8 layers of width 512.
PAPER_COSTS = {
  'target': {'per_forward': 2 * 773e6, 'per_slot': 2 * 2 * 36 * 1280},
  'draft': {'per_forward': 2 * 40e6, 'per_slot': 2 * 2 * 8 * 512},
}


def _own_arm(
  spec: arms_lib.ArmSpec, pair: pair_lib.Pair, task: task_lib.Task
) -> tuple[timing.Arm, int]:
  """An arm of this library, and the bytes of its weights and tables."""
  try:
    drafting = settings_lib.with_options(task.drafting, dict(spec.options))
    ways: specdec.Drafter | drafters.Planned
    if spec.method == settings_lib.PLANNED:
      ways = drafters.make_planned(drafting.plan, pair)
      used = [*ways.by_name.values()]
    else:
      ways = drafters.make_drafter(spec.method, pair, drafting)
      used = [ways]
  except ValueError as error:
    raise ValueError(f'arm {str(spec)!r}: {error}') from error

  def decode(batch, limit):
    drafter, options = drafters.of_batch(
      pair, ways, {'break_even': task.break_even}, len(batch), batch
    )
    return specdec.generate(
      pair.target,
      jax.random.key(task.seed),
      batch,
      drafter=drafter,
      max_new_tokens=limit,
      room_for_new_tokens=task.max_new_tokens,
      sampling=task.sampling,
      eos_ids=pair.eos_ids,
      verify=task.verify,
      children=task.children if drafter.stages else None,
      break_even=options['break_even'],
    )

  arrays = {id(leaf): leaf for leaf in jax.tree.leaves((pair.target, used))}
  return decode, sum(leaf.nbytes for leaf in arrays.values())


Turn = tuple[str | None, list[int]]
"""The category of a prompt and its token ids."""

Batch = tuple[str | None, list[list[int]]]
"""The category of several prompts and the token ids of each."""


def check_context(
  rows: Sequence[Sequence[int]], max_new_tokens: int, context: int
) -> None:
  """ValueError if a prompt and its new tokens exceed the target's context."""
  longest = max(map(len, rows))
  if longest + max_new_tokens > context:
    raise ValueError(
      f'--max_new_tokens={max_new_tokens} and the longest prompt,'
      f' {longest} tokens, exceed the context of the target, {context} tokens;'
      ' --prompt_bucket leaves out longer prompts'
    )


def turns_of(
  questions: Sequence[questions_lib.Question],
  pair: pair_lib.Pair,
  answer: timing.Arm,
  task: task_lib.Task,
  *,
  bucket: int | None,
  context: int,
) -> list[Turn]:
  """Every turn of the questions as a prompt, with the conversation before it.

  `answer` gives the answers in the conversations; it decodes batches. The last
  turns are not decoded here. A conversation of more than `bucket` tokens does
  not go on.

  Raises:
    ValueError: there is no chat template, or a conversation exceeds the
      context.
  """
  first = pair.ids_of([question.first for question in questions])
  prompts = [[ids] for ids in first]
  answers: list[list[dict[str, str]]] = [[] for _ in questions]
  while going_on := [
    index
    for index, question in enumerate(questions)
    if len(prompts[index]) < len(question.turns)
    and (bucket is None or len(prompts[index][-1]) <= bucket)
  ]:
    starts = range(0, len(going_on), task.batch_size)
    for start in tqdm.tqdm(starts, unit='batch of answers', file=sys.stderr):
      chunk = going_on[start : start + task.batch_size]
      rows = [prompts[index][-1] for index in chunk]
      check_context(rows, task.max_new_tokens, context)
      # A full batch shares its programs with those that are timed.
      rows += rows[-1:] * (task.batch_size - len(rows))
      tokens = answer(rows, task.max_new_tokens).tokens[: len(chunk)]
      for index, answer_ids in zip(chunk, tokens, strict=True):
        messages = questions[index].messages(answers[index])
        said = pair.said(answer_ids, section=pair.section_after(messages))
        answers[index].append(chat_template.answer(*said))
        messages = questions[index].messages(answers[index])
        prompts[index] += pair.ids_of([messages])
  return [
    (question.category, ids)
    for question, turns in zip(questions, prompts, strict=True)
    for ids in turns
  ]


def make_batches(
  turns: Sequence[Turn], *, batch_size: int, bucket: int | None
) -> list[Batch]:
  """Full batches of one category each, from each category in turn.

  Prompts that do not fill a batch are left out. Only prompts of bucket / 2 <
  length <= bucket tokens are kept, which share their programs; all if `bucket`
  is None.

  Raises:
    ValueError: a category has fewer prompts than `batch_size`.
  """
  if bucket is not None:
    turns = [turn for turn in turns if bucket // 2 < len(turn[1]) <= bucket]
    if not turns:
      raise ValueError(
        f'no prompt has {bucket // 2 + 1} to {bucket} tokens; choose another'
        ' --prompt_bucket'
      )
  groups: dict[str | None, list[list[int]]] = {}
  for category, ids in turns:
    groups.setdefault(category, []).append(ids)
  by_category: list[list[Batch]] = []
  for category, rows in groups.items():
    if not 1 <= batch_size <= len(rows):
      of = '' if category is None else f' of the category {category!r}'
      raise ValueError(
        f'--batch_size must be between 1 and the number of prompts{of},'
        f' {len(rows)}; got {batch_size}'
      )
    starts = range(0, len(rows) - batch_size + 1, batch_size)
    by_category.append(
      [(category, rows[start : start + batch_size]) for start in starts]
    )
  in_turn = itertools.zip_longest(*by_category)
  return [batch for batches in in_turn for batch in batches if batch]


def _by_category(
  results: Mapping[str, Sequence[timing.Measurement]],
  batches: Sequence[Batch],
  figures: Mapping[str, Figures],
  baseline: str,
) -> dict[str, dict[str, dict[str, Any]]]:
  """By category and arm the figures of `timing.summarize_arms`, and `flips`.

  `figures` are the figures of all batches together.
  """
  by_category = {}
  measured = [name for name, _ in batches[: len(results[baseline])]]
  for name in dict.fromkeys(measured):
    if name is None:
      continue
    indices = [index for index, other in enumerate(measured) if other == name]
    by_category[name] = timing.summarize_arms(
      {
        arm: [all_[index] for index in indices] for arm, all_ in results.items()
      },
      baseline=baseline,
    )
    for arm, arm_figures in by_category[name].items():
      flips = figures[arm]['flips']
      arm_figures['flips'] = flips and [
        flip for flip in flips if flip['batch'] in indices
      ]
  return by_category


def _find_flips(
  spec: arms_lib.ArmSpec,
  results: Mapping[str, Sequence[timing.Measurement]],
  batches: Sequence[Sequence[Sequence[int]]],
  pairs: Mapping[str, pair_lib.Pair],
  task: task_lib.Task,
) -> list[dict[str, Any]] | None:
  """Rows that differ from the plain arm of the same dtype, with margins."""
  dtype = spec.dtype or next(iter(pairs))
  reference = results.get(str(arms_lib.ArmSpec('plain', dtype)))
  rule = decode_options.RULES[task.verify](sampling_lib.BEST)
  draws_differ = not rule.keeps_tokens or (
    spec.is_peer and task.sampling.temperature > 0
  )
  if reference is None or draws_differ:
    return None
  keys = arguments_lib.row_keys(jax.random.key(task.seed), task.batch_size)
  flips = []
  pairs_of_batches = zip(results[str(spec)], reference, strict=True)
  for batch, both in enumerate(pairs_of_batches):
    texts = zip(*(run.generation.tokens for run in both), strict=True)
    for row, (tokens, expected) in enumerate(texts):
      divergence = exactness.divergence(
        pairs[dtype].target,
        keys[row],
        batches[batch][row],
        tokens,
        expected,
        task.sampling,
      )
      if divergence is not None:
        offset, margin = divergence
        flips.append(
          {'batch': batch, 'row': row, 'offset': offset, 'margin': margin}
        )
  return flips


def _load(
  specs: Sequence[arms_lib.ArmSpec], task: task_lib.Task
) -> tuple[
  dict[str, pair_lib.Pair],
  dict[str, tuple[timing.Arm, int]],
  dict[str, endpoint_lib.EndpointArm],
]:
  """The pairs by dtype; by name the arms of this library, and the peers."""
  own_specs = [spec for spec in specs if not spec.is_peer]
  if not own_specs:
    raise ValueError('--arms needs an arm of this library, e.g. plain')
  # Before loading, so that one that does not answer is told at once.
  servers = {
    str(spec): endpoint_lib.Endpoint(spec.method)
    for spec in specs
    if spec.is_peer
  }
  pairs = {
    dtype: pair_lib.load_pair(dataclasses.replace(task.models, dtype=dtype))
    for dtype in sorted({spec.dtype for spec in own_specs})
  }
  own = {
    str(spec): _own_arm(spec, pairs[spec.dtype], task) for spec in own_specs
  }
  pair = next(iter(pairs.values()))
  peers = {
    name: endpoint_lib.EndpointArm(server, task, pair.eos_ids, pair.tokenizer)
    for name, server in servers.items()
  }
  return pairs, own, peers


def _reading(
  figures: Figures,
  costs: Mapping[str, Mapping[str, float]],
  limits: Figures,
) -> dict[str, float]:
  """How near an arm comes to the bandwidth of the machine.

  The time is the time of decoding without prefill, all overhead included.
  `timing.summarize_arms` makes `figures`, `specdec.statistics` makes `costs`,
  and `times.Bandwidth.summary` makes `limits`.

  Returns:
    `seconds_per_target_forward`; `of_memory_limit`, the time of reading the
    weights and filled caches of all models at that bandwidth, over the actual
    time; `relative_bandwidth_at_paper_costs`, at `PAPER_COSTS`.
  """
  reads = figures['reads']
  seconds = max(figures['seconds'] - figures['prefill_seconds'], 1e-9)
  ideal = statistics_lib.bytes_read(reads, costs) / limits['bytes_per_second']
  return {
    'seconds_per_target_forward': seconds / max(reads['target']['forwards'], 1),
    'of_memory_limit': ideal / seconds,
    'relative_bandwidth_at_paper_costs': statistics_lib.relative_bandwidth(
      reads, {**costs, **PAPER_COSTS}
    ),
  }


def run(
  questions: Sequence[questions_lib.Question],
  *,
  arms: Sequence[arms_lib.ArmSpec],
  task: task_lib.Task,
  settings: Figures,
  prompt_bucket: int | None = None,
  max_seconds: float | None = None,
) -> Report:
  """Decodes every turn of the questions with every arm, interleaved.

  The first arm is the baseline. Its answers, decoded beforehand, are in the
  conversations of all (`models/lab/bench/batches`). `settings` are recorded
  unchanged. No batch begins after `max_seconds`.

  Raises:
    ValueError: an argument is out of range; the message names it.
  """
  limit, baseline = task.max_new_tokens, str(arms[0])
  if limit < 1:
    raise ValueError(f'--max_new_tokens must be at least 1, got {limit}')
  pairs, own, peers = _load(arms, task)
  decoders: dict[str, timing.Arm] = {
    name: own[name][0] if name in own else peers[name]
    for name in map(str, arms)
  }
  context = min(pair.target.spec.max_positions for pair in pairs.values())
  turns = turns_of(
    questions,
    next(iter(pairs.values())),
    decoders[baseline],
    task,
    bucket=prompt_bucket,
    context=context,
  )
  made = make_batches(turns, batch_size=task.batch_size, bucket=prompt_bucket)
  batches = [rows for _, rows in made]
  rows = [row for batch in batches for row in batch]
  check_context(rows, limit, context)
  bandwidth = times.Bandwidth()
  timing.warm_up(decoders, batches, max_new_tokens=limit)
  results = timing.time_arms(
    decoders,
    batches,
    max_new_tokens=limit,
    before_batch=bandwidth.sample,
    max_seconds=max_seconds,
  )
  figures = timing.summarize_arms(results, baseline=baseline)
  limits = bandwidth.summary()
  for spec in arms:
    name = str(spec)
    measured = figures[name]
    measured['flips'] = _find_flips(spec, results, batches, pairs, task)
    if name in peers:
      for unknown in arms_lib.UNKNOWN:
        del measured[unknown]
      first = np.median(peers[name].first_seconds)
      measured['first_token_seconds'] = first.item()
    else:
      costs = timing.costs_of(results[name])
      measured['weight_bytes'] = own[name][1]
      measured |= _reading(measured, costs, limits)
  of_run = {
    'arms': [str(spec) for spec in arms],
    'batch_size': task.batch_size,
    'batches_measured': len(results[baseline]),
  }
  categories = _by_category(results, made, figures, baseline)
  return Report(dict(settings) | of_run, limits, figures, categories)
