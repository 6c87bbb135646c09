"""Text in, text out: stop strings, streaming, prompts, seeds, breaking off.

The target is a table of characters of one to four bytes, cut into tokens of
less and more than that. What is expected follows from the tokens of plain
decoding without any stop strings.
"""

import functools
import inspect
import itertools
import json

import fuzzing
import jax.numpy as jnp
import numpy as np
import pytest

from models.text import generator as generator_lib
from models.text import text_decoding
from models.text import text_options
import specdec

LIMIT = 60
_NEVER = '\x01'
_SHAPE = fuzzing.Shape('table', 'staged', 3)
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


_token_bytes = lambda: fuzzing.pair().token_bytes()


@functools.cache
def _plain():
  return _generator('plain').generate(**_arguments())


def _slow_end(tokens, stops):
  """The number of tokens of a row, and its text, byte by byte."""
  text = b''
  for number, token in enumerate(tokens, 1):
    for byte in _token_bytes()[token]:
      text += bytes([byte])
      found = [stop for stop in stops if text.endswith(stop.encode())]
      if found:
        longest = max(len(stop.encode()) for stop in found)
        return number, text[:-longest].decode('utf-8', 'replace')
  return len(tokens), text.decode('utf-8', 'replace')


def _check(stops_of_rows):
  """Tokens, texts, reasons, and what is shown while a text grows."""
  decoding = _generator('staged').stream(**_arguments(stops_of_rows))
  shown = list(map(''.join, zip(*decoding, strict=True)))
  result = decoding.result()
  assert shown == result.text == [*map(''.join, result.pieces)]
  assert [*map(len, result.pieces)] == [*map(len, result.tokens)]
  for row, stops in enumerate(stops_of_rows):
    tokens, reason = _plain().tokens[row], _plain().finish_reasons[row]
    end, text = _slow_end(tokens, stops)
    if any(stop in _slow_end(tokens[:end], ())[1] for stop in stops):
      reason = 'stop'
    found = (result.tokens, result.text, result.finish_reasons)
    assert [one[row] for one in found] == [tokens[:end], text, reason]


def test_the_text_is_worth_it():
  """Characters split over tokens and tokens of several characters, and more."""
  plain, text = _plain(), ''.join(_plain().text)
  lengths = {len(_token_bytes()[one]) for row in plain.tokens for one in row}
  assert {0, 1, 2, 3} <= lengths
  assert {1, 2, 3, 4} <= {len(one.encode()) for one in text}
  assert '\ufffd' in text
  assert {'eos', 'length'} == set(plain.finish_reasons)
  assert plain.text == [*map(_generator('plain').pair.decode, plain.tokens)]
  assert any('' in pieces for pieces in plain.pieces)
  stats = _generator('staged').generate(**_arguments()).stats
  assert all(count > 4 for count in stats.accepted_histogram[:3])


def test_overlapping_stops():
  """Random stops, within a block or over several, are in `fuzz_test`."""
  for stops in (
    ['aab', 'ab'],  # both end with b: the longer one
    ['ba\n', 'a'],  # a ends first
    *(['b', 'b\n', ' b'], ['né', 'é', 'né '], ['本', '日本']),
    *(['😀 ', '😀😀', 'é'], [_NEVER * 4, ' ']),
  ):
    _check([stops] * 3)
    _check([stops[::-1], [], stops[:1]])


def test_without_eos_ids_special_tokens_end_nothing_and_have_no_text():
  """All text is shown at once but the bytes of half a character."""
  decoding = _generator('plain').stream(**_arguments(stop=(), eos_ids=()))
  shown = [''] * 3
  for step, new in enumerate(decoding, 1):
    shown = list(map(str.__add__, shown, new))
    for row, tokens in enumerate(decoding.result().tokens):
      _, expected = _slow_end(tokens[:step], ())
      assert shown[row].rstrip('\ufffd') == expected.rstrip('\ufffd')
  result = decoding.result()
  assert result.finish_reasons == ['length'] * 3
  assert shown == result.text
  assert '<end>' not in ''.join(shown)
  assert [*map(len, result.tokens)] == [LIMIT] * 3


def _special_end(tokens, words):
  """As `_slow_end`, where a stop is a word before the special token."""
  for end in (place for place, token in enumerate(tokens) if token == 0):
    text = _slow_end(tokens[:end], ())[1]
    if found := [len(word) for word in words if text.endswith(word)]:
      return end + 1, text[: len(text) - max(found)], 'stop'
  return LIMIT, _slow_end(tokens, ())[1], 'length'


def test_a_stop_may_name_a_special_token():
  """The row ends with it, alone or behind text, and none of it is shown."""
  run = lambda **kw: _generator('staged').stream(**_arguments(eos_ids=(), **kw))
  endless, reasons = run(), set()
  endless.run()
  for words in ([''], [' ', '', 'b'], ['b', '日本'], ['né']):
    decoding = run(stop=[f'{word}<end>' for word in words])
    shown = list(map(''.join, zip(*decoding, strict=True)))
    result = decoding.result()
    assert shown == result.text == [*map(''.join, result.pieces)]
    reasons.update(result.finish_reasons)
    for row, tokens in enumerate(endless.result().tokens):
      end, text, reason = _special_end(tokens, words)
      found = (result.tokens, result.text, result.finish_reasons)
      assert [one[row] for one in found] == [tokens[:end], text, reason]
  assert reasons == {'stop', 'length'}


def test_eos_ids_may_be_texts():
  lm = _generator('plain')
  pair = fuzzing.pair()
  ids = lambda given: text_options.with_ids(pair, {'eos_ids': given}, ())[
    'eos_ids'
  ]
  assert ids(None) == (0,)
  (line_end,) = fuzzing.pair().encode('\n')
  assert ids('<end>') == [0]
  assert ids(['\n', 0, 'é']) == [line_end, 0, *fuzzing.pair().encode('é')]
  run = lambda **kw: lm.generate(**_arguments(**kw))
  assert run(eos_ids='<end>').tokens == _plain().tokens
  for text in ('', 'b a', '<end><end>', '<en'):
    with pytest.raises(
      ValueError, match=rf'the text {text!r}, but no token of'
    ):
      run(eos_ids=['<end>', text])
  with pytest.raises(ValueError, match='eos_ids has the lone surrogate'):
    run(eos_ids='\ud800')


def test_breaking_off():
  """What there is so far, and later the rest."""
  decoding = _generator('staged').stream(**_arguments())
  shown = [''] * 3
  for breaks in (1, 2, 3, 5, LIMIT):
    for new in itertools.islice(decoding, breaks):
      shown = list(map(str.__add__, shown, new))
    result = decoding.result()
    for row, text in enumerate(result.text):
      tokens, whole = result.tokens[row], _plain().tokens[row]
      assert tokens == whole[: len(tokens)]
      done = len(tokens) == len(whole)
      reason = _plain().finish_reasons[row] if done else 'cancelled'
      assert result.finish_reasons[row] == reason
      assert text.startswith(shown[row])
      assert ''.join(result.pieces[row]) == text
    assert ('cancelled' in result.finish_reasons) == (breaks < LIMIT)
  assert shown == result.text == _plain().text
  asked = []
  result = _generator('staged').generate(
    **_arguments(), should_stop=lambda: asked.append(1) or len(asked) > 1
  )
  assert 'cancelled' in result.finish_reasons
  assert len(asked) == 2


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
  for one in (texts[0], a, [a], np.array(a)):
    assert run(one).tokens == expected.tokens[:1]


def test_an_option_that_does_not_exist_is_refused_by_name():
  """Also where an option of another method, or of ids, has this name."""
  lm, target = _generator('plain'), fuzzing.pair().target
  of_ids = functools.partial(specdec.generate, target, max_new_tokens=2)
  for method, given, name in (
    *((lm.generate, 'a', name) for name in ('temperature', 'max_tokens')),
    *((lm.stream, 'a', name) for name in ('should_stop', 'rests')),
    *((lm.generate_many, ['a'], name) for name in ('num_slots', 'drafter')),
    (functools.partial(of_ids, prompts=[[1]]), None, 'seed'),
    (functools.partial(specdec.Slots, num_slots=2, context=9), target, 'seed'),
  ):
    with pytest.raises(TypeError, match=f"argument '{name}'; .* break_even, "):
      method(given, **{name: 1})


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


def test_stop_tables_are_kept():
  pair = fuzzing.pair()
  table = lambda stops: text_options.with_ids(pair, {}, stops)['stop']
  first = table((('a',), ()))
  assert table((('a',), ())) is first
  assert table(((), ())) is None
  for number in range(20):
    table(((f'{number}',), ()))
  again = table((('a',), ()))
  np.testing.assert_array_equal(again.next_state, first.next_state)


def test_timed_is_generate():
  stream = functools.partial(_generator('plain').stream, **_arguments())
  timed = text_decoding.timed(stream)
  assert timed.tokens == _plain().tokens
  figures = {'seconds', 'tokens_per_second', 'compile_seconds'}
  names = [set(one.stats.as_dict()) for one in (timed, _plain())]
  assert names[0] - names[1] == figures
