"""The options of texts: as users state them, and as ids that a decode takes."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import cast

import jax
import jax.numpy as jnp

import specdec
from specdec import arguments as arguments_lib
from specdec import decode_options
from specdec.models.text import chat_template
from specdec.models.text import constraints as constraints_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.models.text import vocabulary as vocabulary_lib
from specdec.text import automaton as automaton_lib
from specdec.text import sections as sections_lib
from specdec.text import stop_strings

# One stop string, several, or a list of them per row.
Stops = str | Sequence[str] | Sequence[Sequence[str]]
StopsOfRows = tuple[tuple[str, ...], ...]


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
  stop: Stops
  eos_ids: vocabulary_lib.EosIds | None
  regex: constraints_lib.Regex | None
  json_schema: constraints_lib.Schema | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Prompts and their options, checked: what `specdec.Decoding` takes."""

  prompts: Sequence[chat_template.Prompt]  #: As the user gave them, B of them.
  ids: list[list[int]]  #: The tokens of each prompt.
  row_keys: jax.Array  #: `[B]`.
  stops: StopsOfRows  #: The stop strings of each row.
  constrained: list[bool]  #: By row, whether it has a constraint.
  sections: list[int]  #: By row, see `first_sections`.
  options: decode_options.Options  #: All other options, for all rows.


def make_request(
  pair: pair_lib.Pair,
  prompts: Sequence[chat_template.Prompt],
  options: TextOptions,
) -> Request:
  """The request of B prompts.

  Raises:
    TypeError: an option is not known.
    ValueError: a prompt or an option cannot be used; gives the reason.
  """
  decode_options.check_names(options, TextOptions)
  num_rows, vocab_size = len(prompts), pair.target.spec.vocab_size
  ids = arguments_lib.to_prompts(pair.ids_of(prompts), vocab_size)
  constraints = constraints_of_rows(options, num_rows)
  row_keys = keys_of_seeds(options.get('seed', 0), num_rows)
  stops = stops_of_rows(options.get('stop', ()), num_rows)
  constrained = [constraint is not None for constraint in constraints]
  sections = first_sections(pair, prompts, constrained)
  shared = with_ids(pair, options, stops, sections)
  shared['constraint'] = _tables_of_rows(pair, constraints, shared['eos_ids'])
  return Request(
    prompts=prompts,
    ids=ids,
    row_keys=row_keys,
    stops=stops,
    constrained=constrained,
    sections=sections,
    options=shared,
  )


def with_ids(
  pair: pair_lib.Pair,
  options: TextOptions,
  stops: StopsOfRows,
  sections: Sequence[int] | None = None,
) -> decode_options.Options:
  """The options with ids for texts; without seeds and constraints.

  `stops` are the stop strings of each row, `sections` the sections in which
  their texts begin; None: they are given later.
  """
  vocab_size = pair.target.spec.vocab_size
  table: stop_strings.StopTable | None = None
  if any(stops):
    special = token_bytes_lib.special_tokens(pair.tokenizer, vocab_size)
    table = _stop_table(
      stops, pair.token_bytes(), tuple(special.items()), pair.sections
    )
    if sections is not None:
      table = table.in_sections(sections)
  eos_ids = options.get('eos_ids')
  others = {
    name: value
    for name, value in options.items()
    if name in decode_options.CommonOptions.__optional_keys__
  }
  return {
    **cast(decode_options.CommonOptions, others),
    'constraint': None,
    'stop': table,
    'eos_ids': pair.eos_ids
    if eos_ids is None
    else vocabulary_lib.ids_of_eos(eos_ids, pair.tokenizer, vocab_size),
  }


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


def first_sections(
  pair: pair_lib.Pair,
  prompts: Sequence[chat_template.Prompt],
  constrained: Sequence[bool],
) -> list[int]:
  """The section of `Pair.sections` in which the text of each row begins.

  A constraint applies to all that a row says, so nothing is reasoning then.
  """
  plain = len(pair.sections) - 1
  return [
    plain if is_constrained else pair.section_after(prompt)
    for prompt, is_constrained in zip(prompts, constrained, strict=True)
  ]


def stops_of_rows(stop: Any, batch_size: int) -> StopsOfRows:
  """`Stops` as the stop strings of each row.

  Raises:
    ValueError: the number of lists is not B, or a stop string is empty or not
      Unicode.
  """
  are_texts = lambda values: (
    isinstance(values, Sequence)
    and not isinstance(values, str)
    and all(isinstance(text, str) for text in values)
  )
  if isinstance(stop, str):
    stop = [stop]
  if are_texts(stop):
    stop = [stop] * batch_size
  is_list = isinstance(stop, Sequence) and all(map(are_texts, stop))
  if not is_list or len(stop) != batch_size:
    raise ValueError(
      'stop must be a string, a list of strings, or one list of strings per row'
      f' ({batch_size}), got {stop!r}'
    )
  for row, strings in enumerate(stop):
    for text in strings:
      arguments_lib.check_text(f'a stop string of row {row}', text)
      if not text:
        raise ValueError(f'row {row} has the stop string {text!r}; give text')
  return tuple(map(tuple, stop))


# Building a table takes a moment where the vocabulary is large.
@functools.lru_cache(maxsize=16)
def _stop_table(
  stops: StopsOfRows,
  pieces: tuple[bytes, ...],
  special: tuple[tuple[bytes, int], ...],
  sections: sections_lib.Sections,
) -> stop_strings.StopTable:
  encoded = [[stop.encode() for stop in row] for row in stops]
  return stop_strings.build_stop_table(
    encoded, pieces, len(pieces), dict(special), sections
  )


def constraints_of_rows(
  options: TextOptions, batch_size: int
) -> list[constraints_lib.Constraint]:
  """`regex` or `json_schema` of each row.

  Raises:
    ValueError: the number of values is not B, or a row has both.
  """

  def per_row(name: str, values: Any) -> Iterable[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
      return [values] * batch_size
    if len(values) != batch_size:
      raise ValueError(
        f'{name} must be one, or one per row ({batch_size}), got {len(values)}'
      )
    return values

  regex = per_row('regex', options.get('regex'))
  schema = per_row('json_schema', options.get('json_schema'))
  return [*map(constraints_lib.constraint_of, regex, schema)]


def _tables_of_rows(
  pair: pair_lib.Pair,
  rows: Sequence[constraints_lib.Constraint],
  eos_ids: Sequence[int],
) -> specdec.Constraint | None:
  """The constraint of a batch; None if no row has one."""
  if not any(rows):
    return None
  vocab_size = pair.target.spec.vocab_size
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
