"""The studies as Markdown."""

from collections.abc import Mapping
from typing import Any

from models.bench.record import to_table


def _gb(count: float) -> str:
  digits = 3 if count < 1e9 else 2
  return f'{count / 1e9:,.{digits}f}'


def _context(tokens: int) -> str:
  return f'{tokens // 1024}K' if tokens % 1024 == 0 else f'{tokens}'


def _speedup(value: float | None) -> str:
  return '-' if value is None else f'{value:.2f}'


def options(study: Mapping[str, Any]) -> str:
  """(a)."""
  tokens = study['num_tokens']
  head = (
    'context',
    'GB',
    f'option 1: 1 query x {tokens} tokens',
    f'option 2: {tokens} queries x 1 token',
    'option 2 / option 1',
  )
  rows = []
  for row in study['rows']:
    one, many = row['option_1'], row['option_2']
    for name, key in (
      ('weights', 'weight_bytes'),
      ('activations', 'activation_bytes'),
      ('KV cache read', 'cache_read_bytes'),
      ('KV cache written', 'cache_write_bytes'),
      ('all', 'bytes'),
    ):
      rows.append(
        (
          _context(row['context']),
          name,
          _gb(one[key]),
          _gb(many[key]),
          f'{many[key] / one[key]:.2f}',
        )
      )
  lines = [to_table(head, rows), '']
  for ratio, context in study['contexts_for'].items():
    where = 'nowhere' if context is None else f'at {context:,.0f} tokens'
    lines.append(f'Option 2 moves {ratio} times the bytes {where}.')
  for row in study['rows']:
    lines.append(
      f'At {_context(row["context"])} option 1 moves fewer bytes per emitted'
      f' token if it emits more than {row["tokens_to_break_even"]:.1f} of'
      f' its {tokens}.'
    )
  return '\n'.join(lines)


def speedups(study: Mapping[str, Any], axis: str) -> str:
  """(b), (c) and the second part of (d), at powers of two."""
  label = _context if axis == 'context' else str
  rows = [
    (label(x), *(_speedup(line[i]) for line in study['lines'].values()))
    for i, x in enumerate(study['x'])
    if x & (x - 1) == 0
  ]
  return to_table((axis, *study['lines']), rows)


def by_batch_size(study: Mapping[str, Any]) -> str:
  """(b)."""
  lines = [speedups(study, 'batch size'), '']
  for name, batch_size in study['break_even'].items():
    end = (
      'pays up to batch size 1,024, the largest that was looked at'
      if batch_size is None
      else f'plain decoding is at least as fast from batch size {batch_size} on'
    )
    lines.append(f'{name}: {end}.')
  head = (
    'batch size',
    'plain: ms per token',
    'tokens/s',
    'best draft length',
    'ms per token',
    'tokens/s',
  )
  rows = []
  for batch_size, rates in study['rates'].items():
    if batch_size & (batch_size - 1) == 0:
      plain, best = (
        (f'{1e3 * rate["latency"]:.2f}', f'{rate["throughput"]:,.0f}')
        for rate in rates
      )
      length = study['best_draft_length'][batch_size]
      rows.append((f'{batch_size}', *plain, f'{length}', *best))
  return '\n'.join([*lines, '', to_table(head, rows)])


def by_experts(study: Mapping[str, Any]) -> str:
  """(d), at batch size 1, then over batch sizes."""
  nodes = study['num_draft_tokens'] + 1
  head = (
    'target',
    'experts per layer',
    'needed by 1 token',
    f'by {nodes}',
    f'{nodes} tokens cost, of 1',
    'dense twin',
    'speedup',
    'dense twin',
    'of the twin',
  )
  rows = [
    (
      row['model'],
      f'{row["experts"]}',
      f'{row["plain_experts"]:.1f}',
      f'{row["verified_experts"]:.1f}',
      *(f'{one:.2f}' for one in row['verification']),
      *(f'{one:.2f}' for one in row['speedup']),
      f'{row["speedup"][0] / row["speedup"][1]:.2f}',
    )
    for row in study['rows']
  ]
  return f'{to_table(head, rows)}\n\n{speedups(study, "batch size")}'


def paper(study: Mapping[str, Any]) -> str:
  """(e)."""
  published = to_table(
    (
      'mode',
      'method',
      'relative bandwidth (table 1)',
      'speedup by bytes',
      'less 35 % Python',
      'published speedup (table 2)',
      'published / by bytes',
      'acceptance, if a chain of 4',
    ),
    [
      (
        row['mode'],
        row['method'],
        f'{row["relative_bandwidth"]:.2f}',
        f'{row["speedup_by_bytes"]:.2f}',
        f'{row["speedup_less_python"]:.2f}',
        f'{row["speedup"]:.2f}',
        f'{row["attained"]:.2f}',
        '' if row['acceptance'] is None else f'{row["acceptance"]:.2f}',
      )
      for row in study['published']
    ],
  )
  counted = to_table(
    (
      'mode',
      'method',
      'block efficiency, counted',
      'draft forwards per token, counted',
      'relative bandwidth, counted',
      'predicted',
      'speedup, predicted',
    ),
    [
      (
        row['mode'],
        row['method'],
        f'{row["block_efficiency"]:.2f}',
        f'{row["draft_forwards"]:.2f}',
        f'{row["counted_relative_bandwidth"]:.3f}',
        f'{row["relative_bandwidth"]:.3f}',
        f'{row["speedup"]:.2f}',
      )
      for row in study['counted']
    ],
  )
  plain = study['plain']
  return (
    f'{published}\n\n{counted}\n\nPlain decoding: {plain["published"]} tokens/s'
    f' published; the memory allows {plain["16 bits"]:.0f} in 16 bits,'
    f' {plain["32 bits"]:.0f} in 32.'
  )


def roofs(study: Mapping[str, Any]) -> str:
  """(f)."""
  return to_table(
    ('method', 'FLOP per byte', 'TFLOP/s', 'tokens/s', 'speedup'),
    [
      (
        name,
        f'{point["arithmetic_intensity"]:.1f}',
        f'{point["flops_per_second"] / 1e12:.1f}',
        f'{point["tokens_per_second"]:,.0f}',
        f'{point["speedup"]:.2f}',
      )
      for name, point in study['points'].items()
    ],
  )
