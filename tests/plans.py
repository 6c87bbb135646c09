"""Plans for tests: ways of decoding at given costs."""

from models.text import plan as plan_lib
from models.text import settings as settings_lib


def way(method='lookup', new_token_seconds=1.0, ratio=1.5, name='', **options):
  """A way of decoding with the options of drafting, as of `with_options`."""
  return plan_lib.Way(
    name=name or method,
    method=method,
    drafting=settings_lib.with_options(settings_lib.DraftSettings(), options),
    min_block_efficiency=ratio,
    new_token_seconds=new_token_seconds,
  )


def plan(context, *ways, **changes):
  """A plan of these ways, of which the first is faster than all others."""
  costs = {'prompt_token_seconds': 0.25, 'draft_token_seconds': 0.125}
  samples = {'ends_per_token': 0.0, 'prompt_length': 9, 'new_tokens': 32}
  made = costs | samples | changes
  return plan_lib.Plan(ways=ways or (way(),), context=context, **made)
