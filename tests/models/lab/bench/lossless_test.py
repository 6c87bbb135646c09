"""The checks that users run must pass what is right and fail what is not."""

import dataclasses
import functools

import fuzzing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import tiny_drafters
import tiny_served

from models.lab import task as task_lib
from models.lab.bench import acceptance
from models.lab.bench import endpoint as endpoint_lib
from models.lab.bench import exactness
from models.lab.bench import lossless
from models.nn import table_model
from models.text import generator as generator_lib
import specdec
from specdec import arguments as arguments_lib

_SIZE = 7
_SAMPLING = specdec.Sampling(temperature=1.0)
_LOGITS = 1.5 * np.random.default_rng(0).normal(size=(_SIZE, _SIZE))
_MODEL = table_model.table_model(_LOGITS, max_positions=4096)


def _probs(logits):
  exp = np.exp(logits)
  return exp / exp.sum(axis=1, keepdims=True)


def _markov(rng, logits, length, temperature=1.0, stickiness=0.0):
  """Tokens of a table model; sticky ones use the chance of the one before."""
  probs = _probs(logits / temperature)
  text, chance = [0], rng.random()
  for _ in range(length):
    chance = chance if rng.random() < stickiness else rng.random()
    # In order of probability, as one of the tests sorts them.
    order = np.argsort(-probs[text[-1]])
    index = np.searchsorted(np.cumsum(probs[text[-1]][order]), chance)
    text.append(int(order[min(index, _SIZE - 1)]))
  return text[:1], text[1:]


def _p_values(logits, model=_MODEL, draft=None, **kw):
  rng = np.random.default_rng(1)
  rows = []
  for row in range(8):
    prompt, new = _markov(rng, logits, 400, **kw)
    key = jax.random.key(row)
    rows.append(
      exactness.transform(model, prompt, new, _SAMPLING, key, draft)[0]
    )
  return exactness.p_values(rows)


def test_the_right_law_passes_and_another_fails():
  p_values = _p_values(_LOGITS)
  assert len(p_values) == 4
  assert min(p_values.values()) > 0.01
  warmer = _p_values(_LOGITS, temperature=1.15)
  assert warmer['uniform, by probability'] < 1e-5
  # Each token has the right law; together they have not.
  sticky = _p_values(_LOGITS, stickiness=0.3)
  assert sticky['independent, by probability'] < 1e-5
  # A shift among equally likely tokens, which have no order by probability.
  flat = np.zeros((_SIZE, _SIZE))
  model = table_model.table_model(flat, max_positions=4096)
  shifted = flat + np.eye(_SIZE)[3]
  assert min(_p_values(shifted, model).values()) < 1e-5
  assert min(_p_values(flat, model).values()) > 0.01


def test_a_little_of_the_draft_fails():
  """Where other orders do not see it."""
  noise = np.random.default_rng(5).normal(size=_LOGITS.shape)
  draft = table_model.table_model(_LOGITS + noise, max_positions=4096)
  mixed = np.log(0.7 * _probs(_LOGITS) + 0.3 * _probs(_LOGITS + noise))
  p_values = _p_values(mixed, draft=draft)
  assert len(p_values) == 6
  assert p_values['uniform, by draft'] < 1e-5
  assert p_values['uniform, by draft'] < 0.01 * p_values['uniform, by token']
  assert min(_p_values(_LOGITS, draft=draft).values()) > 0.01


def test_a_token_that_was_filtered_out_is_impossible():
  """By a filter, or by a bias, which may be a mapping as elsewhere."""
  key = jax.random.key(0)
  own = lambda token, sampling: exactness.transform(
    _MODEL, [0], [token], sampling, key
  )[1][0]
  worst, *_, best = map(int, np.argsort(_LOGITS[0]))
  few = specdec.Sampling(temperature=1.0, top_k=2)
  assert own(best, few) > 0.5 > own(worst, few) == 0
  biased = specdec.Sampling(
    temperature=1.0, logit_bias={best: -np.inf, worst: 1.0}
  )
  assert own(best, biased) == 0 < own(worst, biased)
  assert exactness.choice_margin(_MODEL, key, [0, 1], biased) > 0


def test_distributions_are_those_of_a_loop():
  """With what a penalty knows at each position."""
  target = tiny.gpt2(num_layers=1)
  bias = np.linspace(-1, 1, tiny.VOCAB_SIZE)
  options = {'temperature': 0.7, 'top_p': 0.9, 'repetition_penalty': 1.5}
  sampling = specdec.Sampling(**options, logit_bias=bias)
  checked = arguments_lib.to_params(sampling, 1, tiny.VOCAB_SIZE)
  tokens = tiny.prompts(3)[2]
  found = exactness.distributions(target, exactness.padded(tokens), checked)
  forward = jax.jit(lambda ids: target.logits(ids))
  logits = np.asarray(forward(jnp.array([tokens]))[0])
  slow = reference.Options(**options, logit_bias=dict(enumerate(bias)))
  for index in range(len(tokens)):
    scores = reference.adjusted(logits[index], slow, tokens[: index + 1])
    expected = np.exp(reference.filtered(scores, slow))
    expected /= expected.sum()
    np.testing.assert_allclose(found[index], expected, atol=2e-5)


# Through the text API, as users do.

_PROMPTS = ['ab', 'b a', 'né', 'aab', '日本', 'b\n']
_LIMIT = 120
_OPTIONS = {'sampling': _SAMPLING, 'seed': 3, 'max_new_tokens': _LIMIT}


def _generator(**changes):
  pair = fuzzing.pair()
  # Longer contexts, of one length.
  models = {
    name: table_model.table_model(
      getattr(pair, name).params['logits'], max_positions=200
    )
    for name in ('target', 'draft')
  }
  drafter = tiny_drafters.simple('chain', models['draft'])
  return generator_lib.Generator(
    dataclasses.replace(pair, **models | changes), drafter
  )


# All checks are of one batch size, to share programs.
def _check_law(prompts=_PROMPTS):
  rule = {'batch_sizes': (4,), 'verify': 'rejection', 'eos_ids': ()} | _OPTIONS
  (check,) = lossless.check_distribution(_generator(), prompts, **rule)
  return check


def test_a_divergence_is_reported_with_its_margin(monkeypatch):
  """One token of the speculative arm is replaced by another."""
  decode = lossless._decode

  def spoiled(generator, *args, **kw):
    ids, new, efficiency = decode(generator, *args, **kw)
    if generator.drafter.stages:
      new[2][5] += 1
    return ids, new, efficiency

  monkeypatch.setattr(lossless, '_decode', spoiled)
  sizes = {'batch_sizes': (4,), 'max_margin': 0.0}
  given = _generator(), _PROMPTS
  (check,) = lossless.check_tokens(*given, **sizes, **_OPTIONS)
  assert not check.passed
  (one,) = check.divergences
  assert (one.prompt, one.offset) == (2, 5)
  assert one.drafted[0] == one.plain[0] + 1
  assert one.margin > 0
  assert dataclasses.replace(check, max_margin=one.margin).passed
  assert str(check).startswith('FAILED: ')
  assert f'prompt 2, new token 5: plain [{one.plain[0]},' in str(check)


def test_the_law_of_the_target_passes():
  check = _check_law()
  assert check.passed, str(check)
  expected = (_LIMIT * len(_PROMPTS), [])
  assert (check.num_tokens, check.impossible) == expected
  with pytest.raises(ValueError, match='120 tokens are too few'):
    _check_law(_PROMPTS[:1])


# How often guesses stand.


def _measure(sampling=_SAMPLING, **changes):
  task = task_lib.Task(sampling=sampling, batch_size=3, max_new_tokens=150)
  generator = _generator(**changes)
  return acceptance.measure(generator, _PROMPTS, task, numbers_of_children=[1])


def test_guesses_stand_as_often_as_theory_says():
  figures = _measure()
  names = {
    'match': 'coupled',
    'rejection, without_replacement': '1 - TV',
    'rejection, with_replacement': '1 - TV',
    'rejection, best_and_drawn': '1 - TV',
    'rejection, best': 'p(best)',
  }
  one = figures['1']
  assert one.keys() == names.keys()
  for rule, name in names.items():
    measured, error = one[rule]['measured'], one[rule]['standard_error']
    assert abs(measured - one[rule]['theory'][name]) < 4 * error, rule
    if rule != 'match':  # with one child every rule accepts what it can
      most = one[rule]['theory']['most']
      assert most == pytest.approx(one[rule]['theory'][name], abs=1e-5)
  # Enough forwards to tell the theories from each other.
  assert one['match']['standard_error'] < 0.03
  theory = one['match']['theory']
  assert theory['1 - TV'] - theory['coupled'] > 0.03
  rows = acceptance.rows(figures)
  assert [row['rule'] for row in rows] == [*names]
  assert rows[0]['theory, 1 child'].startswith('coupled = 0.')
  assert rows[0]['measured, 1 children'].startswith('0.')
  assert rows[0]['most, 1'] == ''
  assert rows[1]['most, 1'].startswith('0.')


def test_acceptance_is_of_sampling():
  with pytest.raises(ValueError, match='temperature above 0'):
    _measure(sampling=specdec.Sampling())
  with pytest.raises(ValueError, match='needs a draft'):
    _measure(draft=None)


def test_servers_are_compared_as_methods_are():
  """A server with itself, with one of another target, and where texts part."""
  target = tiny.gpt2(num_layers=1)
  draft = tiny.draft('similar', num_layers=1)
  lm = tiny_served.generator(target, tiny_drafters.simple('chain', draft))
  params = dict(target.params, bias=target.params['bias'].at[3].add(2.0))
  other = tiny_served.generator(target.replace(params=params), specdec.PLAIN)
  options = {'max_new_tokens': 20, 'seed': 5, 'max_margin': 0.0}
  prompts = ['abc', 'd', 'xyz']
  with (
    tiny_served.serving(lm, method='chain') as first,
    tiny_served.serving(other, method='plain') as second,
  ):
    ours, others = (
      endpoint_lib.Endpoint(server.address) for server in (first, second)
    )
    check = functools.partial(
      lossless.check_servers, lm.pair, prompts, batch_size=3, **options
    )
    for temperature in (0.0, 0.9):
      sampling = specdec.Sampling(temperature=temperature)
      found = check((ours, ours), sampling=sampling)
      assert found.passed
      assert found.num_tokens > 3
      assert found.block_efficiency > 1
    parted = check((ours, others), sampling=specdec.Sampling())
    assert not parted.passed
    for divergence in parted.divergences:
      assert 0 < divergence.margin < 2
    others.kind = 'vllm'
    with pytest.raises(ValueError, match='only servers of this library draw'):
      check((ours, others), sampling=sampling)
