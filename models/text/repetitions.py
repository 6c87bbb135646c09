"""Which repetitions of a tree are worth counting, and how they are nested."""

from collections.abc import Mapping
from collections.abc import Set
import dataclasses
import functools

from specdec.models.text import expression as expression_lib

_Repetitions = Set[expression_lib.Repetition]

_EMPTY = expression_lib.Concatenation()


def top_of(tree: expression_lib.Repetition) -> int:
  """The number up to which the times must be counted."""
  return tree.least if tree.most is None else tree.most


def without_impossible(tree: expression_lib.Tree) -> expression_lib.Tree:
  """A tree of the same texts, without parts that match no text.

  `NOTHING` if the tree itself matches none.
  """

  @functools.cache
  def clean(tree: expression_lib.Tree) -> expression_lib.Tree | None:
    parts = [clean(part) for part in tree.parts]
    possible = tuple(part for part in parts if part is not None)
    if isinstance(tree, expression_lib.Character):
      return tree if tree.ranges else None
    if isinstance(tree, expression_lib.Alternation):
      return dataclasses.replace(tree, parts=possible) if possible else None
    if isinstance(tree, expression_lib.Repetition):
      if len(possible) < len(parts) or tree.most == 0:
        return None if tree.least else _EMPTY
      if tree.most is not None and tree.most < tree.least:
        return None
    if len(possible) < len(parts):
      return None
    return dataclasses.replace(tree, parts=possible)

  return clean(tree) or expression_lib.NOTHING


def long_ones(
  tree: expression_lib.Tree, limit: int
) -> set[expression_lib.Repetition]:
  """The repetitions that would take more than `limit` states if not counted.

  The states are estimated. A part that may be empty is never counted.
  """
  repetitions = set[expression_lib.Repetition]()

  @functools.cache
  def size(tree: expression_lib.Tree) -> int:
    if isinstance(tree, expression_lib.Character):
      return 1 if tree.ranges[-1][1] < 0x80 else 8
    total = sum(map(size, tree.parts))
    if not isinstance(tree, expression_lib.Repetition):
      return total
    times = max(top_of(tree), 1)
    if (
      times * total <= limit or times == 1 or all(map(may_be_empty, tree.parts))
    ):
      return times * total
    repetitions.add(tree)
    return total

  @functools.cache
  def may_be_empty(tree: expression_lib.Tree) -> bool:
    if isinstance(tree, expression_lib.Character):
      return False
    if isinstance(tree, expression_lib.Alternation):
      return any(map(may_be_empty, tree.parts))
    if isinstance(tree, expression_lib.Repetition) and not tree.least:
      return True
    return all(map(may_be_empty, tree.parts))

  size(tree)
  return repetitions


def longest(tree: expression_lib.Tree, counted: _Repetitions) -> str:
  """The name of the longest repetition that is not counted, or nothing."""
  seen, trees = {tree}, [tree]
  for node in trees:
    trees += dict.fromkeys(part for part in node.parts if part not in seen)
    seen.update(node.parts)
  others = [
    node
    for node in trees
    if isinstance(node, expression_lib.Repetition) and node not in counted
  ]
  most = max(others, key=top_of, default=None)
  return most.name if most and top_of(most) > 1 else ''


def levels(
  tree: expression_lib.Tree, counted: _Repetitions
) -> dict[expression_lib.Repetition, int]:
  """The level of each repetition that is counted.

  Levels begin at 0, and a repetition is above all that are inside it.
  """
  by_repetition: dict[expression_lib.Repetition, int] = {}

  @functools.cache
  def height(tree: expression_lib.Tree) -> int:
    level = max(map(height, tree.parts), default=0)
    if not isinstance(tree, expression_lib.Repetition) or tree not in counted:
      return level
    by_repetition[tree] = level
    return level + 1

  height(tree)
  return by_repetition


def sizes(
  levels: Mapping[expression_lib.Repetition, int],
) -> tuple[int, ...]:
  """How many counts each level has, from 0 on."""
  largest = dict[int, int]()
  for repetition, level in levels.items():
    largest[level] = max(largest.get(level, 0), top_of(repetition))
  return tuple(1 + largest[level] for level in sorted(largest))
