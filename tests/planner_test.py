"""From prompts to a plan, on a table model: what is measured and what is not.

Seconds depend on the machine, so nothing here is about how many there are.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from models.nn.table_model import table_model
from models.text.drafters import DraftSettings
from models.text.drafters import make_drafter
from models.text.pair import Pair
from models.text.plan import Context
from models.text.plan import table
from models.training.tokenizer import train_tokenizer
from models.tune import planner
from models.tune.candidates import Candidate
from models.tune.planner import make_plan
from models.tune.planner import sample_batches
from specdec import generate
from specdec import Sampling
from specdec.study.costs import measure_step_costs

_TEXT = 'the cat says ok, and the dog says no to the cat\n' * 20
_SAMPLING = Sampling(temperature=0.7)


@functools.cache
def _pair():
  tokenizer = train_tokenizer([_TEXT], vocab_size=300, context=128)
  size = len(tokenizer)
  rng = np.random.default_rng(0)
  counts = 1e-3 + 0.05 * rng.random((size, size)) ** 8
  for before, after in itertools.pairwise(tokenizer(_TEXT)['input_ids']):
    counts[before, after] += 1
  target = table_model(np.log(counts), max_positions=256)
  draft = table_model(
    np.log(counts) + rng.normal(size=counts.shape), max_positions=256
  )
  return Pair(target=target, draft=draft, tokenizer=tokenizer, eos_ids=())


def _context(batch_size):
  return Context(
    models={'target': 't', 'draft': 'd', 'vocabulary': 'v'},
    machine={},
    dtype='float32',
    draft_dtype='float32',
    batch_size=batch_size,
    sampling={'temperature': 0.7},
  )


def test_prompts_of_one_padded_length_fill_batches():
  short, long, longest = [1] * 3, [2] * 40, [3] * 60
  batches = sample_batches([short, long, short, longest, long], 2)
  # 33 to 64 tokens are the commonest; the first counts twice.
  assert batches == [[long, longest], [long, long]]
  assert sample_batches([short], 3) == [[short] * 3]
  assert sample_batches([short, long], 1) == [[short]]


def test_a_plan_is_made_of_what_was_counted(monkeypatch):
  """All of it, with V at hand and two candidates that are replayed."""
  pair, lines = _pair(), []
  drafting = DraftSettings(inner='lookup')
  few = {
    'plain': Candidate(name='plain', method='plain', drafting=drafting),
    'chain 2': Candidate(
      name='chain 2',
      method='chain',
      drafting=dataclasses.replace(drafting, num_draft_tokens=2),
    ),
  }

  def run(search, *, has_draft, ranks):
    assert has_draft
    assert ranks().shape == (2 * 2 * 20,)
    for candidate in few.values():
      search.rate(candidate)

  monkeypatch.setattr(planner.Search, 'run', run)
  plan = make_plan(
    pair,
    ['the cat says', 'ok, and', 'the dog', 'to the cat'],
    context=_context(2),
    sampling=_SAMPLING,
    drafting=drafting,
    max_new_tokens=20,
    node_counts=(1, 4),
    report=lines.append,
  )
  figures = {one['name']: one for one in plan.candidates}
  assert figures.keys() == few.keys()
  assert figures['plain']['block_efficiency'] == 1
  # The replay counted what decoding with the target counts.
  prompts = sample_batches(
    [pair.encode(one) for one in ('the cat says', 'ok, and')], 2
  )[0]
  more = [pair.encode(one) for one in ('the dog', 'to the cat')]
  results = [
    generate(
      pair.target,
      jax.random.key(0),
      batch,
      drafter=make_drafter('chain', pair, few['chain 2'].drafting),
      max_new_tokens=20,
      sampling=_SAMPLING,
    )
    for batch in (prompts, more)
  ]
  forwards = sum(one.stats['target_forwards'] for one in results)
  assert figures['chain 2']['block_efficiency'] == 80 / forwards > 1
  for one in figures.values():
    assert one['tokens_per_second'] > 0
    assert one['measured'] > 0
  wins = all(
    figures['chain 2'][account] > 1.03 * figures['plain'][account]
    for account in ('tokens_per_second', 'measured')
  )
  assert (plan.method == 'chain') == wins
  if plan.method == 'plain':
    assert plan.min_block_efficiency == 1
  assert plan.context == _context(2)
  assert len(table(plan).splitlines()) == 2 + len(few)
  assert any(line.startswith('chain 2: ') for line in lines)


def test_what_cannot_be_planned_is_refused():
  make = lambda **changes: make_plan(
    _pair(),
    ['the cat'],
    context=_context(1),
    sampling=_SAMPLING,
    **{'max_new_tokens': 20, **changes},
  )
  with pytest.raises(ValueError, match='max_new_tokens must be at least 16'):
    make(max_new_tokens=8)


def test_costs_are_measured_for_every_size():
  costs = measure_step_costs(
    _pair().target,
    [[1, 2, 3], [4]],
    prompt_slots=32,
    max_new_tokens=64,
    context=40,
    sampling=Sampling(),
    node_counts=(4,),
    repeats=1,
  )
  assert costs.verification.keys() == {1, 4}
  assert min(costs.verification.values()) > 0
  assert costs.plain_step > costs.verification[1]
  for texts, context, message in (
    ([[1]], 81, 'context must leave room for 8 steps'),
    ([[1], []], 40, 'at least one token in every row'),
  ):
    with pytest.raises(ValueError, match=message):
      measure_step_costs(
        _pair().target,
        texts,
        prompt_slots=32,
        max_new_tokens=64,
        context=context,
        sampling=Sampling(),
        node_counts=(),
      )


def test_trees_too_slow_to_pay_are_not_measured():
  """No forward is as fast as a limit of 0 asks; two sizes are always there."""
  measure = lambda most_tokens: measure_step_costs(
    _pair().target,
    [[1, 2, 3]],
    prompt_slots=32,
    max_new_tokens=64,
    context=40,
    sampling=Sampling(),
    node_counts=(2, 4, 8),
    num_steps=1,
    repeats=1,
    most_tokens=most_tokens,
  )
  assert measure(0).verification.keys() == {1, 2}
  assert measure(1e9).verification.keys() == {1, 2, 4, 8}


def test_costs_are_those_of_different_tokens_of_the_text():
  """Equal ones would need too few experts of a mixture."""
  seen = []
  target = _pair().target
  definition = target.spec

  def apply(params, tokens, *rest):
    jax.debug.callback(lambda one: seen.append(np.asarray(one)), tokens)
    return definition.apply(params, tokens, *rest)

  measure_step_costs(
    target.replace(spec=dataclasses.replace(definition, apply=apply)),
    [[1, 2, 3, 4, 5]],
    prompt_slots=32,
    max_new_tokens=32,
    context=40,
    sampling=Sampling(),
    node_counts=(4,),
    num_steps=1,
    repeats=1,
  )
  jax.effects_barrier()
  prompts = [one for one in seen if one.shape == (1, 32)]
  trees = [one for one in seen if one.shape == (1, 4)]
  text = np.resize([1, 2, 3, 4, 5], 40)
  assert all(np.array_equal(one[0], text[:32]) for one in prompts)
  assert prompts
  assert trees
  assert all(set(one[0]) == set(text[-3:]) for one in trees)
