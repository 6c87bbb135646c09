"""The options of a decode of texts."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import specdec
from specdec import arguments as arguments_lib
from specdec import decode_options
from specdec.models.text import constraints as constraints_lib
from specdec.models.text import ends as ends_lib
from specdec.models.text import pair as pair_lib
from specdec.text import automaton as automaton_lib


@decode_options.documented(decode_options.CommonOptions)
class TextOptions(decode_options.CommonOptions, total=False):
  """Options of all methods of a `specdec.Generator`; each may be left out.

  Keyword Args:
    seed: of the sampling. One seed per row gives a row the same tokens in any
      batch. With a single seed, row 0 gets the tokens of a batch of one row.
    stop: stop strings: one, several, or a list of them per row. The text ends
      before the first of them. They may name special tokens, which are looked
      for as such: `<|im_end|>` ends the text at this token.
    eos_ids: tokens that end a row, as ids or as texts of one token each. None:
      as given to `specdec.load`; `()`: none.
    regex: an expression of Python's `re` that all of a text must match, or one
      per row (None: no constraint), see `models/text/constraints`. The text
      ends where it matches and the target ends it; `max_new_tokens` may end it
      before.
    json_schema: a JSON schema in place of `regex`, as a dict or as its text.
  """

  seed: int | Sequence[int]
  stop: ends_lib.Stops
  eos_ids: ends_lib.EosIds | None
  regex: constraints_lib.Regex | None
  json_schema: constraints_lib.Schema | None


_TEXT_ONLY = 'seed', 'regex', 'json_schema'


def of_texts(options: TextOptions) -> Any:
  """The options that a decode of token ids does not have."""
  return {name: value for name, value in options.items() if name in _TEXT_ONLY}


def _eos_ids(pair: pair_lib.Pair, options: TextOptions) -> Any:
  """The ids of tokens that end a text, see `ends.eos_ids_of`."""
  if options.get('eos_ids') is None:
    return pair.eos_ids
  return ends_lib.eos_ids_of(
    options['eos_ids'], pair.tokenizer, pair.target.spec.vocab_size
  )


def with_ids(
  pair: pair_lib.Pair,
  options: TextOptions,
  stops: ends_lib.StopsOfRows,
  sections: Sequence[int] | None = None,
) -> Any:
  """The options with ids for texts; without seeds and constraints.

  `stops` are the stop strings of each row, `sections` the sections in which
  their texts begin; None: they are given later.
  """
  vocab_size = pair.target.spec.vocab_size
  others = {
    name: value for name, value in options.items() if name not in _TEXT_ONLY
  }
  table = ends_lib.stop_table(stops, pair.tokenizer, vocab_size, pair.sections)
  if table is not None and sections is not None:
    table = table.in_sections(sections)
  return others | {'stop': table, 'eos_ids': _eos_ids(pair, options)}


def _per_row(options: TextOptions, name: str, batch_size: int) -> Sequence[Any]:
  values: Any = options.get(name)
  if not isinstance(values, Sequence) or isinstance(values, str):
    return [values] * batch_size
  if len(values) != batch_size:
    raise ValueError(
      f'{name} must be one, or one per row ({batch_size}), got {len(values)}'
    )
  return values


def constraints_of_rows(
  options: TextOptions, batch_size: int
) -> list[constraints_lib.Constraint]:
  """`regex` or `json_schema` of each row.

  Raises:
    ValueError: the number of values is not B, or a row has both.
  """
  given = (
    _per_row(options, name, batch_size) for name in ('regex', 'json_schema')
  )
  return [*map(constraints_lib.constraint_of, *given)]


def automata_of_rows(
  pair: pair_lib.Pair,
  options: TextOptions,
  rows: Sequence[constraints_lib.Constraint],
) -> specdec.Constraint | None:
  """The constraint of a batch; None if no row has one.

  Raises:
    ValueError: a constraint cannot be used.
  """
  vocab_size, eos_ids = pair.target.spec.vocab_size, _eos_ids(pair, options)
  if not any(rows):
    return None
  automata = {
    constraint: constraints_lib.automaton_of(
      constraint, pair.tokenizer, vocab_size, eos_ids
    )
    for constraint in rows
  }
  # One set of tables serves rows that all have the same constraint.
  distinct = rows if len(automata) > 1 else rows[:1]
  per_row = [automata[constraint] for constraint in distinct]
  return automaton_lib.stack(per_row, vocab_size)


def keys_of_seeds(seed: int | Sequence[int], batch_size: int) -> jax.Array:
  """The keys of each row, `[B]`, from one seed or one per row.

  Raises:
    ValueError: the number of seeds is not B, or a seed is not an integer.
  """
  seeds = seed if isinstance(seed, Sequence) else [seed]
  for value in seeds:
    # JAX takes the lower 32 bits of larger integers without an error.
    if not (arguments_lib.is_integer(value) and -(2**31) <= value < 2**32):
      raise ValueError(
        f'seed must be an integer of 32 bits, or one per row, got {seed!r}'
      )
  if not isinstance(seed, Sequence):
    return arguments_lib.row_keys(jax.random.key(seed), batch_size)
  if len(seeds) != batch_size:
    raise ValueError(
      f'seed must be one integer or one per row ({batch_size}), got'
      f' {len(seeds)}'
    )
  keys = [
    arguments_lib.row_keys(jax.random.key(value), 1)[0] for value in seeds
  ]
  return jnp.stack(keys)
