"""Random calls of the text API, good and bad, and what must hold for each.

Static arguments are drawn from a short list, so that thousands of calls share
some dozens of programs; everything else is random.
"""

import dataclasses
import functools
import signal
import traceback

import numpy as np
import tiny_drafters
from tiny_drafters import Settings
from tiny_drafters import with_settings
import tokenizers
import transformers

from models.nn.table_model import table_model
from models.text.generator import Generator
from models.text.pair import Pair
from specdec import NGram
from specdec import PLAIN
from specdec import PromptLookup
from specdec import Sampling
from specdec import staged
from specdec.tree.topology import chain
from specdec.tree.topology import from_paths

# A few tokens that share bytes, and some with pieces of characters.
_PIECES = (
  *('a', 'b', 'ab', 'ba', 'aab', ' ', '\n', 'b\n', 'é', 'né', '日本', '😀'),
)
_SECONDS_PER_CALL = 240
_CONTEXT = 200
_DRAFT_CONTEXT = 60


@functools.cache
def _tokenizer():
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  encode = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  spell = lambda text: encode.pre_tokenize_str(text)[0][0]
  texts = [spell(piece) for piece in _PIECES]
  letters = sorted({letter for text in texts for letter in text})
  assert set(letters) <= set(alphabet)
  merges, words = [], dict.fromkeys(letters)
  for text in texts:
    built = text[0]
    for letter in text[1:]:
      merges.append((built, letter))
      built += letter
      words[built] = None
  vocabulary = {'<end>': 0} | {word: i for i, word in enumerate(words, 1)}
  model = tokenizers.models.BPE(vocab=vocabulary, merges=merges)
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = encode
  backend.decoder = tokenizers.decoders.ByteLevel()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token='<end>'
  )


@functools.cache
def pair() -> Pair:
  size = len(_tokenizer())
  rng = np.random.default_rng(0)
  logits = 2 * rng.normal(size=(size, size))
  logits[:, 0] -= 2  # the end comes seldom
  similar = logits + rng.normal(size=logits.shape)
  return Pair(
    target=table_model(logits, max_positions=_CONTEXT),
    draft=table_model(similar, max_positions=_DRAFT_CONTEXT),
    tokenizer=_tokenizer(),
    eos_ids=(0,),
  )


@functools.cache
def _drafters():
  models = pair()
  rng = np.random.default_rng(1)
  size = models.target.spec.vocab_size
  text = rng.integers(size, size=80).tolist()
  table = tiny_drafters.ngram_table([text], size, order=3, num_continuations=3)
  both = tiny_drafters.candidates(
    PromptLookup((0.2, 0.5), num_matches=2),
    NGram(table),
    config=Settings(width=2, branching=2, rounds=2, cost_ratio=0),
  )
  tree = Settings(
    num_nodes=8, width=3, branching=2, rounds=2, capacity=24, cost_ratio=0
  )
  ragged = from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)])
  drafted = lambda config: tiny_drafters.model(models.draft, config)
  return {
    'chain of 1': drafted(Settings(topology=chain(1))),
    'chain of 3': drafted(Settings(topology=chain(3))),
    'ragged': drafted(Settings(topology=ragged)),
    'tree': drafted(tree),
    'tables': with_settings(both, tree),
    'staged': staged(drafted(tree), both),
  }


@dataclasses.dataclass(frozen=True)
class Shape:
  """What is static about a call."""

  drafter: str
  batch_size: int
  verify: str
  children: str | None
  on: frozenset[str]
  room: int
  long_prompt: bool


_SWITCHES = (
  'stop',
  'logit_bias',
  'repetition_penalty',
  'top_k',
  'top_p',
  'min_p',
  'log_probs',
)


@functools.cache
def shapes(number: int) -> tuple[Shape, ...]:
  """A list whose beginning does not depend on its length.

  The seed is one with which the first four have every option.
  """
  rng = np.random.default_rng(24)
  result = []
  for _ in range(number):
    drafter = str(rng.choice(list(_drafters())))
    verify = str(rng.choice(['match', 'match', 'match', 'rejection', 'block']))
    if verify == 'block' and 'chain' not in drafter:
      verify = 'rejection'
    fixed = drafter in ('chain of 1', 'chain of 3', 'ragged')
    kinds = [None, 'best']
    if verify != 'match' and fixed:
      kinds += ['without_replacement', 'with_replacement']
    result.append(
      Shape(
        drafter=drafter,
        batch_size=int(rng.choice([1, 1, 2, 3])),
        verify=verify,
        children=kinds[rng.integers(len(kinds))],
        on=frozenset(name for name in _SWITCHES if rng.random() < 0.4),
        room=int(rng.choice([64, 128])),
        long_prompt=bool(rng.random() < 0.2),
      )
    )
  return tuple(result)


def _random_text(rng, least, most):
  pieces = rng.choice(_PIECES, size=rng.integers(least, most + 1))
  return ''.join(pieces)


@functools.cache
def _successors():
  """`[V, 3]`, the likeliest tokens after each token."""
  logits = np.asarray(pair().target.params['logits'])
  return np.argsort(-logits, axis=1)[:, :3]


def _likely_text(rng):
  """A text that the target is likely to emit; may cut its tokens."""
  tokens = [int(rng.integers(1, len(_tokenizer())))]
  for _ in range(rng.integers(1, 3)):
    tokens.append(int(rng.choice(_successors()[tokens[-1]])))
  text = pair().decode(tokens).replace('\ufffd', '')
  first = rng.integers(2)
  return text[first : len(text) - rng.integers(2)] or 'a'


def _each(rng, batch_size, draw):
  """One for all, or one per row."""
  if rng.random() < 0.4:
    return draw()
  return [draw() for _ in range(batch_size)]


def _prompt(rng, shape):
  least, most = (14, 18) if shape.long_prompt else (1, 6)
  text = _random_text(rng, least, most)
  ids = pair().encode(text)
  ids = (ids * 8)[:40] if shape.long_prompt else ids[:30]
  return pair().decode(ids) if rng.random() < 0.5 and ids else ids


def good_call(rng, shape: Shape) -> tuple[list, dict]:
  """Prompts and options that must work."""
  size, batch_size = pair().target.spec.vocab_size, shape.batch_size
  each = functools.partial(_each, rng, batch_size)
  prompts = [_prompt(rng, shape) for _ in range(batch_size)]
  limit = lambda: int(rng.choice([0, 1, 2, 3, rng.integers(4, 64)]))
  values = {
    'temperature': each(lambda: float(rng.choice([0, 0.3, 1, 2]))),
    'top_k': each(lambda: rng.choice([None, 1, 2, 5, 100])),
    'top_p': each(lambda: float(rng.choice([0.01, 0.5, 0.9, 1.0]))),
    'min_p': each(lambda: float(rng.choice([0.0, 0.05, 0.5, 1.0]))),
    'repetition_penalty': each(lambda: float(rng.choice([0.8, 1, 1.3, 5]))),
    'logit_bias': [
      {
        int(token): float(rng.choice([-np.inf, -1, 3]))
        for token in rng.choice(size, size=3, replace=False)
      }
      for _ in range(batch_size)
    ],
  }
  on = shape.on | {'temperature'}
  sampling = Sampling(**{k: v for k, v in values.items() if k in on})
  if isinstance(sampling.top_k, list):
    # All entries but one bucket would be programs of their own.
    sampling = dataclasses.replace(sampling, top_k=[*sampling.top_k[:-1], 100])
  elif 'top_k' in on:
    sampling = dataclasses.replace(sampling, top_k=100)
  options = {
    'max_new_tokens': each(limit),
    'room_for_new_tokens': shape.room,
    'sampling': sampling,
    'seed': each(lambda: int(rng.integers(1000))),
    'verify': shape.verify,
    'children': shape.children,
    'log_probs': 'log_probs' in shape.on,
  }
  if 'stop' in shape.on:
    stop = lambda: _likely_text(rng)
    options['stop'] = [
      [stop() for _ in range(rng.integers(3))] for _ in range(batch_size)
    ]
    if not any(options['stop']):
      options['stop'][0] = [stop()]
  return prompts, options


_BAD = {
  'max_new_tokens': [-1, 10**6, 2.5, 'many', [1] * 9, None, [[1]], [-1]],
  'room_for_new_tokens': [-1, 1.5, 'x', 10**9],
  'seed': ['x', 1.5, [1] * 9, None, True, [0.5], 2**32, -(10**30)],
  'stop': ['', [''], [1], [['a']] * 9, [['']], 5, [None], '\ud800'],
  'eos_ids': [[10**6], [-1], ['x'], 3, [None], [1.5]],
  'verify': ['mtch', None, 3],
  'children': ['bst', 'without_replacement', 7],
  'temprature': [1.0],
  'drafter': [None],
}
_BAD_SAMPLING = {
  'temperature': [-1, np.nan, np.inf, 'hot', [1.0] * 9, [[1.0]], None],
  'top_k': [0, -1, 2.5, 'x', [5] * 9, True, [0], [[5]]],
  'top_p': [0, 1.5, -1, np.nan, 'x', [0.5] * 9],
  'min_p': [-0.1, 1.5, np.nan, 'x', [0.5] * 9],
  'repetition_penalty': [0, -1, np.nan, np.inf, 'x', [1.0] * 9],
  'logit_bias': [
    {10**6: 1},
    {-1: 1},
    {0: np.nan},
    {0: np.inf},
    {'x': 1},
    {0: 'x'},
    [{0: 1}] * 9,
    np.zeros(3),
    'x',
    5,
    'all',
  ],
}
_BAD_PROMPTS = [
  *('', [], [''], [[]], [[10**6]], [[-1]], [None], 5, [[1.5]], [[1], 5]),
]


def bad_call(rng, shape: Shape) -> tuple[object, dict]:
  """One thing about it is wrong."""
  prompts, options = good_call(rng, shape)
  size = pair().target.spec.vocab_size
  kind = rng.random()
  if kind < 0.15:
    return _BAD_PROMPTS[rng.integers(len(_BAD_PROMPTS))], options
  table = _BAD if kind < 0.55 else _BAD_SAMPLING
  name = str(rng.choice(list(table)))
  value = table[name][rng.integers(len(table[name]))]
  if isinstance(value, str) and value == 'all':
    value = dict.fromkeys(range(size), -np.inf)
  if table is _BAD:
    return prompts, options | {name: value}
  sampling = dataclasses.replace(options['sampling'], **{name: value})
  return prompts, options | {'sampling': sampling}


def _timed_out(signum, frame):
  raise TimeoutError(f'a call took more than {_SECONDS_PER_CALL} s')


def _call(generator, prompts, options):
  """The result, or the ValueError or TypeError; others propagate."""
  signal.signal(signal.SIGALRM, _timed_out)
  signal.alarm(_SECONDS_PER_CALL)
  try:
    return generator.generate(prompts, **options), None
  except (ValueError, TypeError) as error:
    return None, error
  finally:
    signal.alarm(0)


def _generator(drafter) -> Generator:
  return Generator(pair(), drafter)


def check_clear(error: Exception) -> None:
  """Asserts that this project raised it, on purpose and with a message.

  Python itself refuses keyword arguments that the signature does not have.
  """
  if 'generate() got an unexpected keyword argument' in str(error):
    return
  last = traceback.extract_tb(error.__traceback__)[-1]
  ours = any(f'/{part}/' in last.filename for part in ('specdec', 'models'))
  where = f'{error!r} from {last.filename}:{last.lineno}'
  assert ours, f'not a clear error: {where}'
  assert 'raise' in (last.line or ''), f'not a clear error: {where}'
  assert len(str(error)) > 20, where


def run_bad(seed: int, number_of_shapes: int) -> str:
  """A call that must be refused; returns the message."""
  rng = np.random.default_rng((seed, 1))
  some = shapes(number_of_shapes)
  shape = some[rng.integers(len(some))]
  prompts, options = bad_call(rng, shape)
  generator = _generator(_drafters()[shape.drafter])
  _, error = _call(generator, prompts, options)
  if error is None:
    # The only value among them that some shapes accept.
    assert options['children'] == 'without_replacement', (prompts, options)
    assert options['verify'] != 'match'
    return ''
  check_clear(error)
  return str(error)


def run_good(seed: int, number_of_shapes: int) -> str:
  """A call that must work; returns its kind."""
  rng = np.random.default_rng((seed, 0))
  some = shapes(number_of_shapes)
  shape = some[rng.integers(len(some))]
  prompts, options = good_call(rng, shape)
  result, error = _call(
    _generator(_drafters()[shape.drafter]), prompts, options
  )
  if error is not None:
    raise AssertionError(f'{shape}, {prompts}, {options}') from error
  plain, error = _call(_generator(PLAIN), prompts, options | {'children': None})
  assert error is None, error
  where = f'seed {seed}: {shape}, {prompts!r}, {options!r}'
  _check_ends(result, options, where)
  if shape.verify == 'match':
    assert result.tokens == plain.tokens, where
    assert result.text == plain.text, where
    assert result.finish_reasons == plain.finish_reasons, where
    if result.log_probs is not None:
      for row in zip(result.log_probs, plain.log_probs, strict=True):
        np.testing.assert_allclose(*row, atol=1e-4, err_msg=where)
  else:
    temperature = np.broadcast_to(
      options['sampling'].temperature, len(plain.tokens)
    )
    for row, stochastic in enumerate(temperature > 0):
      assert stochastic or result.tokens[row] == plain.tokens[row], where
  if rng.random() < 0.2:
    _check_stream(shape, prompts, options, result, where)
  return f'{shape.verify}, {shape.drafter}'


def _check_ends(result, options, where):
  models = pair()
  limits = np.broadcast_to(options['max_new_tokens'], len(result.tokens))
  stops = options.get('stop', [[]] * len(limits))
  rows = zip(result.tokens, result.text, result.finish_reasons, strict=True)
  for row, (tokens, text, reason) in enumerate(rows):
    assert len(tokens) <= limits[row], where
    assert 0 not in tokens[:-1], where
    assert (reason == 'eos') == (tokens[-1:] == [0]), where
    whole = b''.join(models.token_bytes()[token] for token in tokens)
    found = [stop for stop in stops[row] if stop.encode() in whole]
    assert not any(stop in text for stop in stops[row]), where
    assert bool(found) == (reason == 'stop'), where
    # And with the token that completes it, the row ends.
    shorter = b''.join(models.token_bytes()[token] for token in tokens[:-1])
    assert not any(stop.encode() in shorter for stop in stops[row]), where
    assert whole.decode(errors='replace').startswith(text), where
    if reason == 'length':
      assert len(tokens) == limits[row], where


def _check_stream(shape, prompts, options, result, where):
  stream = _generator(_drafters()[shape.drafter]).stream(prompts, **options)
  texts = [''] * len(prompts)
  for new in stream:
    texts = [text + more for text, more in zip(texts, new, strict=True)]
  assert texts == result.text, where
  assert stream.result().tokens == result.tokens, where
