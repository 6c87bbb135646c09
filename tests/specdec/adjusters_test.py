"""An adjuster of one's own: one class, and drafted text is plain text.

Plain text is that of a slow loop, which adds the same numbers to the logits.
"""

import functools

import flax.struct
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import tiny_drafters

import specdec
from specdec.models.nn import table_model

_VOCAB_SIZE, _LIMIT, _MOODS = 24, 26, 5
_TABLE = tiny.table(_VOCAB_SIZE)
_MODEL = table_model.table_model(_TABLE, max_positions=64)
_BIAS = np.random.default_rng(3).normal(size=(_MOODS, _VOCAB_SIZE)) * 3
_PROMPTS = [[2, 3, 4], [5], [6, 7]]
_KEYS = tiny.row_keys(3)
_TEMPERATURES = [0.0, 1.0, 0.7]


class Moods(flax.struct.PyTreeNode, specdec.Adjuster):
  """Adds a bias that depends on the sum of the tokens of the text so far."""

  bias: np.ndarray

  def start(self, texts):
    in_text = jnp.arange(texts.tokens.shape[1])[None] < texts.length[:, None]
    return jnp.sum(jnp.where(in_text, texts.tokens, 0), axis=1) % _MOODS

  def at_root(self, state):
    return state

  def after(self, carried, tokens):
    return (carried + tokens) % _MOODS

  def adjust(self, logits, state, carried, nodes):
    return logits + jnp.asarray(self.bias)[carried]

  def keep(self, state, carried, added):
    after = self.after(carried, added.tokens)
    moods = jnp.concatenate([state[:, None], after], axis=1)
    return jnp.take_along_axis(moods, added.count[:, None], axis=1)[:, 0]


@functools.cache
def _expected(row):
  options = reference.Options(temperature=_TEMPERATURES[row])
  return reference.decode(
    lambda text: _TABLE[text[-1]] + _BIAS[sum(text) % _MOODS],
    _PROMPTS[row],
    _LIMIT,
    _KEYS[row],
    options,
  )[0]


@pytest.mark.parametrize('kind', ['plain', 'tree', 'staged'])
def test_tokens_are_those_of_a_loop(kind):
  drafter = tiny_drafters.simple(kind, _MODEL, length=3)
  options = {
    'sampling': specdec.Sampling(temperature=_TEMPERATURES),
    'adjusters': (Moods(np.float32(_BIAS)),),
  }
  decoding = specdec.Decoding(
    _MODEL, _KEYS, _PROMPTS, max_new_tokens=_LIMIT, drafter=drafter, **options
  )
  decoding.run()
  tokens = decoding.result().tokens
  assert tokens == [_expected(row) for row in range(3)]
  if kind == 'tree':  # The draft is the target, under the same adjuster.
    assert decoding.result().stats.block_efficiency > 3
  # Another text, of which the first row has a part.
  again = [_PROMPTS[0] + tokens[0][:5], *_PROMPTS[1:]]
  decoding.extend(again, max_new_tokens=[_LIMIT - 5, _LIMIT, _LIMIT])
  decoding.run()
  assert decoding.result().tokens == [tokens[0][5:], *tokens[1:]]


def test_in_slots():
  slots = specdec.Slots(
    _MODEL,
    num_slots=2,
    context=40,
    drafter=tiny_drafters.simple('chain', _MODEL, length=3),
    sampling=specdec.Sampling(temperature=1.0),
    adjusters=(Moods(np.float32(_BIAS)),),
  )
  jobs = [
    {
      'prompt': prompt,
      'rng_key': key,
      'max_new_tokens': _LIMIT,
      'sampling': specdec.Sampling(temperature=temperature),
    }
    for prompt, key, temperature in zip(
      _PROMPTS, _KEYS, _TEMPERATURES, strict=True
    )
  ]
  found, _ = tiny.in_slots(slots, jobs)
  assert [one.tokens[0] for one in found] == [*map(_expected, range(3))]


def test_what_is_no_adjuster_is_refused():
  with pytest.raises(ValueError, match=r'adjusters must be a sequence of'):
    specdec.generate(
      _MODEL, _KEYS, _PROMPTS, max_new_tokens=2, adjusters=[Moods]
    )
