"""The rules of verification by name, and which drafters they go with."""

from collections.abc import Callable
from collections.abc import Hashable
import functools

from specdec import sampling as sampling_lib
from specdec.draft import drafter as drafter_lib
from specdec.tree import topology as topology_lib
from specdec.verify import accept
from specdec.verify import rejection

RULES: dict[str, Callable[[str], accept.Rule]] = {
  'match': lambda children: accept.MatchRule(),
  'rejection': rejection.RejectionRule,
  'traversal': rejection.TraversalRule,
  'block': functools.partial(rejection.TraversalRule, needs_chain=True),
}
"""The rules of verification by name, made from how children are chosen."""


def to_rule(
  verify: str | accept.Rule, children: str | None, drafter: drafter_lib.Drafter
) -> accept.Rule:
  """The rule of verification.

  Args:
    verify: one of `RULES`, or a rule.
    children: one of `sampling.CHILDREN`. None: the children of a given rule;
      else drawn without replacement if rule, topology and scorer allow it, or
      the best.
    drafter: the drafter.

  Raises:
    ValueError: the arguments are not known or do not go together.
  """
  if isinstance(verify, str) and verify in RULES:
    make_rule = RULES[verify]
  elif isinstance(verify, accept.Rule) and isinstance(verify, Hashable):
    make_rule = lambda children: verify
  else:
    raise ValueError(
      f'verify must be one of {tuple(RULES)} or a hashable'
      f' specdec.verify.accept.Rule, got {verify!r}'
    )
  rule, choices = make_rule(sampling_lib.BEST), (None, *sampling_lib.CHILDREN)
  if children not in choices:
    raise ValueError(f'children must be one of {choices}, got {children!r}')
  if children not in (None, sampling_lib.BEST) and not rule.may_draw:
    raise ValueError(
      f'verify={verify} wants the best children, got children={children};'
      ' choose verify=rejection to draw them'
    )
  shape = drafter.shape
  fixed = isinstance(shape, topology_lib.Topology)
  is_chain = isinstance(shape, topology_lib.Topology) and shape.branching == 1
  if rule.needs_chain and drafter.stages and not is_chain:
    raise ValueError(
      f'verify={verify} is for chains; choose a chain as the topology of the'
      ' drafter, or verify=traversal'
    )
  can_draw = fixed and drafter.stages[0].scorer.facts.can_draw
  in_order = isinstance(shape, topology_lib.Topology) and shape.has_all_siblings
  if children is None and rule is verify:
    children = rule.children
  if children is None:
    draws = can_draw and in_order and rule.may_draw
    children = sampling_lib.WITHOUT_REPLACEMENT if draws else sampling_lib.BEST
  if children != sampling_lib.BEST and not can_draw:
    raise ValueError(
      f'children={children} needs a drafter with a distribution to draw from'
      f' and a fixed topology; choose children={sampling_lib.BEST} or a'
      ' topology'
    )
  if children == sampling_lib.WITHOUT_REPLACEMENT and not in_order:
    raise ValueError(
      f'children={children} needs a topology in which each node has all'
      ' siblings of lower rank: the draws are tried in their order'
    )
  rule = make_rule(children)
  if rule.children != children:
    raise ValueError(
      f'verify={verify} has children={rule.children}, got children={children};'
      ' leave children out'
    )
  return rule
