"""What happened in every step of a decode, to be drawn and looked at.

    trace = specdec.trace(target, key, [prompt], drafter=..., max_new_tokens=64)
    trace[0].blocks[3].tokens      # the tree that the target verified
    trace[0].to_json()

A trace is plain data. `specdec.viz` draws it.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np

from specdec.draft.drafter import Drafter
from specdec.step import DecodeState
from specdec.step import StepRecord
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import ROOT

_FORMAT = 'specdec trace 1'
_DIGITS = 6


def _require(holds: bool, what: str) -> None:
  if not holds:
    raise ValueError(what)


@dataclasses.dataclass(frozen=True)
class Block:
  """One target forward of one row: a tree, what stood, what was emitted.

  Attributes:
    start: tokens of the text before it; the root is the last of them.
    tokens: of the nodes, the root first.
    parents: of the nodes, before their children; -1 for the root.
    origins: who proposed each node first, an index of `Trace.labels`.
    probs: of each node, how likely the drafters thought that the target would
      accept it, given that it accepts the parent; six digits.
    path: the accepted nodes, the root first.
    emitted: tokens; those of the accepted nodes and the bonus token, cut where
      the text ends.
    forwards: by stage, the target and then from the outermost in.

  Raises:
    ValueError: this cannot have happened; says why.
  """

  start: int
  tokens: tuple[int, ...]
  parents: tuple[int, ...]
  origins: tuple[int, ...]
  probs: tuple[float, ...]
  path: tuple[int, ...]
  emitted: tuple[int, ...]
  forwards: Mapping[str, int]

  def __post_init__(self):
    number = len(self.tokens)
    lengths = {len(self.parents), len(self.origins), len(self.probs)}
    _require(number > 0 and lengths == {number}, 'fields differ in length')
    _require(self.parents[ROOT] == NO_NODE, 'the first node is not the root')
    for node, parent in enumerate(self.parents[1:], 1):
      _require(0 <= parent < node, f'node {node} comes before its parent')
    _require(
      all(0 <= one <= 1 for one in self.probs), 'a prob is not in [0, 1]'
    )
    above = NO_NODE
    for node in self.path:
      within = 0 <= node < number and self.parents[node] == above
      _require(within, f'the path jumps to node {node}')
      above = node
    said = [self.tokens[node] for node in self.path[1:]]
    guessed = list(self.emitted[: len(said)])
    _require(len(self.path) > 0, 'the path is empty')
    _require(len(self.emitted) <= len(self.path), 'more emitted than accepted')
    _require(
      guessed == said[: len(guessed)], 'emitted is not what was accepted'
    )
    _require('target' in self.forwards, 'forwards has no target')

  @functools.cached_property
  def depths(self) -> tuple[int, ...]:
    """Of the nodes, 0 for the root."""
    depths = [0]
    for parent in self.parents[1:]:
      depths.append(depths[parent] + 1)
    return tuple(depths)

  @functools.cached_property
  def path_probs(self) -> tuple[float, ...]:
    """How likely each node was thought to be accepted, with all above it."""
    probs = [1.0]
    for parent, prob in zip(self.parents[1:], self.probs[1:], strict=True):
      probs.append(probs[parent] * prob)
    return tuple(probs)

  @property
  def emitted_origins(self) -> tuple[int, ...]:
    """Who proposed each emitted token, where 0 is the target itself."""
    proposed = [self.origins[node] for node in self.path[1:]]
    return tuple([*proposed, 0][: len(self.emitted)])

  @property
  def bonus(self) -> int | None:
    """The target's own token at the end; None if the text ends before it."""
    is_whole = len(self.emitted) == len(self.path)
    return self.emitted[-1] if is_whole else None


@dataclasses.dataclass(frozen=True)
class Trace:
  """All blocks of one row.

  Attributes:
    prompt: its text.
    prompt_tokens: its ids.
    labels: who may have proposed a token, see `specdec.Generation`.
    blocks: one per target forward, prefill apart.
    pieces: the text of each emitted token, see `models.TextGeneration`.
    texts: of every token id in the blocks; a token that is part of a character
      has U+FFFD.
    finish_reason: see `specdec.Generation`.
    log_probs: of each emitted token, see `specdec.Generation`; or None.

  Raises:
    ValueError: the parts do not fit; names the block.
  """

  prompt: str
  prompt_tokens: tuple[int, ...]
  labels: tuple[str, ...]
  blocks: tuple[Block, ...]
  pieces: tuple[str, ...]
  texts: Mapping[int, str]
  finish_reason: str
  log_probs: tuple[float, ...] | None = None

  def __post_init__(self):
    end = len(self.prompt_tokens)
    for number, block in enumerate(self.blocks):
      where = f'block {number}: '
      _require(block.start == end, f'{where}starts at {block.start}, not {end}')
      end += len(block.emitted)
      known = set(range(len(self.labels)))
      _require(set(block.origins) <= known, f'{where}an origin has no label')
      ids = {*block.tokens, *block.emitted}
      _require(ids <= set(self.texts), f'{where}a token has no text')
    new = end - len(self.prompt_tokens)
    _require(
      len(self.pieces) == new, f'{len(self.pieces)} pieces, {new} tokens'
    )
    log_probs = self.log_probs
    _require(
      log_probs is None or len(log_probs) == new, 'log_probs are missing'
    )

  @property
  def tokens(self) -> tuple[int, ...]:
    """The new ids."""
    return tuple(token for block in self.blocks for token in block.emitted)

  @property
  def origins(self) -> tuple[int, ...]:
    """Who proposed each of them."""
    return tuple(one for block in self.blocks for one in block.emitted_origins)

  @property
  def stage_forwards(self) -> dict[str, int]:
    """By stage, the target first; all blocks together."""
    total: dict[str, int] = {}
    for block in self.blocks:
      for stage, forwards in block.forwards.items():
        total[stage] = total.get(stage, 0) + forwards
    return total

  @property
  def block_efficiency(self) -> float:
    """Tokens per target forward; 0 if there was none."""
    return len(self.tokens) / len(self.blocks) if self.blocks else 0.0

  @property
  def accepted_histogram(self) -> list[int]:
    """Entry i counts the blocks that emitted i + 1 tokens."""
    sizes = [len(block.emitted) for block in self.blocks]
    return [sizes.count(size) for size in range(1, max(sizes, default=0) + 1)]

  def to_json(self) -> str:
    """One JSON object in one line; `from_json` reads it."""
    return json.dumps({'format': _FORMAT} | dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> 'Trace':
    """Reads what `to_json` wrote.

    Raises:
      ValueError: it is no trace; says why.
    """
    try:
      record = json.loads(text)
      _require(isinstance(record, dict), 'it is no JSON object')
      found = record.pop('format', None)
      _require(found == _FORMAT, f'its format is {found!r}, not {_FORMAT!r}')
      record['blocks'] = tuple(Block(**_frozen(b)) for b in record['blocks'])
      record['texts'] = {int(key): one for key, one in record['texts'].items()}
      return cls(**_frozen(record))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise ValueError(f'this is no trace of a decode: {error}') from error


def _frozen(record: Mapping[str, Any]) -> dict[str, Any]:
  return {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in record.items()
  }


def row_forwards(state: DecodeState, drafter: Drafter) -> dict[str, np.ndarray]:
  """By stage, the forwards of each row so far, `[B]`."""
  counted = {'target': state.counters.target_forwards} | {
    stage.name: stage_state.counters.row_forwards
    for stage, stage_state in zip(drafter.stages, state.stages, strict=True)
  }
  # One by one: a mapping would come back sorted by name.
  return {name: jax.device_get(rows) for name, rows in counted.items()}


def blocks_of(
  record: StepRecord,
  starts: np.ndarray,
  emitted: Sequence[Sequence[int]],
  before: Mapping[str, np.ndarray],
  after: Mapping[str, np.ndarray],
) -> list[Block | None]:
  """Of each row its block.

  Args:
    record: of the step.
    starts: `[B]`, tokens of each row before it.
    emitted: of each row, the new tokens.
    before: `row_forwards` before it.
    after: `row_forwards` after it.

  Returns:
    Blocks; None for rows that were done.
  """
  tree, nodes, paths = jax.device_get((record.tree, record.nodes, record.path))
  return [
    _block(
      jax.tree.map(lambda array, row=row: array[row], tree),
      nodes[row],
      paths[row],
      int(starts[row]),
      emitted[row],
      {name: int(after[name][row] - before[name][row]) for name in after},
    )
    if after['target'][row] > before['target'][row]
    else None
    for row in range(len(starts))
  ]


def _block(tree, nodes, path, start, emitted, forwards) -> Block:
  used = nodes[nodes >= 0]
  # The verified nodes, numbered anew: ascending, so parents come first.
  number = np.full(tree.capacity + 1, NO_NODE)
  number[used] = np.arange(used.size)
  probs = np.exp(np.minimum(tree.cond_log_prob[used].astype(float), 0.0))
  return Block(
    start=start,
    tokens=tuple(tree.token[used].tolist()),
    parents=tuple(number[tree.parent[used]].tolist()),
    origins=tuple(tree.origin[used].tolist()),
    probs=tuple(np.round(probs, _DIGITS).tolist()),
    path=tuple(number[path[path >= 0]].tolist()),
    emitted=tuple(emitted),
    forwards=forwards,
  )
