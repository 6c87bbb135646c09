"""Text in, text out: stop strings, streaming, prompts, seeds, breaking off.

The target is a bigram table of a text with characters of one to four bytes, cut
into tokens of less and more than that. What is expected follows from the tokens
of plain decoding without any stop strings.
"""

import functools
import inspect
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_drafters
from tiny_drafters import Settings

from models.nn.table_model import table_model
from models.text.generator import Generator
from models.text.pair import Pair
from models.training.tokenizer import train_tokenizer
from specdec import PLAIN
from specdec import PromptLookup
from specdec import Sampling
from specdec import staged

_TEXT = (
  'naïve café — 你好, 世界! 😀 ok\n',
  'the cat says ok, ok; a café is 界 — 😀😀 €9\n',
  'abcabc cab bca 好好\n',
)
LIMIT = 60
_NEVER = '\x01'


@functools.cache
def _tokenizer():
  return train_tokenizer(_TEXT * 20, vocab_size=300, context=128)


@functools.cache
def _model(seed):
  """Counts of pairs of tokens, with some noise that breaks characters.

  That of seed 1 has more noise, so as to be right now and then.
  """
  size = len(_tokenizer())
  rng = np.random.default_rng(seed)
  counts = np.full((size, size), 1e-4) + 4e-3 * rng.random((size, size)) ** 8
  ids = _tokenizer()(''.join(_TEXT))['input_ids']
  for before, after in itertools.pairwise([*ids, ids[0]]):
    counts[before, after] += 1
  counts[ids[-1], 0] += 0.3
  counts[0, ids] += 1
  counts[:, _tokenizer()(_NEVER)['input_ids']] = 1e-20
  logits = np.log(counts) + 2 * seed * rng.normal(size=counts.shape)
  return table_model(logits, max_positions=128)


@functools.cache
def _generator(drafter='plain'):
  tree = Settings(
    num_nodes=8, width=2, branching=2, rounds=2, capacity=16, cost_ratio=0
  )
  draft = tiny_drafters.model(_model(1), tree)
  lookup = tiny_drafters.candidates(PromptLookup(), config=tiny_drafters.INNER)
  return Generator(
    Pair(target=_model(0), draft=None, tokenizer=_tokenizer(), eos_ids=(0,)),
    PLAIN if drafter == 'plain' else staged(draft, lookup),
  )


_PROMPTS = ['naï', [65, 66, 67], 'the cat says 你']
_SEEDS = (3, 11, 4)


def _arguments(stop=_NEVER, **kw):
  """Stop strings always, so that there are few programs."""
  return {
    'prompts': _PROMPTS,
    'seed': _SEEDS,
    'max_new_tokens': LIMIT,
    'sampling': Sampling(temperature=[1.0, 0.8, 1.0]),
    'stop': stop,
  } | kw


@functools.cache
def _plain():
  return _generator().generate(**_arguments())


def _token_bytes():
  return _generator().pair.token_bytes()


def _slow_end(tokens, stops):
  """How many tokens a row has, and its text, byte by byte."""
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
  assert shown == result.text
  for row, (tokens, stops) in enumerate(
    zip(_plain().tokens, stops_of_rows, strict=True)
  ):
    end, text = _slow_end(tokens, stops)
    reason = _plain().finish_reasons[row]
    if any(stop in _slow_end(tokens[:end], ())[1] for stop in stops):
      reason = 'stop'
    assert result.tokens[row] == tokens[:end]
    assert result.text[row] == text
    assert result.finish_reasons[row] == reason
    assert len(result.pieces[row]) == end
    assert ''.join(result.pieces[row]) == text


def test_the_text_is_worth_it():
  """Characters split over tokens and tokens of several characters, and more."""
  lengths = {len(_token_bytes()[one]) for row in _plain().tokens for one in row}
  assert {0, 1, 2, 3} <= lengths
  text = ''.join(_plain().text)
  assert {1, 2, 3, 4} <= {len(one.encode()) for one in text}
  assert '\ufffd' in text
  assert {'eos', 'length'} == set(_plain().finish_reasons)
  for row, tokens in enumerate(_plain().tokens):
    assert _plain().text[row] == _generator().pair.decode(tokens)
  assert any('' in pieces for pieces in _plain().pieces)
  stats = _generator('staged').generate(**_arguments()).stats
  assert all(count > 4 for count in stats['accepted_histogram'][:3])


@pytest.mark.parametrize(
  'stops',
  [
    ['abc', 'bc'],  # both end with c: the longer one
    ['bca', 'c'],  # c ends first
    ['ok', 'ok,', ' ok'],
    ['café', 'é', 'fé'],
    ['好', '你好'],
    ['😀 ', '😀😀', '€'],
    [_NEVER * 4, ' '],
  ],
)
def test_overlapping_stops(stops):
  """Random stops, within a block or over several, are in `fuzz_test`."""
  _check([stops] * 3)
  _check([stops[::-1], [], stops[:1]])


def test_without_eos_ids_special_tokens_end_nothing_and_have_no_text():
  """All text is shown at once but the bytes of half a character."""
  decoding = _generator().stream(**_arguments(stop=(), eos_ids=()))
  shown = [''] * 3
  for step, new in enumerate(decoding, 1):
    shown = list(map(str.__add__, shown, new))
    for row, tokens in enumerate(decoding.result().tokens):
      _, expected = _slow_end(tokens[:step], ())
      assert shown[row].rstrip('\ufffd') == expected.rstrip('\ufffd')
  result = decoding.result()
  assert result.finish_reasons == ['length'] * 3
  assert shown == result.text
  assert '<|' not in ''.join(shown)
  assert list(map(len, result.tokens)) == [LIMIT] * 3


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

  def run(seed):
    arguments = _arguments(seed=seed, prompts=_PROMPTS[:1] * 3)
    sampling = Sampling(temperature=[1.0] * 3)
    return _generator().generate(**arguments | {'sampling': sampling}).tokens

  same = run(_SEEDS[0])
  assert len(set(map(tuple, same))) == 3
  assert same[0] == _plain().tokens[0]
  assert run([5, _SEEDS[0], 5])[1] == same[0]
  assert run([5] * 3) == [run(5)[0]] * 3
  assert run(6) != run(5)


def test_prompts_in_every_notation():
  texts = ['abc', 'the cat', '好']
  ids = [_tokenizer()(text)['input_ids'] for text in texts]
  run = lambda prompts: _generator().generate(
    prompts, max_new_tokens=2, stop=_NEVER
  )
  expected = run(texts)
  for prompts in (
    ids,
    [texts[0], ids[1], tuple(ids[2])],
    [texts[0], np.array(ids[1]), jnp.array(ids[2])],
  ):
    result = run(prompts)
    assert result.tokens == expected.tokens
    assert result.prompts == texts
    assert result.prompt_tokens == ids
    shown = json.loads(result.to_json())
    assert shown['prompt_tokens'] == ids
    assert shown['text'] == expected.text
  for one in (texts[0], ids[0], [ids[0]], np.array(ids[0])):
    assert run(one).tokens == expected.tokens[:1]


@pytest.mark.parametrize('call', ['generate', 'stream', 'trace', 'timed'])
def test_arguments_are_refused_by_every_method(call):
  """`fuzzing.BAD` lists all that `generate` refuses."""
  method = getattr(_generator(), call)
  with pytest.raises(TypeError, match=r"unexpected keyword .* 'max_tokens'"):
    method('a', max_tokens=3)
  with pytest.raises(ValueError, match="row 0 has the stop string ''"):
    method('a', stop='')


def test_every_argument_is_in_the_signature():
  """`help` and editors show the arguments, alike in all four methods."""
  shared = dict(inspect.signature(Generator.generate).parameters)
  docs = inspect.getdoc(Generator.generate)
  assert all(f'{name}: ' in docs for name in shared if name != 'self')
  del shared['should_stop']
  for call in (Generator.stream, Generator.trace, Generator.timed):
    found = inspect.signature(call).parameters
    assert list(found.items()) == list(shared.items())


def test_stop_tables_are_kept():
  generator = _generator()
  first = generator.stop_table((('a',), ()))
  assert generator.stop_table((('a',), ())) is first
  assert generator.stop_table(((), ())) is None
  for number in range(20):
    generator.stop_table(((f'{number}',), ()))
  again = generator.stop_table((('a',), ()))
  np.testing.assert_array_equal(again.next_state, first.next_state)


def test_timed_is_generate():
  timed = _generator().timed(**_arguments())
  assert timed.tokens == _plain().tokens
  figures = {'seconds', 'tokens_per_second', 'compile_seconds'}
  assert set(timed.stats) - set(_plain().stats) == figures
