"""An n-gram model as a drafter reads it: known contexts, likeliest next tokens.

The contexts form a trie that is read backwards, last token first, because that
is how a context backs off: the parent of "the old cat" is "old cat", then
"cat", then the empty context, which is the root. Looking a text up walks down
from the root until a child is missing, and what it reached is the longest known
context.
"""

from collections.abc import Mapping
import functools
import hashlib
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
from safetensors import numpy as safetensors_numpy

# The log-probability of an entry that is missing because fewer than K tokens
# can follow. Finite, as -inf minus -inf is not a number.
MISSING = -1e30

_FORMAT = 'specdec n-gram table 1'
# One JSON object under one key: safetensors writes keys in a random order, but
# equal tables should be equal files.
_KEY = 'ngram_table'


class NGramTable(flax.struct.PyTreeNode, kw_only=True):
  """The K likeliest next tokens of C contexts; a pytree with static sizes.

  Contexts are numbered breadth first, so the children of a context lie side by
  side, and context 0 is the empty one.

  Attributes:
    edge_token: `[C]` int32, the token by which a context is longer than its
      parent, its first token in reading order; 0, unused, at the root.
    first_child: `[C + 1]` int32; the children of context c are `first_child[c]`
      to `first_child[c + 1] - 1`, in ascending order of `edge_token`.
    next_tokens: `[C, K]` int32, likeliest first; 0 where missing.
    next_log_probs: `[C, K]` float32, of the whole back-off distribution;
      `MISSING` where missing.
    order: n; a context has at most n - 1 tokens. Static.
    vocab_size: V. Static.
  """

  edge_token: jax.Array
  first_child: jax.Array
  next_tokens: jax.Array
  next_log_probs: jax.Array
  order: int = flax.struct.field(pytree_node=False)
  vocab_size: int = flax.struct.field(pytree_node=False)

  @property
  def num_contexts(self) -> int:
    """C, the empty context included."""
    return self.edge_token.shape[0]

  @property
  def num_continuations(self) -> int:
    """K."""
    return self.next_tokens.shape[1]

  @property
  def num_probes(self) -> int:
    """Steps of the binary search for a child; static."""
    most_children = min(self.vocab_size, self.num_contexts - 1)
    return max(most_children - 1, 0).bit_length()

  @property
  def lookup_bytes(self) -> int:
    """Read by one lookup; the way to a context and its K next tokens.

    Counted are the elements themselves, all levels of the trie included, though
    a memory system fetches whole cache lines around them.
    """
    # The ends of the children, the probes, and the child that was found.
    per_level = 2 + self.num_probes + 1
    return 4 * ((self.order - 1) * per_level + 2 * self.num_continuations)


def _halve(table, end, token, step, child):
  """One step of the search for the last child whose token is at most `token`.

  Its offset is found bit by bit. Tokens are compared, not keys made of several:
  those need 64 bits.
  """
  probe = child + ((1 << table.num_probes) >> (step + 1))
  fits = jnp.take(table.edge_token, probe, mode='clip') <= token
  return jnp.where((probe < end) & fits, probe, child)


def _search_in_a_loop(table, start, end, token):
  step = functools.partial(_halve, table, end, token)
  return lax.fori_loop(0, table.num_probes, step, start)


def _search_unrolled(table, start, end, token):
  """Kernels for a few steps each, not several for each step."""
  child = start
  for step in range(table.num_probes):
    child = _halve(table, end, token, step, child)
  return child


def _find_child(
  table: NGramTable, context: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The child of each context by each token, and whether there is one."""
  start = table.first_child[context]
  end = table.first_child[context + 1]
  # Unrolled it compiles five times slower and is not faster on a CPU.
  child = lax.platform_dependent(
    table, start, end, token, cpu=_search_in_a_loop, default=_search_unrolled
  )
  found = jnp.take(table.edge_token, child, mode='clip') == token
  return child, found & (start < end)


def find_context(table: NGramTable, history: jax.Array) -> jax.Array:
  """The longest known context of each text.

  The number of steps depends on the sizes of the table alone, and any leading
  shape is looked up at once.

  Args:
    table: of order n.
    history: `[..., n - 1]` int32, the last tokens, the most recent FIRST; -1
      before the start of the text.

  Returns:
    `[...]` int32, below C; 0, the empty context, if the most recent token is
    not known.

  Raises:
    ValueError: the history has another width.
  """
  if history.shape[-1] != table.order - 1:
    raise ValueError(
      f'history must hold the last {table.order - 1} tokens for a table of'
      f' order {table.order}, got shape {history.shape}'
    )
  context = jnp.zeros(history.shape[:-1], jnp.int32)
  known = jnp.ones(context.shape, bool)
  for depth in range(table.order - 1):
    child, found = _find_child(table, context, history[..., depth])
    known &= found
    context = jnp.where(known, child, context)
  return context


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
  digest = hashlib.blake2b(digest_size=16)
  for name in sorted(tensors):
    digest.update(np.ascontiguousarray(tensors[name]).data)
  return digest.hexdigest()


def save_table(
  path: str | os.PathLike[str],
  table: NGramTable,
  provenance: Mapping[str, Any],
) -> None:
  """Writes a table as one safetensors file, all of it or nothing.

  Log-probabilities are rounded to float16 (to 0.1 %), and tokens take 16 bits
  where the vocabulary allows.

  Args:
    path: of the file; its folder is created if need be.
    table: to save.
    provenance: what the table was made of, as JSON.
  """
  path = pathlib.Path(path)
  token_dtype = np.uint16 if table.vocab_size <= 1 << 16 else np.int32
  with np.errstate(over='ignore'):  # MISSING becomes -inf.
    log_probs = np.asarray(table.next_log_probs).astype(np.float16)
  tensors = {
    'edge_token': np.asarray(table.edge_token).astype(token_dtype),
    'first_child': np.asarray(table.first_child),
    'next_tokens': np.asarray(table.next_tokens).astype(token_dtype),
    'next_log_probs': log_probs,
  }
  record = {
    'format': _FORMAT,
    'order': table.order,
    'vocab_size': table.vocab_size,
    'blake2b': _digest(tensors),
    'provenance': dict(provenance),
  }
  metadata = {_KEY: json.dumps(record)}
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + '.partial')
  safetensors_numpy.save_file(tensors, partial, metadata=metadata)
  partial.chmod(0o644)  # safetensors writes it for its owner alone.
  partial.replace(path)


def load_table(
  path: str | os.PathLike[str],
) -> tuple[NGramTable, dict[str, Any]]:
  """Reads what `save_table` wrote.

  Args:
    path: of the file.

  Returns:
    The table on the default device, and its provenance.

  Raises:
    ValueError: there is no such file, or it is no table, or it is damaged; says
      which and what to do.
  """
  remedy = 'build one with scripts/build_ngram.py'
  if not pathlib.Path(path).is_file():
    raise ValueError(f'there is no n-gram table {path}; {remedy}')
  try:
    with safetensors.safe_open(path, 'numpy') as file:
      record = json.loads((file.metadata() or {}).get(_KEY, '{}'))
      tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
  except (safetensors.SafetensorError, OSError, ValueError) as error:
    raise ValueError(
      f'{path} cannot be read as an n-gram table ({error}); copy it again or'
      f' {remedy}'
    ) from error
  if record.get('format') != _FORMAT:
    raise ValueError(
      f'{path} is not an n-gram table of this version ({_FORMAT!r}), its format'
      f' is {record.get("format")!r}; {remedy}'
    )
  if record['blake2b'] != _digest(tensors):
    raise ValueError(
      f'{path} is damaged, its contents do not match their checksum; copy it'
      f' again or {remedy}'
    )
  log_probs = tensors['next_log_probs'].astype(np.float32)
  table = NGramTable(
    edge_token=jnp.asarray(tensors['edge_token'], jnp.int32),
    first_child=jnp.asarray(tensors['first_child'], jnp.int32),
    next_tokens=jnp.asarray(tensors['next_tokens'], jnp.int32),
    next_log_probs=jnp.asarray(np.maximum(log_probs, np.float32(MISSING))),
    order=record['order'],
    vocab_size=record['vocab_size'],
  )
  return table, record['provenance']
