"""Random calls of the text API, good and bad, and what must hold for each.

What is static about a call is one of a short list, so that any number of calls
shares some dozens of programs; everything else is random.
"""

import dataclasses
import functools
import traceback

import byte_level
import numpy as np
import tiny_drafters

import specdec
from specdec.models.nn import table_model
from specdec.models.text import generator as generator_lib
from specdec.models.text import pair as pair_lib
from specdec.tree import topology as topology_lib

# A few tokens that share bytes, and some with pieces of characters.
_PIECES = (
  'a',
  'b',
  'ab',
  'ba',
  'aab',
  ' ',
  '\n',
  'b\n',
  'é',
  'né',
  '日本',
  '😀',
)
_CONTEXT = 110
_DRAFT_CONTEXT = 60


@functools.cache
def _tokenizer():
  texts = [byte_level.spelled(piece) for piece in _PIECES]
  letters = sorted({letter for text in texts for letter in text})
  merges, words = [], dict.fromkeys(['<end>', *letters])
  for text in texts:
    built = text[0]
    for letter in text[1:]:
      merges.append((built, letter))
      built += letter
      words[built] = None
  return byte_level.tokenizer(words, merges=merges, eos_token='<end>')


@functools.cache
def _tables():
  """Logits `[V, V]` of the target and of its draft."""
  size = len(_tokenizer())
  rng = np.random.default_rng(0)
  logits = 2 * rng.normal(size=(size, size))
  logits[:, 0] -= 2  # the end comes seldom
  return logits, logits + rng.normal(size=logits.shape)


@functools.cache
def pair() -> pair_lib.Pair:
  """A target and a draft that is often right, and sees less."""
  target, draft = (
    table_model.table_model(table, max_positions=context)
    for table, context in zip(
      _tables(), (_CONTEXT, _DRAFT_CONTEXT), strict=True
    )
  )
  return pair_lib.Pair(target, draft, _tokenizer(), eos_ids=(0,))


@functools.cache
def _drafter(name: str):
  rng = np.random.default_rng(1)
  size = len(_tokenizer())
  text = [1]  # such as the target emits
  for _ in range(80):
    text.append(int(np.argmax(_tables()[0][text[-1]] + rng.gumbel(size=size))))
  table = tiny_drafters.ngram_table([text], size, order=3, num_continuations=3)
  both = functools.partial(
    tiny_drafters.candidates,
    specdec.PromptLookup((0.2, 0.5), num_matches=2),
    specdec.NGram(table),
  )
  inner = tiny_drafters.Settings(width=2, branching=2, rounds=2, cost_ratio=0)
  tree = tiny_drafters.Settings(
    num_nodes=8, width=3, branching=2, rounds=2, capacity=24, cost_ratio=0
  )
  ragged = topology_lib.Topology(
    [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)]
  )
  fixed = lambda shape: tiny_drafters.Settings(topology=shape)
  drafted = lambda config: tiny_drafters.model(pair().draft, config)
  return {
    'plain': lambda: specdec.PLAIN,
    'chain': lambda: drafted(fixed(topology_lib.chain(3))),
    'ragged': lambda: drafted(fixed(ragged)),
    'tree': lambda: drafted(tree),
    'tables': lambda: both(config=tree),
    'staged': lambda: specdec.staged(drafted(tree), both(config=inner)),
  }[name]()


@dataclasses.dataclass(frozen=True)
class Shape:
  """Static settings of a call."""

  drafter: str
  batch_size: int
  on: frozenset[str] = frozenset()
  verify: str = 'match'
  children: str | None = None
  long_prompt: bool = False

  def generator(self, drafter: str | None = None) -> generator_lib.Generator:
    chosen = _drafter(drafter or self.drafter)
    return generator_lib.Generator(pair(), chosen)


_FILTERS = frozenset({'top_k', 'top_p', 'min_p'})
_TEXT = frozenset({'stop', 'logit_bias', 'repetition_penalty', 'log_probs'})
_EVERYTHING = _FILTERS | _TEXT
# Shapes of one batch size and options share a plain program.
SHAPES = (
  Shape('tree', 1, _EVERYTHING, children='best'),
  Shape('ragged', 1, _EVERYTHING, verify='rejection'),
  Shape('staged', 2, _EVERYTHING),
  Shape('tables', 3, _TEXT, long_prompt=True),
  Shape('chain', 3, _TEXT, verify='block', long_prompt=True),
  Shape('ragged', 2, verify='traversal', children='with_replacement'),
)


def _random_text(rng, least, most):
  pieces = rng.choice(_PIECES, size=rng.integers(least, most + 1))
  return ''.join(pieces)


def _likely_text(rng):
  """A text that the target is likely to emit; may cut its tokens."""
  tokens = [int(rng.integers(1, len(_tokenizer())))]
  for _ in range(rng.integers(1, 3)):
    tokens.append(int(rng.choice(np.argsort(-_tables()[0][tokens[-1]])[:3])))
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
  size, batch_size = len(_tokenizer()), shape.batch_size
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
  sampling = specdec.Sampling(**{k: v for k, v in values.items() if k in on})
  if isinstance(sampling.top_k, list):
    # All entries but one bucket would be programs of their own.
    sampling = dataclasses.replace(sampling, top_k=[*sampling.top_k[:-1], 100])
  elif 'top_k' in on:
    sampling = dataclasses.replace(sampling, top_k=100)
  options = {
    'max_new_tokens': each(limit),
    'room_for_new_tokens': 64,
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


_NAN, _INF = np.nan, np.inf
_BAN = dict.fromkeys(range(len(_tokenizer())), -_INF)
_LIMIT = 'max_new_tokens must be an integer, or one per row'
_ROOM = 'room_for_new_tokens must be an integer from max_new_tokens='
_SEED = 'seed must be an integer of 32 bits, or one per row'
_ROWS = r'one list of strings per row \(2\)'
_EOS = 'eos_ids must be a list of token ids'
_IDS = 'prompt . must be a list of token ids'
_TOP_K = 'top_k must be a positive integer, got'
_NOT_PER_ROW = 'must be one number or one per row'
_NOT_A_NUMBER = 'must be a number or one per row'
_BIAS_SHAPE = 'logit_bias must be a mapping .* got shape'
# For two prompts: the argument, bad values, and words of the message. A dot
# marks arguments of `Sampling`.
BAD = (
  ('prompts', ('', [''], [[]], ['a', ''], []), 'prompt(s| .) is empty'),
  ('prompts', ([[1], [10**6]], [[1], [-1]]), 'prompt 1 has token .*, outside'),
  ('prompts', ([None, 'a'], [[1.5], 'a'], ['a', 5], ['a', [[1]]]), _IDS),
  (
    'prompts',
    (5, {1: 2}),
    'prompts must be a text, a list of ids, a conversation',
  ),
  ('prompts', (['a', [1] * 200],), 'prompt 1 of 200 tokens .* exceed the cont'),
  ('max_new_tokens', (-1, [3, -1]), 'max_new_tokens must be at least 0, got'),
  ('max_new_tokens', (2.5, 'many', [1] * 9, None, [[1], [1]]), _LIMIT),
  ('room_for_new_tokens', (-1, 1.5, 'x', 10**9), _ROOM),
  ('max_new_tokens', (10**6,), _ROOM),
  ('seed', ('x', 1.5, [1, None], True, [0.5, 1], 2**32, -(10**30)), _SEED),
  ('seed', ([1], [1] * 9), r'one integer or one per row \(2\), got [19]'),
  ('stop', ('', [['a'], ['a', '']]), "row . has the stop string '"),
  ('stop', ('\ud800', [['a'], ['\udfff']]), 'row . has the lone surrogate'),
  ('stop', ([['a']], [['a']] * 9, [['a'], 'b'], [1], 5, [None]), _ROWS),
  ('eos_ids', ([10**6], [1, -1]), 'eos_ids has token .*, outside'),
  ('eos_ids', (3, [None], [1.5], {5: 1}), _EOS),
  (
    'eos_ids',
    ('', ['x', 0], [0, 'b a']),
    'no token of the target has this text',
  ),
  ('verify', ('mtch', None, 3), 'verify must be one of'),
  ('children', ('bst', 7), 'children must be one of'),
  ('children', ('without_replacement',), 'verify=match wants the best'),
  ('temprature', (1.0,), "unexpected keyword .* 'temprature'.* max_new_tokens"),
  ('drafter', (None,), "unexpected keyword .* 'drafter'"),
  ('sampling', ({'temperature': 1}, None), 'must be a specdec.Sampling'),
  ('.temperature', (-1e-9, 2e6, _NAN, _INF, [1, -1]), 'must be between 0'),
  ('.temperature', ('hot', None, 10**400), f'temperature {_NOT_A_NUMBER}'),
  ('.temperature', ([1.0] * 9, [[1.0], [1.0]]), f'temperature {_NOT_PER_ROW}'),
  ('.top_k', (0, -1, 2.5, True, 'x', [3, 0], [3, 1.5], [[5], [5]]), _TOP_K),
  ('.top_k', ([3, None, 4], [None] * 3), r'top_k must be one .* \(3,\)'),
  ('.top_p', (0, 1.5, _NAN, [0.5, 0.0]), 'top_p must be above 0 and at most 1'),
  ('.top_p', ('x',), f'top_p {_NOT_A_NUMBER}'),
  ('.top_p', ([0.5] * 9, [0.5]), f'top_p {_NOT_PER_ROW}'),
  ('.min_p', (-0.1, 1.5, _NAN), 'min_p must be between 0 and 1, got'),
  ('.min_p', ('x',), f'min_p {_NOT_A_NUMBER}'),
  ('.min_p', ([0.5] * 9,), f'min_p {_NOT_PER_ROW}'),
  ('.repetition_penalty', (0, -1, 1e-30, 1e30, _NAN, _INF), 'between 0.001'),
  ('.repetition_penalty', ('x',), f'repetition_penalty {_NOT_A_NUMBER}'),
  ('.repetition_penalty', ([1.0],), r'repetition_penalty .* per row \(2\)'),
  ('.logit_bias', ({10**6: 1.0}, {-1: 1.0}), 'has token .*, outside'),
  ('.logit_bias', ({'x': 1},), 'logit_bias must be a list of token ids'),
  (
    '.logit_bias',
    ({0: 'x'}, {0: 10**400}),
    'logit_bias must map tokens to numbers',
  ),
  ('.logit_bias', ({0: _NAN}, {0: _INF}), 'must be numbers or -inf'),
  ('.logit_bias', ([{0: 1.0}],), r'one mapping or one per row \(2\), got 1'),
  ('.logit_bias', (np.zeros(3), 'x', 5), _BIAS_SHAPE),
  ('.logit_bias', (_BAN, [None, _BAN]), 'logit_bias bans every token'),
)
_BAD_SHAPE = next(
  shape for shape in SHAPES if shape.batch_size == 2 and shape.on
)


def run_bad(name: str, value: object, seed: int) -> Exception:
  """A good call but for one thing; the error."""
  rng = np.random.default_rng((seed, 1))
  prompts, options = good_call(rng, _BAD_SHAPE)
  if name == 'prompts':
    prompts = value
    # An option per row would be refused for the number of rows.
    options = {'max_new_tokens': 1}
  elif name.startswith('.'):
    change = {name[1:]: value}
    options['sampling'] = dataclasses.replace(options['sampling'], **change)
  else:
    options[name] = value
  try:
    result = _BAD_SHAPE.generator().generate(prompts, **options)
  except (ValueError, TypeError) as error:
    check_clear(error)
    return error
  raise AssertionError(f'{name}={value!r} was accepted: {result.tokens}')


def run_good(seed: int) -> np.ndarray:
  """A call that must work; how many steps emitted 1, 2, ... tokens."""
  rng = np.random.default_rng((seed, 0))
  shape = SHAPES[seed % len(SHAPES)]
  prompts, options = good_call(rng, shape)
  where = f'seed {seed}: {shape}, {prompts!r}, {options!r}'
  try:
    result = shape.generator().generate(prompts, **options)
    plain = shape.generator('plain').generate(
      prompts, **options | {'children': None, 'verify': 'match'}
    )
  except (ValueError, TypeError) as error:
    raise AssertionError(where) from error
  _check_ends(result, options, where)
  if shape.verify == 'match':
    assert result.tokens == plain.tokens, where
    assert result.text == plain.text, where
    assert result.finish_reasons == plain.finish_reasons, where
    if result.log_probs is not None:
      for row in zip(result.log_probs, plain.log_probs, strict=True):
        np.testing.assert_allclose(*row, atol=1e-4, err_msg=where)
  else:
    of_rows = options['sampling'].temperature, len(plain.tokens)
    for row, stochastic in enumerate(np.broadcast_to(*of_rows) > 0):
      assert stochastic or result.tokens[row] == plain.tokens[row], where
  if rng.random() < 0.2:
    _check_stream(shape, prompts, options, result, where)
  return np.array(result.stats.accepted_histogram)


def _check_ends(result, options, where):
  models = pair()
  limits = np.broadcast_to(options['max_new_tokens'], len(result.tokens))
  stops = options.get('stop', [[]] * len(limits))
  rows = zip(result.tokens, result.text, result.finish_reasons, strict=True)
  for row, (tokens, text, reason) in enumerate(rows):
    assert len(tokens) <= limits[row], where
    assert len(tokens) == len((result.log_probs or result.tokens)[row]), where
    assert 0 not in tokens[:-1], where
    assert (reason == 'eos') == (tokens[-1:] == [0]), where
    whole = b''.join(models.token_bytes()[token] for token in tokens)
    completed = [stop for stop in stops[row] if stop.encode() in whole]
    assert not any(stop in text for stop in stops[row]), where
    assert bool(completed) == (reason == 'stop'), where
    # And with the token that completes it, the row ends.
    shorter = b''.join(models.token_bytes()[token] for token in tokens[:-1])
    assert not any(stop.encode() in shorter for stop in stops[row]), where
    assert whole.decode(errors='replace').startswith(text), where
    if reason == 'length':
      assert len(tokens) == limits[row], where


def _check_stream(shape, prompts, options, result, where):
  stream = shape.generator().stream(prompts, **options)
  texts = [''] * len(prompts)
  for new in stream:
    texts = [text + more for text, more in zip(texts, new, strict=True)]
  assert texts == result.text, where
  assert stream.result().tokens == result.tokens, where
