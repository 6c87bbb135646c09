"""Randomness of a decode: noise of positions and draws of steps, from row keys.

The noise of token x at the absolute position t is a Gumbel variable of

    fold_in(fold_in(row key, t), x)

so the noise of a few tokens can be drawn without the noise of all others, and
has the same bits.
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.tree import tree as tree_lib


def _gumbel(bits: jax.Array) -> jax.Array:
  """A standard Gumbel variable, float32, of each of `bits` uint32.

  With threefry keys it is what `jax.random.gumbel` draws for a vocabulary.
  """
  tiny = np.finfo(np.float32).tiny
  one = np.float32(1).view(np.uint32)
  in_1_2 = lax.bitcast_convert_type(bits >> np.uint32(9) | one, jnp.float32)
  uniform = jnp.maximum(in_1_2 - 1 + tiny, tiny)
  return -jnp.log(-jnp.log(uniform))


def _of_token(key: jax.Array, token: jax.Array) -> jax.Array:
  """The noise of one token under the key of a position."""
  words = jax.random.key_data(jax.random.fold_in(key, token))
  return _gumbel(words[0] ^ words[1])


class DrawnNoise(flax.struct.PyTreeNode):
  """Standard Gumbel noise at L positions, drawn for the tokens asked for."""

  keys: jax.Array  #: `[B, L]` keys of the positions.
  is_drawn: jax.Array  #: `[B]` bool, rows that have noise; others have 0.
  #: `[N]` int32, the tokens that there are, each called by its place among
  #: them; None: the vocabulary.
  tokens: jax.Array | None = None

  @property
  def num_positions(self) -> int:
    """L."""
    return self.keys.shape[1]

  def at(self, index: jax.Array) -> 'DrawnNoise':
    """The noise at the positions `index [B, W]`, so that L becomes W."""
    return self.replace(keys=jax.vmap(tree_lib.pick)(self.keys, index))

  def among(self, tokens: jax.Array) -> 'DrawnNoise':
    """The noise of `tokens [N]` alone, so that V becomes N."""
    return self.replace(tokens=tokens)

  def of_tokens(self, tokens: jax.Array) -> jax.Array:
    """`[B, L, n]` float32, of `tokens [B, L, n]` int32."""
    tokens = tokens if self.tokens is None else self.tokens[tokens]
    draw = jax.vmap(jax.vmap(jax.vmap(_of_token, (None, 0))))
    return self._where_drawn(draw(self.keys, tokens))

  def of_all(self, vocab_size: int) -> jax.Array:
    """`[B, L, V]` float32; if no row has noise, none is drawn."""
    size = vocab_size if self.tokens is None else len(self.tokens)

    def draw(keys: jax.Array) -> jax.Array:
      tokens = jnp.arange(vocab_size) if self.tokens is None else self.tokens
      # The bits of `jax.random.gumbel` depend on `jax_threefry_partitionable`.
      of_position = lambda key: jax.vmap(_of_token, (None, 0))(key, tokens)
      return self._where_drawn(jax.vmap(jax.vmap(of_position))(keys))

    return lax.cond(
      jnp.any(self.is_drawn),
      draw,
      lambda keys: jnp.zeros((*keys.shape, size)),
      self.keys,
    )

  def _where_drawn(self, noise: jax.Array) -> jax.Array:
    return jnp.where(self.is_drawn[:, None, None], noise, 0.0)


class NoiseTable(flax.struct.PyTreeNode):
  """Noise of all tokens that is in memory; see `DrawnNoise`."""

  table: jax.Array  #: `[B, n, V]` float32.
  #: `[B, L]` int32, the positions in the table. Its rows, which are long, are
  #: not looked up before they are wanted.
  index: jax.Array
  tokens: jax.Array | None = None

  @property
  def num_positions(self) -> int:
    """L."""
    return self.index.shape[1]

  def at(self, index: jax.Array) -> 'NoiseTable':
    return self.replace(index=jax.vmap(tree_lib.pick)(self.index, index))

  def among(self, tokens: jax.Array) -> 'NoiseTable':
    return self.replace(tokens=tokens)

  def of_tokens(self, tokens: jax.Array) -> jax.Array:
    tokens = tokens if self.tokens is None else self.tokens[tokens]
    of_row = lambda table, index, tokens: table[index[:, None], tokens]
    return jax.vmap(of_row)(self.table, self.index, tokens)

  def of_all(self, vocab_size: int) -> jax.Array:
    del vocab_size
    of_all = jax.vmap(tree_lib.pick)(self.table, self.index)
    return of_all if self.tokens is None else of_all[..., self.tokens]


Noise = DrawnNoise | NoiseTable


def noise_table(table: jax.Array) -> NoiseTable:
  """`table [B, L, V]` as the noise of L positions."""
  index = np.broadcast_to(np.arange(table.shape[1]), table.shape[:2])
  return NoiseTable(table=table, index=jnp.asarray(index))


def position_noise(
  row_keys: jax.Array, positions: jax.Array, is_drawn: jax.Array
) -> DrawnNoise:
  """The noise of the tokens at absolute positions.

  Args:
    row_keys: `[B]` keys; not consumed, the same keys serve every position.
    positions: `[B, L]` int32.
    is_drawn: `[B]` bool, rows that have noise; others have 0.
  """
  fold_in = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
  return DrawnNoise(keys=fold_in(row_keys, positions), is_drawn=is_drawn)


# Streams of randomness that belong to a step, not to a position. They are far
# from any position, so that none is ever a stream of `position_noise`.
DRAFTING, ACCEPTANCE, RESIDUAL = (2**31 - 1 - stream for stream in range(3))


def step_keys(row_keys: jax.Array, stream: int, length: jax.Array) -> jax.Array:
  """`[B]` keys that no other step and no other stream has.

  `stream` is `DRAFTING`, `ACCEPTANCE` or `RESIDUAL`. `length [B]` is the length
  of the text when the step begins; every step increases it.
  """
  of_stream = jax.vmap(jax.random.fold_in, (0, None))(row_keys, stream)
  return jax.vmap(jax.random.fold_in)(of_stream, length)


class Randomness(flax.struct.PyTreeNode):
  """The randomness of a step; what a rule does not use is not computed."""

  #: `[B, D + 1]` positions; entry d is the one that follows nodes of depth d.
  #: Drafts share it with the target; zeros under a rule that does not
  #: (`verify.accept.Rule.shares_noise`).
  noise: Noise
  draft_keys: jax.Array  #: `[B]` keys, for drawing children.
  uniforms: jax.Array  #: `[B, N]` float32 in [0, 1), for accepting the nodes.
  #: `[B, V]` float32, standard Gumbel, for the bonus token.
  residual_noise: jax.Array


def step_randomness(
  row_keys: jax.Array,
  length: jax.Array,
  is_drawn: jax.Array,
  *,
  max_depth: int,
  num_nodes: int,
  vocab_size: int,
  wants_all: bool,
) -> Randomness:
  """The randomness of the step that begins at `length [B]` of the texts.

  D, N and V give the sizes. Rows have noise where `is_drawn [B]`; noise of all
  tokens, if it is wanted, is drawn once. `row_keys [B]` are not consumed.
  """
  positions = length[:, None] + jnp.arange(max_depth + 1)[None]
  drawn = position_noise(row_keys, positions, is_drawn)
  uniform = lambda key: jax.random.uniform(key, (num_nodes,))
  gumbel = lambda key: jax.random.gumbel(key, (vocab_size,))
  return Randomness(
    noise=noise_table(drawn.of_all(vocab_size)) if wants_all else drawn,
    draft_keys=step_keys(row_keys, DRAFTING, length),
    uniforms=jax.vmap(uniform)(step_keys(row_keys, ACCEPTANCE, length)),
    residual_noise=jax.vmap(gumbel)(step_keys(row_keys, RESIDUAL, length)),
  )
