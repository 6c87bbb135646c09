"""Records a decode to its end, step by step, as traces."""

import jax
import numpy as np

from specdec import generation as generation_lib
from specdec import hosts
from specdec.tracing import trace as trace_lib
from specdec.tree import tree as tree_lib


def _blocks_of(
  step: generation_lib.RecordedStep,
) -> list[trace_lib.Block | None]:
  """The block of each row in a step; None for rows that were finished."""
  record = step.record
  tree, nodes, paths = hosts.read((record.tree, record.nodes, record.path))
  blocks: list[trace_lib.Block | None] = [None] * len(step.starts)
  for row in np.flatnonzero(step.forwards['target']).tolist():
    of_row = jax.tree.map(lambda array, row=row: array[row], tree)
    used = nodes[row][nodes[row] >= 0]
    # Indices within the block; ascending, so a parent precedes its children.
    number = np.full(of_row.capacity + 1, tree_lib.NO_NODE)
    number[used] = np.arange(used.size)
    probs = np.exp(np.minimum(of_row.cond_log_prob[used].astype(float), 0.0))
    blocks[row] = trace_lib.Block(
      start=int(step.starts[row]),
      tokens=tuple(of_row.token[used].tolist()),
      parents=tuple(number[of_row.parent[used]].tolist()),
      origins=tuple(of_row.origin[used].tolist()),
      probs=tuple(np.round(probs, 6).tolist()),
      path=tuple(number[paths[row][paths[row] >= 0]].tolist()),
      emitted=tuple(step.new_tokens[row]),
      forwards={name: int(rows[row]) for name, rows in step.forwards.items()},
    )
  return blocks


def record(decoding: generation_lib.Decoding) -> list[trace_lib.Trace]:
  """Decodes to the end by `Decoding.step_recorded`; the trace of each row.

  It is slower than `Decoding.run`, because every step returns to the host. The
  text of a token is its number; `text_decoding.TextDecoding.trace`
  has the real texts.

  Raises:
    ValueError: tokens have been decoded without being recorded.
  """
  if any(decoding.result().tokens):
    raise ValueError(
      'a trace begins with the first token, but some have been decoded;'
      ' begin another decode, and record it first'
    )
  rows: list[list[trace_lib.Block]] = [[] for _ in decoding.prompts]
  while not decoding.done:
    for blocks, block in zip(
      rows, _blocks_of(decoding.step_recorded()), strict=True
    ):
      if block is not None:
        blocks.append(block)
  result, traces = decoding.result(), []
  for row, (blocks, prompt) in enumerate(
    zip(rows, decoding.prompts, strict=True)
  ):
    ids = {
      token for block in blocks for token in (*block.tokens, *block.emitted)
    }
    log_probs = tuple(result.log_probs[row]) if result.log_probs else None
    traces.append(
      trace_lib.Trace(
        prompt=''.join(f'{token} ' for token in prompt),
        prompt_tokens=tuple(prompt),
        labels=result.labels,
        blocks=tuple(blocks),
        pieces=tuple(f'{token} ' for token in result.tokens[row]),
        texts={token: str(token) for token in sorted(ids)},
        finish_reason=result.finish_reasons[row],
        log_probs=log_probs,
      )
    )
  return traces
