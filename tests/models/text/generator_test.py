"""Text in, text out: prompts, seeds, ends and options.

The target is a table of characters of one to four bytes, cut into tokens of
less and more than that; `fuzz_test` has random calls of it.
"""

import functools
import inspect
import json

import fuzzing
import jax.numpy as jnp
import numpy as np
import pytest

import specdec
from specdec.models.text import choice as choice_lib
from specdec.models.text import generator as generator_lib
from specdec.models.text import text_options

LIMIT = 60
_NEVER = '\x01'
_SHAPE = fuzzing.Shape('staged', 3)
_generator = functools.cache(_SHAPE.generator)
_PROMPTS = ['né', [5, 6, 7], 'ab 日']
_SEEDS = (5, 6, 7)


def _arguments(stop=_NEVER, **kw):
  """Stop strings always, so that there are few programs."""
  return {
    'prompts': _PROMPTS,
    'seed': _SEEDS,
    'max_new_tokens': LIMIT,
    'sampling': specdec.Sampling(temperature=[1.0, 0.8, 1.0]),
    'stop': stop,
  } | kw


@functools.cache
def _plain():
  return _generator('plain').generate(**_arguments())


def test_without_eos_ids_special_tokens_end_nothing_and_have_no_text():
  result = _generator('plain').generate(**_arguments(stop=(), eos_ids=()))
  assert result.finish_reasons == ['length'] * 3
  assert any(0 in tokens for tokens in result.tokens)
  assert '<end>' not in ''.join(result.text)
  assert [*map(len, result.tokens)] == [LIMIT] * 3


def test_eos_ids_may_be_texts():
  pair = fuzzing.pair()
  read = functools.partial(text_options.with_ids, pair)
  for given, ids in (
    (None, (0,)),
    ('<end>', [0]),
    (['\n', 0, 'é'], [*pair.encode('\n'), 0, *pair.encode('é')]),
  ):
    assert read({'eos_ids': given}, ())['eos_ids'] == ids
  run = lambda **kw: _generator('plain').generate(**_arguments(**kw))
  assert run(eos_ids='<end>').tokens == _plain().tokens
  for text in ('', 'b a', '<end><end>', '<en'):
    with pytest.raises(
      ValueError, match=rf'eos_ids={text!r}: no token of the target'
    ):
      run(eos_ids=['<end>', text])
  with pytest.raises(ValueError, match='eos_ids has the lone surrogate'):
    run(eos_ids='\ud800')


def test_seeds():
  """Rows of one seed differ; the first has the tokens of the seed alone."""
  rows = {
    'prompts': _PROMPTS[:1] * 3,
    'sampling': specdec.Sampling(temperature=[1.0] * 3),
  }
  generate = _generator('plain').generate
  run = lambda seed: generate(**_arguments(**rows, seed=seed)).tokens
  same = run(_SEEDS[0])
  assert len(set(map(tuple, same))) == 3
  assert same[0] == _plain().tokens[0]
  assert run([5, _SEEDS[0], 5])[1] == same[0]
  assert run([5] * 3) == [run(5)[0]] * 3
  assert run(6) != run(5)


def test_prompts_in_every_notation():
  texts = ['aab', 'b a', '日本']
  a, b, c = ids = [fuzzing.pair().encode(text) for text in texts]
  options = {'max_new_tokens': 2, 'stop': _NEVER}
  run = lambda prompts: _generator('plain').generate(prompts, **options)
  expected = run(texts)
  for prompts in ([texts[0], b, tuple(c)], [np.array(a), jnp.array(b), c]):
    result = run(prompts)
    assert result.tokens == expected.tokens
    assert result.prompts == texts
    assert result.prompt_tokens == ids
    shown = json.loads(result.to_json())
    assert shown['prompt_tokens'] == ids
    assert shown['text'] == expected.text
  for prompt in (texts[0], a, [a], np.array(a)):
    assert run(prompt).tokens == expected.tokens[:1]


def test_an_option_that_does_not_exist_is_refused_by_name():
  """Also where an option of another method, or of ids, has this name."""
  lm, target = _generator('plain'), fuzzing.pair().target
  of_ids = functools.partial(specdec.generate, target, max_new_tokens=2)
  for method, given, name in (
    (lm.generate, 'a', 'max_tokens'),
    *((lm.stream, 'a', name) for name in ('should_stop', 'rests')),
    *((lm.generate_many, ['a'], name) for name in ('num_slots', 'drafter')),
    (functools.partial(of_ids, prompts=[[1]]), None, 'seed'),
    (functools.partial(specdec.Slots, num_slots=2, context=9), target, 'seed'),
  ):
    with pytest.raises(TypeError, match=f"argument '{name}'; .* break_even, "):
      method(given, **{name: 1})
  hint = r'give sampling=specdec\.Sampling\(top_k=\.\.\.\)'
  with pytest.raises(TypeError, match=hint):
    lm.generate('a', top_k=1)


def test_what_drafts_by_default():
  for target, draft, labels in (
    ('demo', 'demo', ('draft', 'lookup', 'ngram')),
    ('demo-draft', None, ('lookup', 'ngram')),
  ):
    assert choice_lib.ModelChoice(target).draft == draft
    drafter = generator_lib.load(target, dtype='float32').drafter
    assert (drafter.labels, drafter.shape.num_nodes) == (labels, 8)


def test_help_shows_every_option():
  for symbol, options in (
    (specdec.generate, specdec.Options),
    (specdec.Decoding, specdec.Options),
    (specdec.Slots, specdec.Options),
    *(
      (getattr(generator_lib.Generator, name), text_options.TextOptions)
      for name in ('stream', 'generate', 'generate_many', 'chat')
    ),
  ):
    for name in options.__annotations__:
      assert inspect.getdoc(symbol).count(f'\n  {name}: ') == 1, name


def test_options_of_all_prompts_are_one_each():
  many = functools.partial(_generator('plain').generate_many, ['a', 'b'])
  with pytest.raises(ValueError, match='seed must be one integer for all'):
    many(seed=[1, 2])
  with pytest.raises(ValueError, match='stop must be a string'):
    many(stop=[['a'], ['b']], batch_size=2)
