"""The key-value cache: full-size arrays and one length per row.

    slot      0   1   2   3   4   5   6   7
    row 0    [a   b   c   d]  .   .   .   .      length 4
    row 1    [a   b]  x   y   .   .   .   .      length 2; x, y are stale

A forward writes its L new entries after `length`. The attention mask decides
what may be seen, so entries are kept by adding to `length`; stale slots are
masked, then overwritten. After a token tree was verified, the entries of the
accepted path move to the front of the tree's.

`length` grows in `advance` and `keep` alone and shrinks in `rewind` alone. They
take the states of recurrent layers along, see `specdec.recurrent`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import NamedTuple

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import recurrent as recurrent_lib

# The most rows that are written and read one by one on a GPU. With 256 rows a
# layer compiled for an H100 has 526 kernels so, and 16 with all rows at once; a
# decode of 512 rows and 28 layers did not compile in 100 seconds. XLA for TPUs
# makes loops of scatters: with 32 rows a step of two layers would take 4.7
# instead of 3.4 million cycles on a v5e.
_ROW_BY_ROW = 16

# The most rows that are unrolled for any device. Tracing the write of 243 rows
# by a draft and a target took minutes.
_MOST_UNROLLED = 64


def _write_at_once(
  slots: jax.Array, new: jax.Array, start: jax.Array, first: int = 0
) -> jax.Array:
  zero = jnp.zeros((), start.dtype)
  write = lambda slots, new, start: lax.dynamic_update_slice(
    slots, new, (zero + first, start, zero)
  )
  return jax.vmap(write)(slots, new, start)


def _read_at_once(
  slots: jax.Array, start: jax.Array, *, number: int
) -> jax.Array:
  zero = jnp.zeros((), start.dtype)
  heads, _, width = slots.shape[1:]
  read = lambda slots, start: lax.dynamic_slice(
    slots, (zero, start, zero), (heads, number, width)
  )
  return jax.vmap(read)(slots, start)


def write_slots(
  slots: jax.Array, new: jax.Array, start: jax.Array, first: int = 0
) -> jax.Array:
  """Writes `new [B, h, L, Dh]` to `slots [B, H, S, Dh]` from `start [B]` on.

  `first` is the first of the h heads that are written.
  """

  def write_row(row: jax.typing.ArrayLike, slots: jax.Array) -> jax.Array:
    row = jnp.asarray(row, start.dtype)
    zero = jnp.zeros_like(row)
    index = (row, zero + first, start[row], zero)
    of_row = lax.dynamic_slice_in_dim(new, row, 1, axis=0)
    return lax.dynamic_update_slice(slots, of_row, index)

  def unrolled(slots: jax.Array) -> jax.Array:
    for row in range(slots.shape[0]):
      slots = write_row(row, slots)
    return slots

  if slots.shape[0] == 1:
    return unrolled(slots)
  # XLA's CPU backend makes a pass over the whole array for each of several
  # updates in a row. On accelerators every iteration of a loop costs launches.
  looped = lambda slots: lax.fori_loop(0, slots.shape[0], write_row, slots)
  at_once = lambda slots: _write_at_once(slots, new, start, first)
  branches = {'cpu': looped, 'default': unrolled}
  if slots.shape[0] > _MOST_UNROLLED:
    branches['default'] = at_once
  elif slots.shape[0] > _ROW_BY_ROW:
    branches['cuda'] = at_once
  return lax.platform_dependent(slots, **branches)


def read_slots(slots: jax.Array, start: jax.Array, number: int) -> jax.Array:
  """Slots `[B, H, number, Dh]` of `slots [B, H, S, Dh]` from `start [B]` on."""
  zero = jnp.zeros((), start.dtype)
  heads, _, width = slots.shape[1:]

  def row_by_row(slots: jax.Array, start: jax.Array) -> jax.Array:
    rows = []
    for row in range(slots.shape[0]):
      index = (jnp.array(row, zero.dtype), zero, start[row], zero)
      rows.append(lax.dynamic_slice(slots, index, (1, heads, number, width)))
    return jnp.concatenate(rows)

  if slots.shape[0] <= _ROW_BY_ROW:
    return row_by_row(slots, start)
  at_once = functools.partial(_read_at_once, number=number)
  if slots.shape[0] > _MOST_UNROLLED:
    return at_once(slots, start)
  return lax.platform_dependent(slots, start, cuda=at_once, default=row_by_row)


def causal_mask(start: jax.Array, length: int, num_slots: int) -> jax.Array:
  """`[B, L, S]` bool: L queries at consecutive slots see those up to theirs.

  `start`: `[B]` int32, the slot of each row's first query.
  """
  last = start[:, None, None] + jnp.arange(length)[None, :, None]
  return jnp.arange(num_slots)[None, None] <= last


def _written(
  start: jax.Array, window: jax.Array, *, num_slots: int
) -> jax.Array:
  before = jnp.arange(num_slots)[None] < start[:, None]
  zero = jnp.zeros((), start.dtype)
  rows = []
  for row in range(window.shape[0]):  # takes less time than a vmapped gather
    mask = jnp.broadcast_to(before[row], (window.shape[1], num_slots))
    index = (zero, start[row])
    rows.append(lax.dynamic_update_slice(mask, window[row], index))
  return jnp.stack(rows)


def _looked_up(
  start: jax.Array, window: jax.Array, *, num_slots: int
) -> jax.Array:
  """Every slot looks up its offset in the window: two GPU kernels less."""
  offset = jnp.arange(num_slots)[None] - start[:, None]
  within = (offset >= 0) & (offset < window.shape[2])
  index = jnp.clip(offset, 0, window.shape[2] - 1)
  seen = jax.vmap(lambda row, at: row[:, at])(window, index)
  return jnp.where(within[:, None], seen, offset[:, None] < 0)


def window_mask(
  start: jax.Array, window: jax.Array, num_slots: int
) -> jax.Array:
  """`[B, L, S]` bool: queries see all slots before a window, and some within.

  For example the nodes of a tree see the text so far and their ancestors. For
  `start = 2`, a root with two children and `num_slots = 6`:

      slot     0 1 2 3 4 5
      root     x x x . . .
      child    x x x x . .
      child    x x x . x .

  Args:
    start: `[B]` int32, the first slot of each row's window.
    window: `[B, L, T]` bool, the slots of the window that each query sees.
    num_slots: S; at least `start + T` in every row.
  """
  return lax.platform_dependent(
    start,
    window,
    cuda=functools.partial(_looked_up, num_slots=num_slots),
    default=functools.partial(_written, num_slots=num_slots),
  )


class SlotOps(NamedTuple):
  """The functions that go through the rows of a cache one by one.

  Others may take their place: kernels, or these functions applied to the part
  of the rows and heads that each of several devices has. `place` fixes where
  slots lie.
  """

  write: Callable[..., jax.Array] = write_slots
  read: Callable[[jax.Array, jax.Array, int], jax.Array] = read_slots
  mask: Callable[[jax.Array, jax.Array, int], jax.Array] = window_mask
  place: Callable[[jax.Array], jax.Array] = lambda slots: slots


AFTER_NORM = -1
"""The key of the states after the final norm in `KVCache.hidden`."""


class KVCache(flax.struct.PyTreeNode):
  """Keys and values of the tokens that a model has seen.

  They are an array each per layer, which kernels can update in place, or one
  array of all layers. On a GPU, where every operation on an array is a launch,
  a path is then kept by two operations, however many layers there are.
  """

  # `[B, H, S, Dh]` per layer; or one of `2 * layers * H` heads, first the keys
  # and then the values of each layer, and no `values`.
  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]  # `[B, H, S, Dh]` per layer.
  length: jax.Array  # `[B]` int32, the number of leading slots that are kept.
  # S; static, and known even of a model that keeps no layers.
  num_slots: int = flax.struct.field(pytree_node=False)
  ops: SlotOps = flax.struct.field(pytree_node=False, default=SlotOps())
  # Hidden states that are kept next to keys and values, `[B, 1, S, width]`. Key
  # i: the input of layer i, counted from 0; key `num_layers`: the output of the
  # last layer; key `AFTER_NORM`: the state after the final norm.
  hidden: Mapping[int, jax.Array] = flax.struct.field(default_factory=dict)
  # `[B]` int32, during a forward the first slot that it writes; None: `length`.
  start: jax.Array | None = None
  # The states of layers without keys and values, by layer; and `[B]` int32, the
  # tokens of the text at which they were marked, see `rewind`.
  recurrent: Mapping[int, recurrent_lib.Recurrent] = flax.struct.field(
    default_factory=dict
  )
  marked: jax.Array | None = None
  # During a forward, how many of its entries are written, the first ones; None:
  # all of them. Static.
  num_new: int | None = flax.struct.field(pytree_node=False, default=None)
  # H if all layers are in one array, else None; static.
  heads_together: int | None = flax.struct.field(
    pytree_node=False, default=None
  )

  @property
  def write_at(self) -> jax.Array:
    """`[B]` int32, the first slot that a forward writes."""
    return self.length if self.start is None else self.start

  def layer(self, layer: int) -> tuple[jax.Array, jax.Array]:
    """The keys and the values of a layer, `[B, H, S, Dh]` each."""
    if self.heads_together is None:
      return self.keys[layer], self.values[layer]
    heads = self.heads_together
    part = lambda first: self.keys[0][:, first : first + heads]
    return part(2 * layer * heads), part((2 * layer + 1) * heads)


def init_cache(
  batch_size: int,
  num_slots: int,
  *,
  num_heads: int,
  head_widths: Sequence[int],
  dtype: jax.typing.DTypeLike,
  together: bool = False,
) -> KVCache:
  """An empty cache, of zeros because a masked NaN would still spread.

  Args:
    batch_size: B.
    num_slots: S.
    num_heads: H, in every layer.
    head_widths: Dh of each layer that has keys and values.
    dtype: of these.
    together: whether all layers, of one width, are in one array.
  """

  def empty(heads: int, widths: Sequence[int]) -> tuple[jax.Array, ...]:
    shape = (batch_size, heads, num_slots)
    return tuple(jnp.zeros((*shape, width), dtype) for width in widths)

  return KVCache(
    keys=(
      empty(2 * len(head_widths) * num_heads, head_widths[:1])
      if together
      else empty(num_heads, head_widths)
    ),
    values=empty(num_heads, () if together else head_widths),
    length=jnp.zeros(batch_size, jnp.int32),
    num_slots=num_slots,
    heads_together=num_heads if together else None,
  )


init_empty_cache = functools.partial(
  init_cache, num_heads=1, head_widths=(), dtype=jnp.float32
)
"""`init_cache` of a model without layers, which keeps the lengths only."""


def finite(new: jax.Array) -> jax.Array:
  """Returns entries with zeros for NaN and inf.

  A masked NaN would still spread, since 0 x NaN is NaN, from a candidate to the
  whole tree. The logits of the candidate itself remain NaN.
  """
  return jnp.where(jnp.isfinite(new), new, 0)


def write(
  cache: KVCache, layer: int, key: jax.Array, value: jax.Array
) -> KVCache:
  """Writes a layer's L new entries from slot `write_at` on.

  `key` and `value` are `[B, H, L, Dh]`, in the dtype of the cache; NaN and inf
  are written as zeros. `length` stays, see `advance`. `write_at + L` is at most
  S in every row: `dynamic_update_slice` would shift the write silently.
  """

  def put(array: jax.Array, new: jax.Array, *first: int) -> jax.Array:
    new = finite(new)[:, :, : cache.num_new]
    return cache.ops.write(array, new, cache.write_at, *first)

  if cache.heads_together is None:
    keys, values = cache.layer(layer)
    return with_layer(cache, layer, put(keys, key), put(values, value))
  new = jnp.concatenate([key, value], axis=1)
  every = put(cache.keys[0], new, 2 * layer * cache.heads_together)
  return cache.replace(keys=(every, *cache.keys[1:]))


def with_layer(
  cache: KVCache, layer: int, keys: jax.Array, values: jax.Array
) -> KVCache:
  """The cache with other keys and values `[B, H, S, Dh]` of a layer."""

  def put(
    arrays: tuple[jax.Array, ...], array: jax.Array
  ) -> tuple[jax.Array, ...]:
    return (*arrays[:layer], array, *arrays[layer + 1 :])

  return cache.replace(
    keys=put(cache.keys, keys), values=put(cache.values, values)
  )


def with_hidden(
  cache: KVCache,
  widths: Mapping[int, int],
  dtype: jax.typing.DTypeLike,
) -> KVCache:
  """An empty cache that also keeps hidden states, of these widths by layer."""
  shape = (cache.length.shape[0], 1, cache.num_slots)
  hidden = {
    layer: jnp.zeros((*shape, width), dtype) for layer, width in widths.items()
  }
  return cache.replace(hidden=hidden)


def with_recurrent(
  cache: KVCache, layers: Mapping[int, recurrent_lib.Recurrent]
) -> KVCache:
  """An empty cache that also has recurrent layers."""
  marked = jnp.zeros_like(cache.length) if layers else None
  return cache.replace(recurrent=layers, marked=marked)


def with_window(cache: KVCache, num_slots: int) -> KVCache:
  """The cache with empty windows of `num_slots` in its recurrent layers."""
  resized = {
    layer: state.with_window(num_slots)
    for layer, state in cache.recurrent.items()
  }
  return cache.replace(recurrent=resized)


def write_hidden(
  cache: KVCache | None, layer: int, states: jax.Array
) -> KVCache | None:
  """Writes hidden states `[B, L, width]` as `write` does, if they are kept.

  `layer` is a key of `KVCache.hidden`. Nothing is written without a cache.
  """
  if cache is None or layer not in cache.hidden:
    return cache
  kept = cache.hidden[layer]
  # Rounding may make infinity.
  new = finite(states.astype(kept.dtype))[:, : cache.num_new]
  written = cache.ops.write(kept, new[:, None], cache.write_at)
  return cache.replace(hidden={**cache.hidden, layer: written})


def _lengthened(cache: KVCache, slots: jax.Array, count: jax.Array) -> KVCache:
  """Longer by the first `count [B]` of `slots [B, n]` of the window."""
  folded = {
    layer: state.fold(slots, count) for layer, state in cache.recurrent.items()
  }
  return cache.replace(length=cache.length + count, recurrent=folded)


def advance(cache: KVCache, count: jax.Array) -> KVCache:
  """Makes the next `count [B]` slots part of the text, in their order."""
  layers = cache.recurrent.values()
  size = max((layer.num_slots for layer in layers), default=0)
  slots = jnp.broadcast_to(jnp.arange(size)[None], (count.shape[0], size))
  return _lengthened(cache, slots, count)


def usable(cache: KVCache, length: jax.typing.ArrayLike) -> jax.Array:
  """`[B]` int32, how much of its text `rewind` would keep."""
  kept = jnp.minimum(cache.length, length)
  if cache.marked is None:
    return kept
  back = jnp.where(cache.marked <= kept, cache.marked, 0)
  return jnp.where(kept < cache.length, back, kept)


def rewind(cache: KVCache, length: jax.typing.ArrayLike) -> KVCache:
  """Goes back to the first `length [B]` tokens, where there are more.

  The states of recurrent layers cannot be cut. With such layers a row that has
  to go back goes to its mark, or to the start of the text if the mark is after
  `length`. So fewer tokens may be left, and must be read again.
  """
  left = usable(cache, length)
  if cache.marked is None:
    return cache.replace(length=left)
  stays = left == cache.length
  to_mark = left == cache.marked
  back = {
    layer: state.go_back(stays, to_mark)
    for layer, state in cache.recurrent.items()
  }
  marked = jnp.where(stays | to_mark, cache.marked, 0)
  return cache.replace(length=left, recurrent=back, marked=marked)


def mark(cache: KVCache) -> KVCache:
  """Marks the states of recurrent layers, so that `rewind` finds them."""
  if not cache.recurrent:
    return cache
  marks = {
    layer: state.replace(mark=state.state)
    for layer, state in cache.recurrent.items()
  }
  return cache.replace(recurrent=marks, marked=cache.length)


def _gathered(slots: jax.Array, offsets: jax.Array) -> jax.Array:
  """Slots `[B, H, n, Dh]` of `slots [B, H, W, Dh]` at `offsets [B, n]`."""
  pick = lambda slots, at: jnp.take(slots, at, axis=1, mode='clip')
  return jax.vmap(pick)(slots, offsets)


def _multiplied(slots: jax.Array, offsets: jax.Array) -> jax.Array:
  """`_gathered` by a product with zeros and ones, which is exact.

  A gather from the array that is then written to makes XLA's CPU backend copy
  the array.
  """
  taken = offsets[:, :, None] == jnp.arange(slots.shape[2])[None, None]
  kept = jnp.einsum(
    'bnw,bhwd->bhnd',
    taken.astype(slots.dtype),
    slots,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  return kept.astype(slots.dtype)


def keep(
  cache: KVCache,
  in_place: jax.Array,
  offsets: jax.Array,
  count: jax.Array,
  *,
  window: int,
) -> KVCache:
  """Keeps some of the entries in the window after `length`.

      slot           4   5   6   7   8     length 4, in_place 1, count 2,
      before         r   x   a   y   b     offsets (2, 4, 1), window 5
      after          r   a   b   x   .     length 7

  Args:
    cache: the cache; `length + in_place + n <= S` must hold in every row.
    in_place: `[B]` int32, entries at the start of the window that stay where
      they are; the others follow them.
    offsets: `[B, n]` int32, old slots of the entries, counted from `length`.
    count: `[B]` int32, the number of entries to keep.
    window: its size, larger than any offset; `length + window <= S`.
  """
  start = cache.length + in_place

  def move(array: jax.Array) -> jax.Array:
    kept = lax.platform_dependent(
      cache.ops.read(array, cache.length, window),
      offsets,
      cuda=_gathered,
      default=_multiplied,
    )
    return cache.ops.write(array, kept, start)

  with jax.named_scope('keep_path'):  # the name in profiles and compiled text
    moved = cache.replace(
      keys=tuple(map(move, cache.keys)),
      values=tuple(map(move, cache.values)),
      hidden=jax.tree.map(move, cache.hidden),
    )
  index = jnp.arange(window)[None] - in_place[:, None]
  moved_to = jnp.clip(index, 0, offsets.shape[1] - 1)
  slots = jnp.take_along_axis(offsets, moved_to, axis=1)
  slots = jnp.where(index < 0, jnp.arange(window)[None], slots)
  return _lengthened(moved, slots, in_place + count)
