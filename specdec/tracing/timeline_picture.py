"""How many forwards every stage took for each block, block by block."""

from specdec.tracing import words
from specdec.tracing.markup import COLUMN
from specdec.tracing.markup import columns
from specdec.tracing.markup import escape
from specdec.tracing.markup import picture
from specdec.tracing.markup import Svg
from specdec.tracing.trace import Trace

_LANE, _BAR, _STEP, _MARGIN = 30, 3, 5, 12
_CSS = (
  '.bar{fill:var(--ink,#111)} .block{fill:var(--faint,#e4e4e4)}'
  ' .small{font-size:10px}'
)


def timeline(trace: Trace) -> Svg:
  """Draws the forwards of all stages.

  Args:
    trace: of a decode.

  Returns:
    SVG: a lane per stage, the target's below the others since it comes last in
    every block; a field per block, with the number of the tokens it emitted; a
    bar per forward. Where in a block a stage ran is not recorded: its bars are
    just counted.
  """
  totals = trace.stage_forwards or {'target': 0}
  stages = list(reversed(totals))
  labels = {name: f'{name} {totals[name]:,}' for name in stages}
  left = _MARGIN + COLUMN * max(map(columns, labels.values())) + 8
  top = _MARGIN + 16
  bottom = top + _LANE * len(stages)
  body, x = [], left
  for number, block in enumerate(trace.blocks):
    width = _STEP * max(*block.forwards.values(), 2) + 4
    hint = f'block {number + 1}: {words.forwards(block)}'
    body.append(
      f'<g><title>{escape(hint)}</title><rect class="block" x="{x:.1f}"'
      f' y="{top}" width="{width - 2}" height="{bottom - top}"/>'
      f'<text class="small" x="{x + 2:.1f}" y="{top - 4}">'
      f'{len(block.emitted)}</text>'
    )
    for lane, name in enumerate(stages):
      y = top + _LANE * lane + 4
      body += [
        f'<rect class="bar" x="{x + 3 + _STEP * one:.1f}" y="{y}"'
        f' width="{_BAR}" height="{_LANE - 8}"/>'
        for one in range(block.forwards.get(name, 0))
      ]
    body.append('</g>')
    x += width
  body += [
    f'<text x="{left - 8:.1f}" y="{top + _LANE * lane + 19}"'
    f' text-anchor="end">{escape(labels[name])}</text>'
    for lane, name in enumerate(stages)
  ]
  body.append(
    f'<text x="{left - 8:.1f}" y="{top - 4}" text-anchor="end">tokens</text>'
  )
  said = ', '.join(
    words.plural(n, 'forward') + f' of the {name}' for name, n in totals.items()
  )
  return picture(
    x + _MARGIN,
    bottom + _MARGIN,
    f'Forwards by stage in {words.plural(len(trace.blocks), "block")}: {said}.',
    ''.join(body),
    _CSS,
  )
