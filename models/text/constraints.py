r"""Expressions and JSON schemas that a text must match.

An expression is in the syntax of Python's `re`, and the texts are those that
`re.fullmatch` accepts. Look-around, back references, conditional and atomic
groups, possessive quantifiers, `\b` and `\B` are refused, and so are anchors,
except at the beginning and the end of a text, where they say nothing.

A schema follows JSON Schema 2020-12, and the texts are JSON that conforms to
it. The keywords are `type`, `enum`, `const`, `anyOf`, `allOf` with one schema,
`$ref` within the schema and without recursion, `properties`, `required`,
`additionalProperties`, `prefixItems`, `items`, `minItems`, `maxItems`,
`minLength`, `maxLength`, `pattern` and `format`, one of `date`, `time`,
`date-time`, `email`, `uri` and `uuid`. Annotations such as a title are ignored,
and so are names that begin with `x-`, `uniqueItems: false` and
`minProperties: 0`. Every other keyword is refused. So are two keywords for one
string, except `minLength` with `maxLength`, and keywords next to `$ref`,
`allOf`, `anyOf`, `const` or `enum`, except `type` next to the last two.

Not all JSON that conforms is such a text. An object has the properties that its
schema names, in their order and no others; if it names none, it has any, with
`additionalProperties`. Without `type`, values are of the types that the other
keywords are about. Values that the schema does not describe have two levels of
arrays and objects at most. An integer has no fraction and no exponent. Strings
and constants are spelled as by `json.dumps`, other values with a space or none
between their parts. A pattern is an expression of ECMA-262 that matches
anywhere in a string. Whatever is refused in `regex` is refused there, too, and
so are flags in an expression and classes of Unicode, `\p`.

Long repetitions are counted and need hardly any states: `maxLength`,
`minLength`, `maxItems` and `minItems` up to 100,000, and `{m,n}`. The next byte
of a text must say whether the repetition goes on, as in `\w{1,64}@` and not in
`\w{1,64}foo`, and each byte must be a token. Otherwise each number of times
needs states. If they are too many, the message names the longest repetition.

Both become trees (`models/text/expression`, `models/text/ecma_pattern`),
automata over bytes (`models/text/byte_automaton`) and then over tokens
(`specdec.text.automaton`).
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
from typing import Any

import transformers

from specdec import arguments as arguments_lib
from specdec.models.text import byte_automaton
from specdec.models.text import expression
from specdec.models.text import json_schema
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import automaton as automaton_lib

# An expression of Python's `re`; a schema as JSON text or as a mapping. One, or
# one per row; None: the row has no constraint.
Regex = str | Sequence[str | None]
Schema = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | None]

# `regex` or `json_schema`, and its text; None: anything may follow.
Constraint = tuple[str, str] | None


def _text_of(name: str, value: Any) -> str:
  """The text of an expression or schema."""
  if name == 'json_schema' and isinstance(value, Mapping):
    try:
      return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
      raise ValueError(
        f'json_schema cannot be written as JSON: {error}'
      ) from error
  if not isinstance(value, str):
    is_regex = name == 'regex'
    expected = 'text' if is_regex else 'a JSON object, or the text of one'
    raise ValueError(f'{name} must be {expected}, got {value!r}')
  arguments_lib.check_text(name, value)
  return value


def constraint_of(regex: Any, json_schema: Any) -> Constraint:
  """The constraint of a row, from one of two; the other is None.

  Raises:
    ValueError: both are given, or one is neither text nor schema.
  """
  if regex is not None and json_schema is not None:
    raise ValueError('give regex or json_schema, not both')
  if regex is not None:
    return 'regex', _text_of('regex', regex)
  if json_schema is not None:
    return 'json_schema', _text_of('json_schema', json_schema)
  return None


# Building an automaton takes a moment where the vocabulary is large.
@functools.lru_cache(maxsize=64)
def _automaton(
  constraint: tuple[str, str],
  pieces: tuple[bytes, ...],
  vocab_size: int,
  eos_ids: tuple[int, ...],
) -> automaton_lib.Automaton:
  name, text = constraint
  parse = expression.parse if name == 'regex' else json_schema.parse
  short = ' '.join(text.split())
  short = short if len(short) <= 60 else f'{short[:57]}...'
  named = f'{name} {short!r}'
  try:
    tree = parse(text)
    delta, accepting, counts = byte_automaton.counting(tree)
    if counts and not automaton_lib.can_spell(delta, pieces, eos_ids):
      delta, accepting = byte_automaton.of_tree(tree)
      counts = None
    return automaton_lib.of_bytes(
      delta, accepting, pieces, vocab_size, eos_ids, counts
    )
  except automaton_lib.TooLarge as error:
    raise ValueError(
      f'{named} is too large: {error}; choose smaller numbers of repetitions'
    ) from error
  except automaton_lib.Unspeakable as error:
    raise ValueError(
      f'{named} matches no text that the tokens of the target can spell'
    ) from error
  except RecursionError as error:
    raise ValueError(f'{named} is nested too deeply') from error
  except ValueError as error:
    raise ValueError(f'{named} cannot be used: {error}') from error


def automaton_of(
  constraint: Constraint,
  tokenizer: transformers.PreTrainedTokenizerBase,
  vocab_size: int,
  eos_ids: Any,
) -> automaton_lib.Automaton | None:
  """The automaton over tokens of a constraint; None if there is none.

  Raises:
    ValueError: the constraint is invalid or too large, or the tokens can spell
      none of its texts; the tokens have no bytes of their own; or no token ends
      a text.
  """
  if constraint is None:
    return None
  ids = arguments_lib.to_ids('eos_ids', eos_ids, vocab_size)
  if not ids:
    raise ValueError(
      f'{constraint[0]} needs a token that ends the text, but there is none;'
      ' give eos_ids=, the text or the id of one'
    )
  pieces = token_bytes_lib.token_bytes(tokenizer, vocab_size)
  return _automaton(constraint, pieces, vocab_size, tuple(ids))
