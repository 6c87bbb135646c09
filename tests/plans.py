"""Plans for tests: ways of decoding at given speeds."""

from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib


def way(method='lookup', speed=1.0, break_even=1.5, name='', **options):
  """A way of decoding; a number is its speed at 32 tokens of prompt."""
  return plan_lib.Way(
    name=name or method,
    method=method,
    drafting=settings_lib.with_options(settings_lib.DraftSettings(), options),
    break_even=break_even,
    tokens_per_second=speed if isinstance(speed, dict) else {32: speed},
  )


def plan(context, *ways, usual_length=32):
  """A plan of these ways."""
  return plan_lib.Plan(
    ways=ways or (way(),), context=context, usual_length=usual_length
  )
