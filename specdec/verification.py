"""Match verification: a drafted token stands if the target chose it too.

The target's choice at every position is a function of its logits and of the
position alone (see `specdec.sampling`), so what is emitted is what plain
decoding would have emitted, whatever was drafted.
"""

import jax
import jax.numpy as jnp


def count_accepted(drafted: jax.Array, chosen: jax.Array) -> jax.Array:
  """How many leading drafted tokens equal the target's choices.

  Args:
    drafted: `[B, g]` int32.
    chosen: `[B, g + 1]` int32: what the target chose after the root and after
      each drafted token.

  Returns:
    `[B]` int32 in `0 ... g`. The tokens to emit are the first accepted + 1 of
    `chosen`: the accepted ones and the bonus token.
  """
  agrees = drafted == chosen[:, :-1]
  return jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)


def count_emitted(
  accepted: jax.Array,
  chosen: jax.Array,
  room: jax.Array,
  eos_ids: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
  """Cuts the accepted tokens and the bonus at the limit and after an EOS.

  Plain decoding goes through here with g = 0: one stop rule for all.

  Args:
    accepted: `[B]` int32 from `count_accepted`.
    chosen: `[B, g + 1]` int32.
    room: `[B]` int32, how many tokens may still be emitted; 0 for a row that
      is done.
    eos_ids: tokens that end a row; they are emitted themselves.

  Returns:
    `[B]` int32, how many of `chosen` to emit, and `[B]` bool, whether the row
    is done.
  """
  is_end = jnp.isin(chosen, jnp.array(eos_ids, jnp.int32))
  until_end = jnp.where(
    jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1) + 1, chosen.shape[1]
  )
  emitted = jnp.minimum(accepted + 1, jnp.minimum(until_end, room))
  kept = jnp.arange(chosen.shape[1])[None] < emitted[:, None]
  ended = jnp.any(is_end & kept, axis=1)
  return emitted.astype(jnp.int32), ended | (emitted >= room)
