"""The trace of a decode: the tree, accepted path and output of each forward.

decoding = specdec.Decoding(target, key, [prompt], max_new_tokens=64)
traces = specdec.tracing.record(decoding)
traces[0].blocks[3].tokens      # the tree that the target verified
"""

import collections
from collections.abc import Mapping
import dataclasses
import functools
import json
import math
from typing import Any

import jax
import numpy as np

from specdec import generation as generation_lib
from specdec import hosts
from specdec.text import text_files
from specdec.tree import tree as tree_lib

_FORMAT = 'specdec trace 1'
_KINDS = {
  **dict.fromkeys(('prompt', 'finish_reason'), str),
  **dict.fromkeys(('labels', 'pieces'), list[str]),
  'prompt_tokens': list[int],
  'blocks': list[dict[str, Any]],
  'texts': dict[str, str],
  'log_probs': list[float | None] | None,
}
_KINDS_OF_BLOCK = {
  **dict.fromkeys(('tokens', 'parents', 'origins'), list[int]),
  **dict.fromkeys(('path', 'emitted'), list[int]),
  'start': int,
  'probs': list[float],
  'forwards': dict[str, int],
}


@dataclasses.dataclass(frozen=True)
class Block:
  """One target forward of one row."""

  start: int  #: Number of tokens before the block, the root the last of them.
  tokens: tuple[int, ...]  #: The token of each node, the root first.
  parents: tuple[int, ...]  #: Parents, which come first; -1 at the root.
  origins: tuple[int, ...]  #: The source of each node, indexes `Trace.labels`.
  #: The estimated probability that the target accepts each node, given that it
  #: accepts the parent; rounded to six digits.
  probs: tuple[float, ...]
  path: tuple[int, ...]  #: The accepted nodes, the root first.
  #: The accepted tokens and the bonus token, cut where the text ends.
  emitted: tuple[int, ...]
  #: The number of forwards of each stage, the target first, then the drafters
  #: from the outermost to the innermost.
  forwards: Mapping[str, int]

  @functools.cached_property
  def depths(self) -> tuple[int, ...]:
    """The depth of each node, 0 for the root."""
    depths = [0]
    for parent in self.parents[1:]:
      depths.append(depths[parent] + 1)
    return tuple(depths)

  @functools.cached_property
  def path_probs(self) -> tuple[float, ...]:
    """The product of `probs` along the path from the root to each node."""
    probs = [1.0]
    for parent, prob in zip(self.parents[1:], self.probs[1:], strict=True):
      probs.append(probs[parent] * prob)
    return tuple(probs)

  @property
  def emitted_origins(self) -> tuple[int, ...]:
    """The source of each emitted token; 0, the target, for the bonus token."""
    sources = [self.origins[node] for node in self.path[1:]]
    return tuple([*sources, 0][: len(self.emitted)])

  @property
  def bonus(self) -> int | None:
    """The bonus token; None if the text ends before it."""
    return self.emitted[-1] if len(self.emitted) == len(self.path) else None


@dataclasses.dataclass(frozen=True)
class Trace:
  """All blocks of one row."""

  prompt: str  #: The text of the prompt.
  prompt_tokens: tuple[int, ...]  #: The ids of the prompt.
  labels: tuple[str, ...]  #: Sources of tokens, see `specdec.Generation`.
  blocks: tuple[Block, ...]  #: One per target forward, without the prefill.
  pieces: tuple[str, ...]  #: See `specdec.TextGeneration`.
  texts: Mapping[int, str]  #: By token id; U+FFFD for a part of a character.
  finish_reason: str  #: See `specdec.Generation`.
  #: By emitted token; None if the decode did not ask for them.
  log_probs: tuple[float, ...] | None = None

  @property
  def tokens(self) -> tuple[int, ...]:
    """The ids of the new tokens."""
    return tuple(token for block in self.blocks for token in block.emitted)

  @property
  def origins(self) -> tuple[int, ...]:
    """The source of each new token."""
    return tuple(x for block in self.blocks for x in block.emitted_origins)

  @property
  def stage_forwards(self) -> dict[str, int]:
    """The number of forwards of each stage in all blocks, the target first."""
    total: collections.Counter[str] = collections.Counter()
    for block in self.blocks:
      total.update(block.forwards)
    return dict(total)

  @property
  def block_efficiency(self) -> float:
    """New tokens per target forward; 0 without forwards."""
    return len(self.tokens) / len(self.blocks) if self.blocks else 0.0

  @property
  def accepted_histogram(self) -> list[int]:
    """Entry i is the number of blocks that emitted i + 1 tokens."""
    sizes = [len(block.emitted) for block in self.blocks]
    return [sizes.count(size) for size in range(1, max(sizes, default=0) + 1)]

  def to_json(self) -> str:
    """One JSON object in one line; `from_json` reads it."""
    return text_files.to_json({'format': _FORMAT} | dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> 'Trace':
    """Reads what `to_json` wrote; ValueError if it is something else."""
    try:
      record = json.loads(text)
      if not isinstance(record, dict) or record.pop('format', '') != _FORMAT:
        raise ValueError(f'not a JSON object of format {_FORMAT!r}')
      text_files.check_types(record, _KINDS)
      for number, block in enumerate(record['blocks']):
        text_files.check_types(block, _KINDS_OF_BLOCK, f'block {number}, ')
      record['blocks'] = tuple(Block(**_frozen(b)) for b in record['blocks'])
      if record.get('log_probs') is not None:  # JSON has no NaN.
        record['log_probs'] = [
          math.nan if value is None else value for value in record['log_probs']
        ]
      record['texts'] = {int(key): x for key, x in record['texts'].items()}
      return cls(**_frozen(record))
    except (LookupError, RecursionError, TypeError, ValueError) as error:
      raise ValueError(f'not a trace of a decode: {error}') from error


def _frozen(record: Mapping[str, Any]) -> dict[str, Any]:
  pairs = record.items()
  return {k: tuple(v) if isinstance(v, list) else v for k, v in pairs}


def _blocks_of(
  step: generation_lib.RecordedStep,
) -> list[Block | None]:
  """The block of each row in a step; None for rows that were finished."""
  record = step.record
  tree, nodes, paths = hosts.read((record.tree, record.nodes, record.path))
  blocks: list[Block | None] = [None] * len(step.starts)
  for row in np.flatnonzero(step.forwards['target']).tolist():
    of_row = jax.tree.map(lambda array, row=row: array[row], tree)
    used = nodes[row][nodes[row] >= 0]
    # Indices within the block; ascending, so a parent precedes its children.
    index = np.full(of_row.capacity + 1, tree_lib.NO_NODE)
    index[used] = np.arange(used.size)
    probs = np.exp(np.minimum(of_row.cond_log_prob[used].astype(float), 0.0))
    blocks[row] = Block(
      start=int(step.starts[row]),
      tokens=tuple(of_row.token[used].tolist()),
      parents=tuple(index[of_row.parent[used]].tolist()),
      origins=tuple(of_row.origin[used].tolist()),
      probs=tuple(np.round(probs, 6).tolist()),
      path=tuple(index[paths[row][paths[row] >= 0]].tolist()),
      emitted=tuple(step.new_tokens[row]),
      forwards={name: int(rows[row]) for name, rows in step.forwards.items()},
    )
  return blocks


def record(decoding: generation_lib.Decoding) -> list[Trace]:
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
  rows: list[list[Block]] = [[] for _ in decoding.prompts]
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
      Trace(
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
