"""A decode of all that a step does, against a loop in plain Python.

The model is small, but like a transformer: what it says depends on the tokens
that it sees and on their positions, and it reads them from its cache.
"""

import functools
import types

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import tiny_drafters
from tiny_drafters import Settings

from specdec import cache as kv
from specdec import decode
from specdec import DecodeConfig
from specdec import LanguageModel
from specdec import ModelSpec
from specdec import Request
from specdec.tree.topology import k_ary
from specdec.verify.accept import EOS
from specdec.verify.accept import LIMIT
from specdec.watchers import LogProbs
from specdec.watchers import make_watchers
from specdec.watchers import state_of
from specdec.watchers import StopStrings

_VOCAB_SIZE = 10
_END, _BROKEN = 4, 5
_PROMPTS = [[2, 3, 1], [0], [1, 2], [3]]
_LIMITS = [18, 3, 18, 18]
_VALUES = [
  {'repetition_penalty': 2.5, 'logit_bias': 0.7},
  {},
  {'temperature': 0.0, 'repetition_penalty': 4.0},
  {'temperature': 0.6, 'top_k': 3, 'repetition_penalty': 2.0},
]


def _apply(params, tokens, positions, mask, cache):
  new = (params['token'][tokens] * (1.0 + positions))[:, None, :, None]
  cache = kv.write(cache, 0, new, -new)
  # Like attention, it multiplies what is masked by zero.
  sees = jnp.sum(mask * cache.keys[0][:, :, :, 0], axis=2)
  logits = jnp.sin(sees[..., None] * params['sees'][None, None])
  return 3 * logits + params['table'][tokens], cache


_init_cache = functools.partial(
  kv.init_cache, num_layers=1, num_heads=1, head_width=1, dtype=jnp.float32
)


def _params():
  rng = np.random.default_rng(0)
  # What was said once is likely, unless it is penalized.
  table = rng.normal(size=(_VOCAB_SIZE,) * 2) + 3 * np.eye(_VOCAB_SIZE)
  table[:, _END] -= 1.0
  table[:, _BROKEN] = -1e9
  token = rng.normal(size=_VOCAB_SIZE)
  token[_BROKEN] = np.nan
  found = {'table': table, 'token': token, 'sees': rng.normal(size=_VOCAB_SIZE)}
  return {name: array.astype(np.float32) for name, array in found.items()}


def _logits(params, text):
  sees = np.sum(params['token'][text] * np.arange(1, len(text) + 1))
  return 3 * np.sin(sees * params['sees']) + params['table'][text[-1]]


def _slow_row(params, key, prompt, limit, values):
  """Tokens, log-probabilities and why it ends."""
  text, log_probs, reason = list(prompt), [], LIMIT
  for _ in range(limit):
    logits = _logits(params, text)
    seen = np.isin(np.arange(_VOCAB_SIZE), text)
    probs = enumeration.exact_probs(logits[None], seen[None], values)[0]
    with np.errstate(divide='ignore'):
      scores = np.log(probs)
    if values.get('temperature', 1.0):
      at = jax.random.fold_in(key, len(text))
      scores += np.asarray(jax.random.gumbel(at, (_VOCAB_SIZE,)))
    text.append(int(np.argmax(scores)))
    log_probs.append(logits[text[-1]] - np.logaddexp.reduce(logits))
    if text[-1] == _END:
      reason = EOS
      break
  return text[len(prompt) :], log_probs, reason


def test_a_decode_of_all_that_a_step_does():
  params, keys = _params(), jax.random.split(jax.random.key(6), len(_PROMPTS))
  target = LanguageModel(
    params=params,
    spec=ModelSpec(
      apply=_apply,
      init_cache=_init_cache,
      vocab_size=_VOCAB_SIZE,
      max_positions=100,
      weight_bytes=1,
      cache_bytes_per_slot=1,
    ),
  )
  guesses = params['table'].copy()
  guesses[::2, _BROKEN] = 2.0  # which the target never says
  drafter = tiny_drafters.candidates(
    tiny_drafters.exact(guesses), config=Settings(topology=k_ary(4, 2))
  )
  lengths = np.array([len(prompt) for prompt in _PROMPTS], np.int32)
  padded = np.zeros((len(_PROMPTS), lengths.max()), np.int32)
  for row, prompt in enumerate(_PROMPTS):
    padded[row, : len(prompt)] = prompt
  values = [enumeration.NEUTRAL | one for one in _VALUES]
  columns = {
    name: np.array([one[name] for one in values])
    for name in enumeration.NEUTRAL
  }
  bias = np.zeros((len(values), _VOCAB_SIZE))
  bias[:, 1] = columns['logit_bias']
  request = Request(
    prompt=padded,
    prompt_length=lengths,
    limit=np.array(_LIMITS, np.int32),
    row_keys=keys,
    sampling=enumeration.params(
      columns | {'logit_bias': bias}, len(values), _VOCAB_SIZE
    ),
    watchers=make_watchers(
      eos_ids=(_END,), penalty_vocab_size=_VOCAB_SIZE, log_probs=True
    ),
  )
  result = decode(
    target, drafter, request, config=DecodeConfig(max_new_tokens=max(_LIMITS))
  )
  log_probs = state_of(LogProbs, request.watchers, result.watchers)
  reasons, numbers = set(), []
  for row, (prompt, limit) in enumerate(zip(_PROMPTS, _LIMITS, strict=True)):
    new, expected, reason = _slow_row(
      params, keys[row], prompt, limit, _VALUES[row]
    )
    of_row = slice(len(prompt), int(result.length[row]))
    assert result.tokens[row, of_row].tolist() == new
    np.testing.assert_allclose(log_probs[row, of_row], expected, atol=1e-4)
    assert int(result.reason[row]) == reason
    reasons.add(reason)
    numbers.append(len(new))
  assert reasons == {EOS, LIMIT}
  assert 4 < int(result.counters.steps) < max(numbers) - 2, 'a poor example'


def test_stop_strings_go_on_where_the_emitted_tokens_led():
  watcher = StopStrings(types.SimpleNamespace(start=jnp.zeros(2, jnp.int32)))
  states = jnp.array([[5, 6, 7], [8, 9, 1]])  # after 0, 1 and 2 tokens
  assert watcher.keep(states, jnp.array([0, 2])).tolist() == [5, 1]
