"""States that cannot be cut, and what each token adds to them.

Attention keeps an entry per token, so a rejected token is an entry that nobody
sees. A recurrent layer has one state for all of its text. Its cache holds the
state after the text that is kept, and for every slot of the window the small
inputs by which that token changes a state:

    state          after the text           inputs of the window, by slot
    S              = fold of a, b           r    x    y    z
                                            |    |____|    |    parents
                                            |______________|

The state of a node is the fold of S over the inputs of its path. Plain decoding
computes its states by the same step in the same order, so they have the same
bits. Accepting a path folds it into S; a rejected node was never part of it.

The mask says who is whose parent: a node's parent is the last slot before its
own that it sees.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

Step = Callable[[Any, Any], Any]
"""`(state, inputs of one token) -> state`, of one row, without a batch axis."""


def _at(arrays: Any, index: jax.typing.ArrayLike) -> Any:
  take = lambda array: lax.dynamic_index_in_dim(array, index, 0, False)
  return jax.tree.map(take, arrays)


def _put(arrays: Any, new: Any, index: jax.typing.ArrayLike) -> Any:
  put = lambda array, row: lax.dynamic_update_index_in_dim(array, row, index, 0)
  return jax.tree.map(put, arrays, new)


def _chosen(is_first: jax.Array, first: Any, second: Any) -> Any:
  """For each row the first, where `is_first [B]`, or the second."""

  def choose(first: jax.Array, second: jax.Array) -> jax.Array:
    rows = is_first.reshape(-1, *[1] * (first.ndim - 1))
    return jnp.where(rows, first, second)

  return jax.tree.map(choose, first, second)


class Recurrent(flax.struct.PyTreeNode):
  """The state of one layer. The state before the first token is zeros."""

  state: Any  #: Pytree of `[B, ...]`, after the text that the cache holds.
  #: Arrays `[B, 1, T, width]` by name, by slot of the window.
  inputs: Mapping[str, jax.Array]
  mark: Any  #: The state at `KVCache.marked` tokens, to go back to.
  step: Step = flax.struct.field(pytree_node=False)  #: See `Step`; static.
  #: `(state, inputs, slots [B, n], count [B]) -> state`: the same as step after
  #: step, but at once; static. None: `step` is called for each input.
  fold_all: Callable[..., Any] | None = flax.struct.field(
    pytree_node=False, default=None
  )

  @property
  def num_slots(self) -> int:
    """T."""
    return jax.tree.leaves(self.inputs)[0].shape[2]

  @property
  def state_bytes(self) -> int:
    """Bytes of the state of all rows."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

  def with_window(self, num_slots: int) -> 'Recurrent':
    """The same state with an empty window of `num_slots`."""
    empty = lambda old: jnp.zeros(
      (*old.shape[:2], num_slots, *old.shape[3:]), old.dtype
    )
    return self.replace(inputs=jax.tree.map(empty, self.inputs))

  def fold(self, slots: jax.Array, count: jax.Array) -> 'Recurrent':
    """The state with the inputs of the first `count [B]` of `slots [B, n]`."""
    if self.fold_all is not None:
      state = self.fold_all(self.state, self.inputs, slots, count)
      return self.replace(state=state)

    def add(index: jax.Array, state: Any) -> Any:
      slot = lax.dynamic_index_in_dim(slots, index, 1, False)
      take = lambda array: jax.vmap(_at)(array[:, 0], slot)
      new = jax.vmap(self.step)(state, jax.tree.map(take, self.inputs))
      return _chosen(index < count, new, state)

    return self.replace(state=lax.fori_loop(0, jnp.max(count), add, self.state))

  def go_back(self, stays: jax.Array, to_mark: jax.Array) -> 'Recurrent':
    """Rows that do not stay return to the mark, or to the start of the text."""
    zeros = jax.tree.map(jnp.zeros_like, self.state)
    before = _chosen(to_mark, self.mark, zeros)
    return self.replace(
      state=_chosen(stays, self.state, before),
      mark=_chosen(stays | to_mark, self.mark, zeros),
    )


def ancestor(sees: jax.Array, distance: int) -> jax.Array:
  """`[B, L]` int32, the slot of each node's ancestor, -1 before the window.

  Args:
    sees: `[B, L, T]` bool, the slots of the window that each node sees; the
      last of them is its own.
    distance: 0 for the node itself, 1 for its parent, and so on.
  """
  rank = lax.cumsum(sees.astype(jnp.int32), axis=2, reverse=True)
  slots = jnp.arange(sees.shape[2])[None, None]
  return jnp.max(jnp.where(sees & (rank == distance + 1), slots, -1), axis=2)


def parents(sees: jax.Array) -> jax.Array:
  """`[B, T]` int32, the parent of each slot that any node sees; -1: none.

  Args:
    sees: see `ancestor`. Nodes that see a slot agree on what comes before it.
  """
  slots = jnp.arange(sees.shape[2])[None, None]
  last = lax.cummax(jnp.where(sees, slots, -1), axis=2)
  before = jnp.pad(last, ((0, 0), (0, 0), (1, 0)), constant_values=-1)[
    :, :, :-1
  ]
  return jnp.max(jnp.where(sees, before, -1), axis=1)


def places_before(sees: jax.Array, num_inputs: int) -> jax.Array:
  """`[B, L, n]` int32, where the last n inputs before each node are.

  For convolutions, which keep the last n inputs of the text as their state: a
  place below n is one of these, in their order, a larger one n + a slot. The
  nearest comes first: the parent's, then the grandparent's.

  Args:
    sees: see `ancestor`.
    num_inputs: n.
  """
  depth = jnp.sum(sees, axis=2, dtype=jnp.int32)
  places = []
  for distance in range(1, num_inputs + 1):
    slot = ancestor(sees, distance)
    text = num_inputs - 1 + depth - distance
    places.append(jnp.where(slot >= 0, num_inputs + slot, text))
  if not places:
    return jnp.zeros((*sees.shape[:2], 0), jnp.int32)
  return jnp.stack(places, axis=2)


def walk(
  layer: Recurrent,
  sees: jax.Array,
  first: jax.Array,
  new: Any,
  visit: Callable[[Any, Any], tuple[Any, Any]],
) -> tuple[Any, Any]:
  """Visits the nodes of a forward, each with the state of its parent.

  The slots of the window are visited in their order, parents first. All states
  are held until the end.

  Args:
    layer: its window has the inputs of earlier forwards.
    sees: `[B, L, T]`, see `ancestor`.
    first: `[B]` int32, the slot of the first node.
    new: pytree of `[B, L, ...]`, what is known of the nodes.
    visit: `(state of the parent, new of a node) -> (inputs, output)`, of one
      row without a batch axis; the inputs are what the node adds.

  Returns:
    The inputs and the outputs of the nodes, pytrees of `[B, L, ...]`.
  """
  length = sees.shape[1]

  def of_row(
    state: Any, inputs: Any, parent: jax.Array, first: jax.Array, new: Any
  ) -> Any:
    def enter(slot: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
      states, results = carry
      before = _at(states, parent[slot] + 1)
      # Earlier slots take the place of the first node, which follows them.
      place = jnp.clip(slot - first, 0, length - 1)
      fresh = visit(before, _at(new, place))
      added = jax.tree.map(
        lambda held, made: jnp.where(slot < first, held, made),
        _at(inputs, slot),
        fresh[0],
      )
      states = _put(states, layer.step(before, added), slot + 1)
      return states, _put(results, fresh, place)

    if layer.num_slots == 1:
      return jax.tree.map(lambda x: x[None], visit(state, _at(new, 0)))
    hold = lambda array: jnp.concatenate(
      [array[None], jnp.zeros((layer.num_slots, *array.shape), array.dtype)]
    )
    results = jax.tree.map(
      lambda like: jnp.zeros((length, *like.shape), like.dtype),
      jax.eval_shape(visit, state, _at(new, 0)),
    )
    carry = (jax.tree.map(hold, state), results)
    return lax.fori_loop(0, end, enter, carry)[1]

  end = jnp.max(first) + length
  inputs = jax.tree.map(lambda array: array[:, 0], layer.inputs)
  return jax.vmap(of_row)(layer.state, inputs, parents(sees), first, new)
