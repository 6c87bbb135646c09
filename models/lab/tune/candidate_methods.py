"""The ways of decoding that the planner tries: a fixed list."""

from collections.abc import Mapping

from models.text import plan as plan_lib
from models.text import settings as settings_lib

PLAIN = 'plain'

_SMALL = {'num_nodes': 8, 'width': 2, 'branching': 2, 'rounds': 4}
_LARGE = {'num_nodes': 32, 'width': 8, 'branching': 4, 'rounds': 4}
_TAIL = 256  # Tokens of a long prompt that the draft reads.
_OF_TAIL = {'draft_prompt': _TAIL}
_CHAIN = {'num_draft_tokens': 4}
_TABLE = {'num_nodes': 8, 'width': 4, 'branching': 4, 'capacity': 128}

# Name, method and options, in the order in which they are tried: the time
# budget may end before the last. Capacities hold all candidate tokens; a larger
# array takes longer to sort.
_CANDIDATES: tuple[tuple[str, str, Mapping[str, int]], ...] = (
  (PLAIN, PLAIN, {}),
  ('staged N=8', 'staged', _SMALL),
  ('lookup N=8', 'lookup', _TABLE),
  (f'staged N=8, {_TAIL} of the prompt', 'staged', _SMALL | _OF_TAIL),
  ('chain 4', 'chain', _CHAIN),
  (f'chain 4, {_TAIL} of the prompt', 'chain', _CHAIN | _OF_TAIL),
  ('tree N=8', 'tree', _SMALL | {'capacity': 32}),
  ('ngram+lookup N=8', 'ngram+lookup', _TABLE),
  ('chain 2', 'chain', {'num_draft_tokens': 2}),
  ('staged N=32', 'staged', _LARGE),
  ('chain 1', 'chain', {'num_draft_tokens': 1}),
  ('tree N=32', 'tree', _LARGE | {'capacity': 128}),
  ('chain 6', 'chain', {'num_draft_tokens': 6}),
  ('ngram N=8', 'ngram', _TABLE),
)


def list_candidates(
  base: settings_lib.DraftSettings, *, has_draft: bool, longest: int
) -> list[plan_lib.Candidate]:
  """The candidates in the order in which they are tried, plain decoding first.

  `base` has the settings that the candidates do not vary. If it names an inner
  drafter, candidates with other inner drafters are left out; if it says how
  much of a prompt the draft reads, those whose draft reads the end are. So are
  these if the `longest` sample is no longer: nobody knows what they gain then.
  """
  methods = {
    PLAIN,
    *(settings_lib.INNERS[1:] if base.inner is None else [base.inner]),
  }
  if has_draft:
    methods |= {'chain', 'tree'}
    methods |= {'staged'} if base.inner != 'none' else set()
  return [
    plan_lib.Candidate(
      name=name,
      method=method,
      drafting=settings_lib.with_options(base, {**options, 'topology': None}),
    )
    for name, method, options in _CANDIDATES
    if method in methods
    and (
      'draft_prompt' not in options
      or (base.draft_prompt is None and options['draft_prompt'] < longest)
    )
  ]
