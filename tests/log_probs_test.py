"""Log-probabilities of the new tokens, against a forward over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings

from specdec import decode
from specdec import DecodeConfig
from specdec import generate
from specdec import PLAIN
from specdec import Request
from specdec import Sampling
from specdec.checks import check_sampling
from specdec.tree.topology import k_ary
from specdec.watchers import LogProbs
from specdec.watchers import make_watchers
from specdec.watchers import state_of

LIMITS = (30, 40)
LENGTH = 64


def _sampling():
  """Everything that must not change the log-probabilities."""
  bias = np.zeros(tiny.VOCAB_SIZE, np.float32)
  bias[3], bias[5] = 2.0, -np.inf
  return Sampling(
    logit_bias=bias,
    repetition_penalty=[1.3, 1.0],
    temperature=[1.5, 0.0],
    top_k=[10, 5],
    top_p=0.9,
  )


def _generate(kind, max_new_tokens=LIMITS):
  drafter = PLAIN
  if kind is not None:
    config = Settings(topology=k_ary(2, 3))
    drafter = tiny_drafters.model(tiny.draft(kind, num_layers=1), config)
  return generate(
    tiny.gpt2(num_layers=1),
    tiny.row_keys(2),
    tiny.prompts(2),
    max_new_tokens=max_new_tokens,
    sampling=_sampling(),
    drafter=drafter,
    log_probs=True,
  )


@jax.jit
def _forward(tokens):
  """Log-probabilities `[T, V]` after each token, without a cache."""
  mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]
  logits, _ = tiny.gpt2(num_layers=1).apply(
    tokens[None], jnp.arange(LENGTH)[None], mask, None
  )
  return jax.nn.log_softmax(logits[0])


@pytest.mark.parametrize('kind', [None, 'similar'])
def test_they_are_those_of_a_forward_over_the_text(kind):
  generation = _generate(kind)
  plain = _generate(None)
  assert generation.tokens == plain.tokens
  for row, prompt in enumerate(tiny.prompts(2)):
    new, log_probs = generation.tokens[row], generation.log_probs[row]
    assert len(new) == len(log_probs) == LIMITS[row]
    assert all(type(log_prob) is float for log_prob in log_probs)
    text = np.zeros(LENGTH, np.int32)
    text[: len(prompt) + len(new)] = prompt + new
    everywhere = np.asarray(_forward(jnp.asarray(text)))
    positions = np.arange(len(prompt), len(prompt) + len(new))
    expected = everywhere[positions - 1, new]
    np.testing.assert_allclose(log_probs, expected, atol=2e-4)
    # Neither of the best token nor of another position.
    assert np.ptp(expected) > 1
    assert np.any(expected < everywhere[positions - 1].max(axis=1) - 1)
  if kind is not None:
    histogram = generation.stats['accepted_histogram']
    assert all(histogram[1:]), 'no blocks of some length'


def test_what_is_cut_off_has_none():
  """A limit within a block ends them with the tokens."""
  whole = _generate('similar')
  for limits in ((1, 17), (18, 2), (0, 19)):
    cut = _generate('similar', max_new_tokens=limits)
    for row, limit in enumerate(limits):
      assert cut.tokens[row] == whole.tokens[row][:limit]
      assert cut.log_probs[row] == whole.log_probs[row][:limit]


def test_they_are_computed_only_if_asked_for(monkeypatch):
  def compute(self, state, seen):
    raise AssertionError('computed')

  monkeypatch.setattr(LogProbs, 'observe', compute)
  prompt, lengths = tiny.pad(tiny.prompts(2))
  model = tiny.gpt2(num_layers=1)
  vocab_size = model.spec.vocab_size

  def trace(log_probs):
    watchers = make_watchers(penalty_vocab_size=vocab_size, log_probs=log_probs)
    request = Request(
      prompt=prompt,
      prompt_length=lengths,
      limit=np.array(LIMITS, np.int32),
      row_keys=tiny.row_keys(2),
      sampling=check_sampling(_sampling(), 2, vocab_size),
      watchers=watchers,
    )
    config = DecodeConfig(max_new_tokens=LENGTH)
    run = lambda request: decode.__wrapped__(
      model, PLAIN, request, config=config
    )
    states = jax.eval_shape(run, request).watchers
    return state_of(LogProbs, watchers, states)

  assert trace(False) is None
  with pytest.raises(AssertionError, match='computed'):
    trace(True)
