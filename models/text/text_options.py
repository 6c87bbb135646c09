"""The options of a decode of texts."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.text import ends as ends_lib
from models.text import pair as pair_lib
from specdec import checks as checks_lib
from specdec import decode_options


@decode_options.documented(decode_options.CommonOptions)
class TextOptions(decode_options.CommonOptions, total=False):
  """Options of all methods of a `models.Generator`; each may be left out.

  Keyword Args:
    seed: of the sampling. One seed per row gives a row the same tokens in any
      batch; row 0 of a single seed has those of that seed alone.
    stop: stop strings: one, several, or a list of them per row. The text ends
      before the first of them. They may name special tokens, which are looked
      for as such: `<|im_end|>` ends the text at this token.
    eos_ids: tokens that end a row, as ids or as texts of one token each. None:
      those of `models.load`; `()`: none.
  """

  seed: int | Sequence[int]
  stop: ends_lib.Stops
  eos_ids: ends_lib.EosIds | None


def with_ids(
  pair: pair_lib.Pair, options: TextOptions, stops: ends_lib.StopsOfRows
) -> Any:
  """The options with ids for texts; `stops` are the stop strings by row."""
  vocab_size, given = pair.target.spec.vocab_size, options.get('eos_ids')
  eos_ids = ends_lib.eos_ids_of(given, pair.tokenizer, vocab_size)
  return options | {
    'stop': ends_lib.stop_table(stops, pair.tokenizer, vocab_size),
    'eos_ids': pair.eos_ids if given is None else eos_ids,
  }


def keys_of_seeds(seed: int | Sequence[int], batch_size: int) -> jax.Array:
  """The keys of each row, `[B]`, from one seed or one per row.

  Raises:
    ValueError: there are other than B seeds, or a seed is no integer.
  """
  seeds = seed if isinstance(seed, Sequence) else [seed]
  for value in seeds:
    # JAX takes the lower 32 bits of larger integers without an error.
    if not (checks_lib.is_integer(value) and -(2**31) <= value < 2**32):
      raise ValueError(
        f'seed must be an integer of 32 bits, or one per row, got {seed!r}'
      )
  if not isinstance(seed, Sequence):
    return checks_lib.row_keys(jax.random.key(seed), batch_size)
  if len(seeds) != batch_size:
    raise ValueError(
      f'seed must be one integer or one per row ({batch_size}), got'
      f' {len(seeds)}'
    )
  keys = [checks_lib.row_keys(jax.random.key(value), 1)[0] for value in seeds]
  return jnp.stack(keys)
