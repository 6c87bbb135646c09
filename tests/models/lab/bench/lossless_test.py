"""The check that users run must pass what is right and fail what is not."""

import dataclasses
import functools

import fuzzing
import jax
import numpy as np
import pytest
import tiny
import tiny_drafters
import tiny_served

import specdec
from specdec.models.lab.bench import endpoint as endpoint_lib
from specdec.models.lab.bench import exactness
from specdec.models.lab.bench import lossless
from specdec.models.nn import table_model
from specdec.models.text import generator as generator_lib

_PROMPTS = ['ab', 'b a', 'né', 'aab', '日本', 'b\n']


def test_a_divergence_is_reported_with_its_margin(monkeypatch):
  """One token of the speculative arm is replaced by another."""
  pair, decode = fuzzing.pair(), lossless._decode
  lm = generator_lib.Generator(pair, tiny_drafters.simple('chain', pair.draft))

  def spoiled(generator, *args, **kw):
    ids, new, efficiency = decode(generator, *args, **kw)
    if generator.drafter.stages:
      new[2][5] += 1
    return ids, new, efficiency

  def run():
    (check,) = lossless.check_tokens(
      lm,
      _PROMPTS,
      batch_sizes=(4,),
      max_margin=0.0,
      sampling=specdec.Sampling(temperature=1.0),
      seed=3,
      max_new_tokens=20,
    )
    return check

  assert run().passed
  monkeypatch.setattr(lossless, '_decode', spoiled)
  check = run()
  assert not check.passed
  (divergence,) = check.divergences
  assert (divergence.prompt, divergence.offset) == (2, 5)
  assert divergence.drafted[0] == divergence.plain[0] + 1
  assert divergence.margin > 0
  assert dataclasses.replace(check, max_margin=divergence.margin).passed
  assert str(check).startswith('FAILED: ')
  assert f'prompt 2, new token 5: plain [{divergence.plain[0]},' in str(check)


def test_the_margin_is_of_logits_with_bias_and_penalty():
  table = np.array([[2.0, 1.5, -1.0]] * 3)
  model = table_model.table_model(table, max_positions=16)
  margin = lambda **options: exactness.choice_margin(
    model, jax.random.key(0), [0], specdec.Sampling(**options)
  )
  assert margin() == pytest.approx(0.5)
  # Token 0 is in the text: 1.0, 1.5, -1.0.
  assert margin(repetition_penalty=2.0) == pytest.approx(0.5)
  assert margin(repetition_penalty=4.0) == pytest.approx(1.0)
  assert margin(logit_bias={2: 2.75}) == pytest.approx(0.25)
  assert margin(logit_bias={0: -np.inf}) == pytest.approx(2.5)


def test_servers_are_compared_as_methods_are():
  """A server with itself, with one of another target, and where texts part."""
  target = tiny.gpt2(num_layers=1)
  draft = tiny.draft('similar', num_layers=1)
  lm = tiny_served.generator(target, tiny_drafters.simple('chain', draft))
  params = dict(target.params, bias=target.params['bias'].at[3].add(2.0))
  other = tiny_served.generator(target.replace(params=params), specdec.PLAIN)
  options = {'max_new_tokens': 20, 'seed': 5, 'max_margin': 0.0}
  prompts = ['abc', 'd', 'xyz']
  greedy = specdec.Sampling()
  sampled = specdec.Sampling(temperature=0.9)
  with (
    tiny_served.serving(lm, method='chain') as first,
    tiny_served.serving(other, method='plain') as second,
  ):
    ours, others = (
      endpoint_lib.Endpoint(server.address) for server in (first, second)
    )
    check = functools.partial(
      lossless.check_servers, lm.pair, prompts, batch_sizes=(3,), **options
    )
    (report,) = check((ours, ours), sampling=sampled)
    assert report.passed
    assert report.num_tokens > 3
    assert report.block_efficiency > 1
    (parted,) = check((ours, others), sampling=greedy)
    assert not parted.passed
    for divergence in parted.divergences:
      assert 0 < divergence.margin < 2
    others.kind = 'vllm'
    with pytest.raises(ValueError, match='only servers of this library draw'):
      check((ours, others), sampling=sampled)
