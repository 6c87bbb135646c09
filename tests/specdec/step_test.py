"""A decode of all that a step does, against a loop in plain Python."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import reference
import tiny_drafters

import specdec
from specdec import cache as cache_lib
from specdec import carried as carried_lib
from specdec import watchers as watchers_lib
from specdec.tree import topology as topology_lib
from specdec.verify import accept

_VOCAB_SIZE = 10
_END, _BROKEN = 4, 5
_PROMPTS = [[2, 3, 1], [0], [1, 2], [3]]
_LIMITS = [18, 3, 18, 18]
_OPTIONS = [
  reference.Options(
    temperature=1.0, top_p=0.7, repetition_penalty=2.5, logit_bias={1: 0.7}
  ),
  reference.Options(temperature=1.0),
  reference.Options(repetition_penalty=4.0, logit_bias={0: -np.inf}),
  reference.Options(
    temperature=2.0, top_k=4, min_p=0.5, repetition_penalty=2.0
  ),
]


def _apply(params, tokens, positions, mask, cache):
  new = (params['token'][tokens] * (1.0 + positions))[:, None, :, None]
  cache = cache_lib.write(cache, 0, new, -new)
  # Like attention, it multiplies what is masked by zero.
  sees = jnp.sum(mask * cache.keys[0][:, :, :, 0], axis=2)
  logits = jnp.sin(sees[..., None] * params['sees'][None, None])
  return 3 * logits + params['table'][tokens], cache


_init_cache = functools.partial(
  cache_lib.init_cache, num_heads=1, head_widths=(1,), dtype=jnp.float32
)


def _params():
  rng = np.random.default_rng(0)
  # A token that was said once is likely, unless it is penalized.
  table = rng.normal(size=(_VOCAB_SIZE,) * 2) + 3 * np.eye(_VOCAB_SIZE)
  table[:, _END] -= 1.0
  table[:, _BROKEN] = -1e9
  token, sees = rng.normal(size=(2, _VOCAB_SIZE))
  token[_BROKEN] = np.nan
  arrays = {'table': table, 'token': token, 'sees': sees}
  return {name: array.astype(np.float32) for name, array in arrays.items()}


def _logits(params, text):
  sees = np.sum(params['token'][text] * np.arange(1, len(text) + 1))
  return 3 * np.sin(sees * params['sees']) + params['table'][text[-1]]


def test_a_decode_of_all_that_a_step_does():
  params, keys = _params(), jax.random.split(jax.random.key(6), len(_PROMPTS))
  target = specdec.LanguageModel(
    params=params,
    spec=specdec.ModelSpec(
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
    tiny_drafters.exact(guesses),
    config=tiny_drafters.Settings(topology=topology_lib.k_ary(4, 2)),
  )
  per_row = {
    field.name: [getattr(options, field.name) for options in _OPTIONS]
    for field in dataclasses.fields(reference.Options)
  }
  result = specdec.generate(
    target,
    keys,
    _PROMPTS,
    max_new_tokens=_LIMITS,
    drafter=drafter,
    sampling=specdec.Sampling(**per_row),
    eos_ids=(_END,),
    log_probs=True,
  )
  for row, (prompt, limit) in enumerate(zip(_PROMPTS, _LIMITS, strict=True)):
    logits_of = functools.partial(_logits, params)
    new, log_probs = reference.decode(
      logits_of, prompt, limit, keys[row], _OPTIONS[row]
    )
    end = new.index(_END) + 1 if _END in new else limit
    assert result.tokens[row] == new[:end]
    np.testing.assert_allclose(
      result.log_probs[row], log_probs[:end], atol=1e-4
    )
    reason = 'eos' if _END in new else 'length'
    assert result.finish_reasons[row] == reason
  assert {*result.finish_reasons} == {'eos', 'length'}
  longest = max(map(len, result.tokens))
  steps = result.stats.reads['target']['forwards']
  assert 4 < steps < longest - 2, 'a poor example'


def test_stop_strings_go_on_where_the_emitted_tokens_led():
  watcher = watchers_lib.StopStrings(
    types.SimpleNamespace(start=jnp.zeros(2, jnp.int32))
  )
  states = jnp.array([[5, 6, 7], [8, 9, 1]])  # after 0, 1 and 2 tokens
  count = jnp.array([0, 2])
  added = carried_lib.Added(states, states, count, 0 * count)
  assert watcher.keep(states, added).tolist() == [5, 1]


def test_rows_end_by_tokens_of_their_own():
  watcher = watchers_lib.EndOfText(np.array([[4, -1], [5, 6]]))
  chosen = np.array([[4, 5, 6], [6, 4, 5]])

  @jax.jit
  def is_end(chosen):
    verdict = types.SimpleNamespace(chosen=chosen)
    seen = types.SimpleNamespace(verdict=verdict)
    return watcher.observe((), seen)[0] == accept.EOS

  expected = [[True, False, False], [True, False, True]]
  assert is_end(chosen).tolist() == expected


def test_values_of_tokens_that_are_no_text_are_dropped():
  """A row is done, or its tokens come after the last slot."""
  new = np.array([[7, 8, 9], [1, 2, 3]])
  count, length = np.array([0, 2]), np.array([1, 3])
  added = carried_lib.Added(new, new, count, length)
  slots = np.zeros((2, 4), np.int32)
  tokens, scores = jax.jit(carried_lib.Added.append)(
    added, (slots, slots - 0.5), (new, -new.astype(np.float32))
  )
  assert tokens.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
  assert scores.tolist() == [[-0.5] * 4, [-0.5] * 3 + [-1]]


def test_hidden_states_by_hand():
  """Short texts have fewer tokens than a step may ask for."""
  states = np.arange(1.0, 13.0).reshape(2, 1, 6, 1)
  positions = np.array([[0, 1, 2], [3, 4, 5]])

  @jax.jit
  def both_ways(states, length):
    cache = cache_lib.init_empty_cache(2, 6).replace(hidden={0: states})
    both = carried_lib.of_text(cache), carried_lib.before_root(cache, length, 3)
    return [hidden.at(positions - 1, (0,))[0][:, :, 0] for hidden in both]

  # The roots are at 1 and 4, and three states are read of each row.
  of_text, before_root = both_ways(states, np.array([2, 5]))
  assert of_text.tolist() == [[0, 1, 2], [9, 10, 11]]
  assert before_root.tolist() == [[0, 1, 2], [9, 10, 0]]
