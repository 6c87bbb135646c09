"""Expressions and JSON schemas that a text must match.

The syntax of both is that of outlines-core, which makes automata over bytes of
them; `specdec.automaton` makes automata over tokens of these.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import importlib.util
import json
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import transformers

from models.text import token_bytes as token_bytes_lib
from specdec import automaton as automaton_lib
from specdec import checks as checks_lib

# An expression of Rust's `regex`; a schema as JSON or as what JSON stands for.
# One, or one per row, of which some may be None.
Regex = str | Sequence[str | None]
Schema = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | None]

# `regex` or `json_schema`, and its text; None: anything may follow.
Constraint = tuple[str, str] | None

# For building one automaton.
_SECONDS, _BYTES = 60, 4 << 30


def _text_of(kind: str, value: Any) -> str:
  """The text of an expression or schema.

  Raises:
    ValueError: it is neither.
  """
  if kind == 'json_schema' and isinstance(value, Mapping):
    try:
      return json.dumps(value)
    except (TypeError, ValueError) as error:
      raise ValueError(f'json_schema is no JSON: {error}') from error
  if not isinstance(value, str):
    what = 'text' if kind == 'regex' else 'a JSON object, or the text of one'
    raise ValueError(f'{kind} must be {what}, got {value!r}')
  checks_lib.check_text(kind, value)
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


def of_rows(
  regex: Any, json_schema: Any, batch_size: int
) -> tuple[Constraint, ...]:
  """The constraints of each row, from `Regex` and `Schema`.

  Raises:
    ValueError: there are other than B, or one cannot be used.
  """

  def per_row(name: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
      return [values] * batch_size
    if len(values) != batch_size:
      raise ValueError(
        f'{name} must be one, or one per row ({batch_size}), got {len(values)}'
      )
    return values

  return tuple(
    map(
      constraint_of,
      per_row('regex', regex),
      per_row('json_schema', json_schema),
    )
  )


def _short(text: str) -> str:
  text = ' '.join(text.split())
  return text if len(text) <= 60 else f'{text[:57]}...'


def _over_bytes(kind: str, text: str) -> tuple[np.ndarray, np.ndarray]:
  """The automaton over bytes; see `automaton.of_bytes`.

  Raises:
    ValueError: the text is invalid, its automaton is too large, or
      outlines-core is not installed.
  """
  if importlib.util.find_spec('outlines_core') is None:
    raise ValueError(
      f'{kind} needs the package outlines-core; pip install'
      " 'specdec-jax[constraints]'"
    )
  program = pathlib.Path(__file__).with_name('build_automaton.py')
  limit = automaton_lib.MAX_STATES
  given = {'kind': kind, 'text': text, 'max_states': limit, 'max_bytes': _BYTES}
  too_large = lambda reason: ValueError(
    f'{kind} {_short(text)!r} is too large: {reason}at most {limit:,} states'
    ' are possible; choose smaller numbers of repetitions'
  )
  try:
    done = subprocess.run(
      [sys.executable, '-P', str(program)],
      input=json.dumps(given).encode(),
      capture_output=True,
      timeout=_SECONDS,
      check=False,
    )
  except subprocess.TimeoutExpired as error:
    raise too_large('') from error
  message = done.stderr.decode(errors='replace').strip()
  if done.returncode == 2:
    raise ValueError(f'{kind} {_short(text)!r} cannot be used: {message}')
  if done.returncode:  # Without memory it ends as it can.
    raise too_large(f'{message}; ' if done.returncode == 3 else '')
  first, final, transitions = pickle.loads(done.stdout)
  number = {first: 0}
  for state in sorted(transitions):
    number.setdefault(state, len(number))
  delta = np.full((len(number), 256), -1)
  for state, following in transitions.items():
    for byte, after in following.items():
      if byte < 256:
        delta[number[state], byte] = number[after]
  accepting = np.zeros(len(number), bool)
  accepting[[number[state] for state in final]] = True
  return delta, accepting


# Building one takes a moment where the vocabulary is large.
@functools.lru_cache(maxsize=64)
def _automaton(
  constraint: tuple[str, str],
  pieces: tuple[bytes, ...],
  vocab_size: int,
  eos_ids: tuple[int, ...],
) -> automaton_lib.Automaton:
  kind, text = constraint
  delta, accepting = _over_bytes(kind, text)
  try:
    return automaton_lib.of_bytes(delta, accepting, pieces, vocab_size, eos_ids)
  except automaton_lib.TooLarge as error:
    raise ValueError(
      f'{kind} {_short(text)!r} is too large: {error}; choose smaller numbers'
      ' of repetitions'
    ) from error
  except automaton_lib.Unspeakable as error:
    raise ValueError(
      f'{kind} {_short(text)!r} matches no text that the tokens of the target'
      ' can spell'
    ) from error


def automaton_of(
  constraint: Constraint,
  tokenizer: transformers.PreTrainedTokenizerBase,
  vocab_size: int,
  eos_ids: Any,
) -> automaton_lib.Automaton | None:
  """The automaton over tokens of a constraint; None if there is none.

  Raises:
    ValueError: the constraint is invalid, too large, or none that the tokens
      can spell; the tokens have no bytes of their own; or no token ends a text.
  """
  if constraint is None:
    return None
  ids = checks_lib.to_ids('eos_ids', eos_ids, vocab_size)
  if not ids:
    raise ValueError(
      f'{constraint[0]} needs a token that ends the text; name one as eos_ids'
      ' (the flag --eos)'
    )
  pieces = token_bytes_lib.token_bytes(tokenizer, vocab_size)
  return _automaton(constraint, pieces, vocab_size, tuple(ids))
