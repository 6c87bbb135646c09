"""A process of its own that builds the automaton of an expression or schema.

Some short expressions have automata without end, and what builds them can be
stopped only with its process. `models.text.constraints` runs this file. It
reads a JSON object with `kind`, `text`, `max_states` and `max_bytes`, and
writes a pickle of the first state, the final states and the transitions; or,
with status 2, one line of what is wrong.
"""

import contextlib
import json
import pickle
import sys

import outlines_core
from outlines_core import json_schema

_END = 256  # In place of a token that ends a text.


def _limit_memory(num_bytes: int) -> None:
  with contextlib.suppress(ImportError, OSError, ValueError):  # e.g. Windows
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _without_anchors(regex: str) -> str:
  """All of the text must match, so anchors around everything say nothing."""
  escaped = regex.endswith('\\$')
  if regex.startswith('^') and regex.endswith('$') and not escaped:
    return regex[1:-1] if '|' not in regex else regex
  return regex


def main() -> None:
  """Builds one automaton."""
  given = json.load(sys.stdin)
  _limit_memory(given['max_bytes'])
  try:
    regex = given['text']
    if given['kind'] == 'json_schema':
      regex = json_schema.build_regex_from_schema(regex)
    # Tokens of one byte each make of it an automaton over bytes.
    tokens = {bytes([byte]): [byte] for byte in range(_END)}
    index = outlines_core.Index(
      _without_anchors(regex), outlines_core.Vocabulary(_END, tokens)
    )
  except (TypeError, ValueError) as error:
    print(' '.join(str(error).split()), file=sys.stderr)
    sys.exit(2)
  transitions = index.get_transitions()
  if len(transitions) > given['max_states']:
    print(f'{len(transitions):,} states', file=sys.stderr)
    sys.exit(3)
  found = index.get_initial_state(), index.get_final_states(), transitions
  sys.stdout.buffer.write(pickle.dumps(found))


if __name__ == '__main__':
  main()
