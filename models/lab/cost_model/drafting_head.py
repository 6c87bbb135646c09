"""The acceptance that a drafting head needs to be as fast as a draft."""

import dataclasses

from models.lab.cost_model import forward as forward_lib
from models.lab.cost_model import speculation
from specdec.tree import topology as topology_lib

_LONGEST = 8  # Chains that are compared.


def eagle3(
  target: forward_lib.ModelShape, vocabulary: int = 32000
) -> forward_lib.ModelShape:
  """An EAGLE-3 head of a target, with an output matrix of so many tokens.

  One layer of the target, whose queries, keys and values read two vectors, and
  a matrix that fuses three hidden states (arXiv 2503.01840, section 3).
  """
  heads = target.num_heads + 2 * target.num_kv_heads
  inputs = target.width * heads * target.head_width
  return dataclasses.replace(
    target,
    name=f'EAGLE-3 head of {target.name}',
    num_layers=1,
    vocab_size=vocabulary,
    other_parameters=3 * target.width**2 + inputs,
    num_experts=1,
    experts_per_token=1,
  )


def _best_speedup(
  deployment: speculation.Deployment, acceptance: float, context: float
) -> float:
  """The gain of the best chain whose tokens have the same acceptance."""
  return max(
    speculation.predict(
      deployment,
      speculation.tree_step(topology_lib.chain(length), [acceptance]),
      context=context,
    ).speedup
    for length in range(1, _LONGEST + 1)
  )


def needed_acceptance(
  with_draft: speculation.Deployment,
  head: forward_lib.ModelShape,
  acceptance: float,
  *,
  context: float = 0,
) -> float | None:
  """The acceptance at which a head is as fast as a draft, each in a chain.

  Args:
    with_draft: the target, the draft and the machine.
    head: such as `eagle3(target)`.
    acceptance: of a token of the draft.
    context: tokens in the cache.

  Returns:
    The probability that a token of the head is accepted, by bisection; None if
    the head is slower even with 1.
  """
  wanted = _best_speedup(with_draft, acceptance, context)
  with_head = dataclasses.replace(with_draft, draft=head)
  low, high = 0.0, 1.0
  if _best_speedup(with_head, high, context) < wanted:
    return None
  for _ in range(40):
    middle = (low + high) / 2
    enough = _best_speedup(with_head, middle, context) >= wanted
    low, high = (low, middle) if enough else (middle, high)
  return high
