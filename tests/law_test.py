"""The distribution of the tokens of the compiled loop, as users run it.

Tens of thousands of rows of every rule, with every way to choose children, on
every kind of tree: their tokens are counted and compared with the exact
distribution of whole sequences, which take several steps. That each step has
randomness of its own is also shown by `enumeration_test`.
"""

import dataclasses
import functools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize
from scipy import stats
import tiny_drafters
from tiny_drafters import Settings
from tiny_drafters import with_settings

from models.nn.table_model import table_model
from specdec import decode
from specdec import DecodeConfig
from specdec import PLAIN
from specdec import Request
from specdec import staged
from specdec.checks import RULES
from specdec.sampling import BEST
from specdec.sampling import CHILDREN
from specdec.sampling import WITH_REPLACEMENT
from specdec.sampling import WITHOUT_REPLACEMENT
from specdec.tree.topology import chain
from specdec.tree.topology import from_paths
from specdec.tree.topology import k_ary
from specdec.watchers import make_watchers

_VOCAB_SIZE = 4
_LENGTH = 4
_NUM_ROWS = 60_000  # of each sampling
_CHUNK = 6100  # at a time; XLA folds constants as long as this for minutes

_GROWN = Settings(
  num_nodes=6, width=2, branching=2, rounds=2, capacity=16, cost_ratio=0
)
_TOPOLOGIES = {
  'chain': chain(2),
  'tree': k_ary(2, 2),
  'ragged': from_paths([(0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0)]),
}
_SAMPLINGS = {
  'temperature 1': {},
  'filters': {
    'temperature': 0.7,
    'top_p': 0.9,
    'min_p': 0.02,
    'repetition_penalty': 1.4,
    'logit_bias': 0.3,
  },
  'greedy': {'temperature': 0.0},
}
_DRAWN = ('temperature 1', 'filters')  # those whose distribution is tested

# Rule, children, shape.
_CASES = [
  ('rejection', BEST, 'staged'),
  ('rejection', WITHOUT_REPLACEMENT, 'tree'),
  ('rejection', WITH_REPLACEMENT, 'tree'),
  ('block', WITHOUT_REPLACEMENT, 'chain'),
]
_MORE_CASES = [
  *(
    ('rejection', BEST, shape) for shape in ('none', 'bigram', 'tree', 'grown')
  ),
  *(
    case
    for children in CHILDREN
    for case in (
      ('rejection', children, 'chain'),
      ('rejection', children, 'ragged'),
      ('block', children, 'chain'),
    )
  ),
  ('block', BEST, 'none'),
  ('block', BEST, 'bigram chain'),
  ('match', BEST, 'none'),
  ('match', BEST, 'grown'),
  ('match', BEST, 'tree'),
]

# Of one test among all, so that all hold with a probability of 99.9% at least.
_SIGNIFICANCE = 1e-3 / len(_DRAWN) / (len(_CASES) + len(_MORE_CASES))


@functools.cache
def _tables():
  """`[V, V]` logits of the target and of a draft that is right now and then."""
  rng = np.random.default_rng(0)
  target = rng.normal(size=(_VOCAB_SIZE,) * 2)
  draft = target + 1.2 * rng.normal(size=target.shape)
  return target.astype(np.float32), draft.astype(np.float32)


def _model(table):
  return table_model(table, max_positions=1000)


def _drafter(shape, draft, other):
  if shape == 'none':
    return PLAIN
  model = tiny_drafters.model(_model(draft), _GROWN)
  table = tiny_drafters.candidates(tiny_drafters.exact(other), config=_GROWN)
  if shape in _TOPOLOGIES:
    return with_settings(model, Settings(topology=_TOPOLOGIES[shape]))
  return {
    'grown': model,
    'staged': staged(model, with_settings(table, tiny_drafters.INNER)),
    'bigram': table,
    'bigram chain': with_settings(table, Settings(topology=chain(2))),
  }[shape]


# The program of users, its machine code less optimized: half the time.
@functools.partial(
  jax.jit,
  static_argnames='config',
  compiler_options={'xla_backend_optimization_level': 1},
)
def _run(target, drafter, samplings, keys, kinds, *, config):
  """The new tokens of many rows, each a batch of its own.

  Args:
    target: a model.
    drafter: the drafter.
    samplings: stacked.
    keys: `[n]`.
    kinds: `[n]`, indices of the samplings.
    config: of the decode.
  """

  def decode_row(key, kind):
    request = Request(
      prompt=jnp.full((1, 1), enumeration.PROMPT, jnp.int32),
      prompt_length=jnp.ones(1, jnp.int32),
      limit=jnp.full(1, _LENGTH, jnp.int32),
      row_keys=key[None],
      sampling=jax.tree.map(lambda array: array[kind], samplings),
      watchers=make_watchers(penalty_vocab_size=_VOCAB_SIZE),
    )
    result = decode(target, drafter, request, config=config)
    return result.tokens[0, 1:], result.counters.steps

  return jax.vmap(decode_row)(keys, kinds)


def _decode(rule, children, shape, num_rows, seed):
  """Tokens `[n, L]` and steps `[n]` of each sampling."""
  target, draft = _tables()
  samplings = [
    enumeration.full_sampling(values, _VOCAB_SIZE)
    for values in _SAMPLINGS.values()
  ]
  # Greedy rows need not be as many; they are the last.
  sizes = [num_rows] * len(_DRAWN) + [num_rows // 30]
  kinds = np.repeat(np.arange(len(sizes)), sizes)
  keys = jax.random.split(jax.random.key(seed), len(kinds))
  run = functools.partial(
    _run,
    _model(target),
    _drafter(shape, draft, other=target[::-1]),
    jax.tree.map(lambda *arrays: jnp.stack(arrays), *samplings),
    config=DecodeConfig(max_new_tokens=_LENGTH, rule=RULES[rule](children)),
  )
  found = [
    run(keys[start : start + _CHUNK], kinds[start : start + _CHUNK])
    for start in range(0, len(kinds), _CHUNK)
  ]
  split = lambda array: np.split(array, np.cumsum(sizes)[:-1])
  tokens, steps = map(np.concatenate, zip(*found, strict=True))
  return split(tokens), split(steps)


@dataclasses.dataclass(frozen=True)
class _Law:
  """The distribution of a table's tokens, in float64.

  Attributes:
    table: `[V, V]` logits.
    values: one of `_SAMPLINGS`.
  """

  table: np.ndarray
  values: dict

  @functools.cached_property
  def _known(self):
    return {}

  def after(self, text):
    """`[V]`, of the token after a text."""
    key = (text[-1], frozenset(text))
    if key not in self._known:
      seen = np.isin(np.arange(_VOCAB_SIZE), text)[None]
      row = self.table[text[-1]][None]
      self._known[key] = enumeration.exact_probs(row, seen, self.values)[0]
    return self._known[key]

  def of_sequences(self):
    """`[V ** L]`."""
    probs = {(enumeration.PROMPT,): 1.0}
    for _ in range(_LENGTH):
      probs = {
        (*text, token): prob * after
        for text, prob in probs.items()
        for token, after in enumerate(self.after(text))
      }
    return np.array(list(probs.values()))


def _counts(tokens):
  """The number of rows with each sequence, `[V ** L]`."""
  code = np.zeros(len(tokens), int)
  for place in range(tokens.shape[1]):
    code = code * _VOCAB_SIZE + tokens[:, place]
  return np.bincount(code, minlength=_VOCAB_SIZE ** tokens.shape[1])


def _cells(counts, law):
  """Counts and probabilities of cells, one of which is all rare sequences."""
  rare = counts.sum() * law < 5
  join = lambda array: np.append(array[~rare], array[rare].sum())
  counts, law = join(counts), join(law)
  kept = (law > 0) | (counts > 0)
  return counts[kept], law[kept]


def _p_value(counts, law):
  """By the G-test."""
  if np.any(counts[law <= 0]):
    return 0.0
  counts, law = _cells(counts, law)
  return stats.power_divergence(
    counts, counts.sum() * law, lambda_='log-likelihood'
  ).pvalue


def _smallest_distance_seen(num_rows, num_cells, power=0.99):
  """The total variation that is detected with this power, wherever it is.

  Of all distributions at a distance TV those are hardest to tell from p whose
  chi-square is least: sum (q - p)^2 / p is at least (sum |q - p|)^2 = 4 TV^2.
  """
  freedom = num_cells - 1
  threshold = stats.chi2.isf(_SIGNIFICANCE, freedom)
  missed = lambda distance: (
    stats.ncx2.sf(threshold, freedom, num_rows * 4 * distance**2) - power
  )
  return optimize.brentq(missed, 1e-4, 0.5)


def _moved(law, amount):
  """The distribution at this distance that is hardest to detect."""
  order = np.argsort(law)
  below = np.zeros(len(law), bool)
  below[order[np.cumsum(law[order]) < 0.5]] = True
  moved = law * np.where(
    below, 1 + amount / law[below].sum(), 1 - amount / law[~below].sum()
  )
  np.testing.assert_allclose(0.5 * np.abs(moved - law).sum(), amount)
  return moved


def _check(rule, children, shape, num_rows=_NUM_ROWS, seed=0):
  tokens, steps = _decode(rule, children, shape, num_rows, seed)
  target, _ = _tables()
  # The last of the samplings is greedy: all rows have the same tokens.
  greedy = _Law(target, _SAMPLINGS['greedy']).of_sequences().argmax()
  assert _counts(tokens[-1])[greedy] == len(tokens[-1])
  for kind, name in enumerate(_DRAWN):
    law = _Law(target, _SAMPLINGS[name]).of_sequences()
    counts = _counts(tokens[kind])
    assert _p_value(counts, law) > _SIGNIFICANCE, name
    # And the test is powerful.
    moved = _moved(law, 0.03)
    assert _p_value(counts, moved) < _SIGNIFICANCE, name
    # More than one step in most rows, or it would not test several.
    assert np.mean(steps[kind]) > 1.5


@pytest.mark.parametrize(('rule', 'children', 'shape'), _CASES)
def test_sequences_have_the_targets_law(rule, children, shape):
  _check(rule, children, shape)


@pytest.mark.long
@pytest.mark.parametrize(('rule', 'children', 'shape'), [*_CASES, *_MORE_CASES])
def test_ten_times_as_many(rule, children, shape):
  _check(rule, children, shape, num_rows=10 * _NUM_ROWS, seed=1)


def test_what_the_g_test_can_see():
  """A total variation of 0.03 of the joint law, 99 times in 100."""
  for name in _DRAWN:
    law = _Law(_tables()[0], _SAMPLINGS[name]).of_sequences()
    counts, _ = _cells(_NUM_ROWS * law, law)
    assert _smallest_distance_seen(_NUM_ROWS, len(counts)) < 0.03
