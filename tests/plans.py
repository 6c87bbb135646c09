"""Plans for tests: ways of decoding at given costs."""

from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib


def candidate(method='lookup', name='', **options):
  """A candidate with the options of drafting, as of `with_options`."""
  drafting = settings_lib.with_options(settings_lib.DraftSettings(), options)
  return plan_lib.Candidate(
    name=name or method, method=method, drafting=drafting
  )


def way(method='lookup', new_token_seconds=1.0, ratio=1.5, name='', **options):
  """A way of decoding: a target reads a token in 1/4 s, a draft in 1/8 s."""
  own = candidate(method, name, **options)
  read = lambda length: min(length, own.drafting.draft_prompt or length)
  return plan_lib.Way(
    **vars(own),
    min_block_efficiency=ratio,
    reading_seconds={
      length: length / 4 + own.uses_draft * read(length) / 8
      for length in (32, 256, 4096)
    },
    new_token_seconds=new_token_seconds
    if isinstance(new_token_seconds, dict)
    else {32: new_token_seconds},
  )


def plan(context, *ways, **changes):
  """A plan of these ways, of which the first is faster than all others."""
  samples = {'ends_per_token': 0.0, 'prompt_length': 9, 'new_tokens': 32}
  made = samples | changes
  return plan_lib.Plan(ways=ways or (way(),), context=context, **made)
