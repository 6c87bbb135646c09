"""N-gram tables: known contexts and the K most probable next tokens of each.

The contexts form a trie that is read backwards, because a context backs off by
losing its first token: the parent of "the old cat" is "old cat", then "cat",
then the empty context, which is the root. A lookup walks down from the root
until a child is missing, and so reaches the longest known context.
"""

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import safetensors

from specdec.text import text_files
from specdec.text import whole_files

_FORMAT = 'specdec n-gram table 1'
# All metadata is one JSON object under one key: safetensors writes keys in a
# random order, but equal tables must give equal files.
_KEY = 'ngram_table'


class NGramTable(flax.struct.PyTreeNode, kw_only=True):
  """The K most probable next tokens of C contexts; a pytree.

  Contexts are numbered breadth first, so the children of a context are
  consecutive. Context 0 is the empty context.
  """

  # `[C]` int32, the first token of a context in reading order, by which it is
  # longer than its parent; 0, unused, at the root.
  edge_token: jax.Array
  # `[C + 1]` int32; the children of context c are `first_child[c]` to
  # `first_child[c + 1] - 1`, in ascending order of `edge_token`.
  first_child: jax.Array
  # `[C, K]` int32, most probable first; 0 where missing.
  next_tokens: jax.Array
  # `[C, K]` float32, of the whole back-off distribution; -inf where fewer than
  # K tokens can follow.
  next_log_probs: jax.Array
  # `[V]` int32, the child of context 0 by each token; 0 where there is none.
  of_token: jax.Array
  # n; a context has at most n - 1 tokens.
  order: int = flax.struct.field(pytree_node=False)
  vocab_size: int = flax.struct.field(pytree_node=False)
  # The steps of the binary search for a child of another context.
  num_probes: int = flax.struct.field(pytree_node=False)

  @classmethod
  def make(
    cls,
    *,
    edge_token: np.ndarray,
    first_child: np.ndarray,
    next_tokens: np.ndarray,
    next_log_probs: np.ndarray,
    order: int,
    vocab_size: int,
  ) -> 'NGramTable':
    """A table on the default device; the arguments are its fields."""
    of_token = np.zeros(vocab_size, np.int32)
    children = np.arange(1, first_child[1])
    of_token[edge_token[children]] = children
    most_children = int(np.max(np.diff(first_child)[1:], initial=1))
    num_probes = (most_children - 1).bit_length()
    return cls(
      edge_token=jnp.asarray(edge_token, jnp.int32),
      first_child=jnp.asarray(first_child, jnp.int32),
      next_tokens=jnp.asarray(next_tokens, jnp.int32),
      next_log_probs=jnp.asarray(next_log_probs, jnp.float32),
      of_token=jnp.asarray(of_token),
      order=order,
      vocab_size=vocab_size,
      # Tables of about one size share a program.
      num_probes=num_probes + -num_probes % 4,
    )

  @property
  def num_contexts(self) -> int:
    """C, which includes the empty context."""
    return self.edge_token.shape[0]

  @property
  def num_continuations(self) -> int:
    """K."""
    return self.next_tokens.shape[1]

  @property
  def lookup_bytes(self) -> int:
    """The bytes that one lookup reads; whole cache lines are not counted."""
    if self.order == 1:
      return 4 * 2 * self.num_continuations
    per_level = 2 + self.num_probes + 1  # range of children, probes, child
    levels = 1 + (self.order - 2) * per_level
    return 4 * (levels + 2 * self.num_continuations)


def _find_child(
  table: NGramTable, context: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The child of each context by each token, and whether it exists."""
  first = lambda context: jnp.take(table.first_child, context, mode='clip')
  start, end = first(context), first(context + 1)

  # Finds the last child with at most the token, bit by bit; by tokens, because
  # keys of (parent, token) would need 64 bits.
  def halve(step: jax.Array | int, child: jax.Array) -> jax.Array:
    probe = child + ((1 << table.num_probes) >> (step + 1))
    fits = jnp.take(table.edge_token, probe, mode='clip') <= token
    return jnp.where((probe < end) & fits, probe, child)

  # On a CPU the unrolled search compiles five times slower and is not faster;
  # elsewhere XLA fuses several of its steps into a kernel.
  def unrolled(child: jax.Array) -> jax.Array:
    for step in range(table.num_probes):
      child = halve(step, child)
    return child

  looped = lambda start: lax.fori_loop(0, table.num_probes, halve, start)
  child = lax.platform_dependent(start, cpu=looped, default=unrolled)
  is_child = jnp.take(table.edge_token, child, mode='clip') == token
  return child, is_child & (start < end)


def find_context(table: NGramTable, history: jax.Array) -> jax.Array:
  """The longest known context of each text, `[...]` int32; 0 if it is empty.

  `history`: `[..., n - 1]` int32, the last tokens of each text for a table of
  order n, the most recent FIRST; -1 before the start of the text. Raises
  ValueError if the last axis is not n - 1.
  """
  if history.shape[-1] != table.order - 1:
    raise ValueError(
      f'history must hold the last {table.order - 1} tokens for a table of'
      f' order {table.order}, got shape {history.shape}'
    )
  if table.order == 1:
    return jnp.zeros(history.shape[:-1], jnp.int32)
  # The root has the most children, so they are not searched.
  context = jnp.take(table.of_token, history[..., 0], mode='clip')
  context = jnp.where(history[..., 0] >= 0, context, 0)
  is_known = context > 0
  for depth in range(1, table.order - 1):
    child, exists = _find_child(table, context, history[..., depth])
    is_known &= exists
    context = jnp.where(is_known, child, context)
  return context


def _dtypes(vocab_size: int) -> dict[str, Any]:
  """The dtypes in which the tensors of a table are stored, by name."""
  token = np.uint16 if vocab_size <= 1 << 16 else np.int32
  return {
    'edge_token': token,
    'first_child': np.int32,
    'next_tokens': token,
    'next_log_probs': np.float16,
  }


def save_table(
  path: str | os.PathLike[str], table: NGramTable, provenance: Mapping[str, Any]
) -> None:
  """Writes a table to a safetensors file, atomically.

  Log-probabilities are rounded to float16 (relative error 0.1 %). The folder is
  created if it does not exist; `provenance`, what the table was built from,
  must be serializable as JSON.
  """
  tensors = {
    name: np.asarray(getattr(table, name)).astype(dtype)
    for name, dtype in _dtypes(table.vocab_size).items()
  }
  record = {
    'format': _FORMAT,
    'order': table.order,
    'vocab_size': table.vocab_size,
    'provenance': dict(provenance),
  }
  whole_files.write_tensors(path, tensors, {_KEY: text_files.to_json(record)})


def _check(
  record: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
  """Raises an error of `whole_files.reading` if entries do not fit."""
  for key, kind in (('order', int), ('vocab_size', int), ('provenance', dict)):
    if type(record[key]) is not kind:
      raise ValueError(f'{key} is {record[key]!r:.40}')
  shape = tensors['next_tokens'].shape
  shapes = {'edge_token': shape[:1], 'first_child': (shape[0] + 1,)}
  for name, dtype in _dtypes(record['vocab_size']).items():
    found = tensors[name]
    if (found.dtype, found.shape) != (dtype, shapes.get(name, shape)):
      raise ValueError(f'{name} is {found.dtype}{[*found.shape]}')


def load_table(
  path: str | os.PathLike[str],
) -> tuple[NGramTable, dict[str, Any]]:
  """Reads the table (to the default device) and provenance of `save_table`.

  Raises ValueError if the file does not exist or is not a table.
  """
  remedy = 'build one with scripts/build_ngram.py'
  if not pathlib.Path(path).is_file():
    raise ValueError(f'there is no n-gram table {path}; {remedy}')
  text_files.refuse_stand_in(path)
  with whole_files.reading(
    f'n-gram table {path}', f'copy it again or {remedy}'
  ):
    with safetensors.safe_open(path, 'numpy') as file:
      record = json.loads((file.metadata() or {}).get(_KEY, '{}'))
      tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    if not isinstance(record, dict) or record.get('format') != _FORMAT:
      raise ValueError(f'it is no table of this version ({_FORMAT!r})')
    _check(record, tensors)
    table = NGramTable.make(
      order=record['order'], vocab_size=record['vocab_size'], **tensors
    )
  return table, record['provenance']
