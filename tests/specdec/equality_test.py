"""The promise of the library: a drafter changes the speed, never the tokens.

A row of the tables below is a pair of target and drafter, the shape of what is
drafted, and a form of decoding. The tokens are compared one by one with a slow
loop, `reference`, which asks the target about one text after another, without a
cache or a batch, in float64. Greedy and sampled texts are in one batch, under
all filters. `fuzz_test` has random requests.
"""

import dataclasses
import functools
import itertools
import pathlib
import tempfile
from unittest import mock

import block_folders
import enumeration
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import tiny_drafters
import tiny_heads
import tiny_recurrent

import specdec
from specdec import randomness as randomness_lib
from specdec.draft import block as block_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import heads
from specdec.models.nn import adapter
from specdec.models.nn import other_tokens
from specdec.models.nn import rope as rope_lib
from specdec.models.nn import table_model
from specdec.text import automaton as automaton_lib
from specdec.tree import topology as topology_lib

_LIMIT = tiny.MAX_NEW_TOKENS
_TEMPERATURES = (0.0, 1.0, 1.0, 0.0, 0.7)
_KEYS = tiny.row_keys(5)
_DEPTH = 3  # of chains
_END = 1

# Changes of the logits of a target: as the library has them, and as a function
# of the logits, a text and the length of the prompt.


class Turns(flax.struct.PyTreeNode, specdec.Constraint):
  """Remainders by 3 take turns; the text may end after three tokens."""

  def next_state(self, state, tokens):
    after = jnp.where(tokens % 3 == state, (state + 1) % 3, -1)
    return jnp.where(tokens == _END, jnp.where(state == 0, 0, -1), after)


def _may_follow(number, token):
  return number % 3 == 0 if token == _END else token % 3 == number % 3


def _in_turns(logits, text, start):
  tokens = range(len(logits))
  allowed = [_may_follow(len(text) - start, token) for token in tokens]
  return np.where(allowed, logits, -np.inf)


_MOODS = 5
_BIAS = np.random.default_rng(3).normal(size=(_MOODS, tiny.VOCAB_SIZE)) * 3


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
    return logits + jnp.asarray(self.bias)[carried, : logits.shape[-1]]

  def keep(self, state, carried, added):
    after = self.after(carried, added.tokens)
    moods = jnp.concatenate([state[:, None], after], axis=1)
    return jnp.take_along_axis(moods, added.count[:, None], axis=1)[:, 0]


def _moody(logits, text, start):
  return logits + _BIAS[sum(text) % _MOODS, : len(logits)]


_UNDER = {
  'filters': ({}, lambda logits, text, start: logits),
  'turns': ({'constraint': Turns(), 'eos_ids': [_END]}, _in_turns),
  'moods': ({'adjusters': (Moods(np.float32(_BIAS)),)}, _moody),
  'a fallback': ({'break_even': 9.0}, lambda logits, text, start: logits),
}

# Targets, and what drafts for them.

_TABLE = tiny.table(24)
_table = functools.partial(
  table_model.table_model, max_positions=tiny.MAX_POSITIONS
)
_hashed = functools.partial(
  tiny_recurrent.hashed, 24, max_positions=tiny.MAX_POSITIONS
)
_llama = lambda name='llama', **changes: adapter.as_model(
  tiny.llama_module(name, **changes)
)
_by_model = specdec.LanguageModelScorer


def _block(edges=_TABLE - _TABLE.mean(0), mean=_TABLE.mean(0), **changes):
  """A block drafter that has the table by heart, if it has an edge term."""
  marginals = np.tile(mean, (_DEPTH, 1))
  scorer = tiny_drafters.block_table(marginals, edges, **changes)
  return tiny_drafters.keeping_states(_table(_TABLE)), scorer


def _tail():
  """A draft that reads the last three tokens of a prompt."""
  draft = tiny.draft('similar', num_layers=1)
  return tiny_drafters.target(), _by_model(draft, most_tokens=3)


def _loaded(module, write):
  """The model of a module, and a head or block drafter that is loaded."""
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    write(folder)
    stored = heads.locate(folder, module.config)
    target = adapter.as_model(module, hidden=stored.config.reads)
    return target, heads.load(stored, target)


def _head_for_states():
  """A head for a delta net."""
  values = tiny_heads.tensors('eagle3')
  write = lambda folder: tiny_heads.write(folder, 'sglang', values)
  target, head = _loaded(tiny.llama_module('delta'), write)
  return target, specdec.HeadScorer(head)


def _head_of_few_ids():
  """A head with `d2t`."""
  values = tiny_heads.tensors('eagle3', reduced=True)
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    tiny_heads.write(folder, 'sglang', values, reduced=True)
    return tiny_heads.target(), specdec.HeadScorer(tiny_heads.load(folder))


def _block_for_states(case):
  """A block drafter for a target of convolutions."""
  module = tiny.llama_module(
    'lfm2',
    vocab_size=block_folders.VOCAB,
    width=block_folders.WIDTH,
    num_layers=block_folders.LAYERS,
    mixers=('conv', 'self_attn', 'conv', 'conv'),
  )
  target, block = _loaded(module, lambda at: block_folders.write(at, case))
  return target, block_lib.BlockScorer(block)


def _other_tokens():
  """For delta nets, a draft that reads a token as one to three of its own.

  It computes most of its outputs, and has no token that is one of three.
  """
  size, rng = tiny.VOCAB_SIZE, np.random.default_rng(0)
  module = tiny.module(
    vocab_size=size,
    num_positions=3 * tiny.MAX_POSITIONS,
    tie_embeddings=False,
    num_layers=1,
  )
  same = rng.permutation(size).astype(np.int32)
  outputs = np.setdiff1d(np.arange(size), same[[3, 7, 30]])
  same[9] = -1
  parts = rng.integers(size, size=(size, 3), dtype=np.int32)
  number = rng.integers(1, 4, size=(size, 1))
  parts[np.arange(3)[None] < 3 - number] = -1
  with tempfile.TemporaryDirectory() as folder:
    hub.save_pretrained(module, folder)
    draft = adapter.as_model(hub.load_module(folder, outputs=outputs))
  draft = other_tokens.with_other_tokens(draft, same, parts)
  proposed = np.flatnonzero(np.isin(same, outputs)).astype(np.int32)
  return _llama('delta'), _by_model(draft.replace(proposed=proposed))


# One of two layers sees the last tokens alone, and rotates in its own way.
_GEMMA = {
  'window': (4, None),
  'post_norm': True,
  'rope': (rope_lib.Rope(theta=100.0), rope_lib.Rope(theta=1000.0)),
}
_PAIRS = {
  'table': lambda: (_table(_TABLE), _by_model(_table(_TABLE))),
  'guesses': lambda: (
    _table(_TABLE),
    specdec.CandidateScorer((tiny_drafters.exact(_TABLE),)),
  ),
  'wrong table': lambda: (_table(_TABLE), _by_model(_table(tiny.table(24, 1)))),
  'block': _block,
  'block without edges': lambda: _block(None),
  'block with noise': lambda: _block(_TABLE, 0 * _TABLE[0]),
  'tail': _tail,
  'hashes': lambda: (_hashed(), _by_model(_hashed(1.0))),
  'lfm2': lambda: (_llama('lfm2'), _by_model(_llama('delta'))),
  'delta': lambda: (_llama('delta'), _by_model(_llama('lfm2'))),
  'delta by itself': lambda: (_llama('delta'), _by_model(_llama('delta'))),
  'mixtral': lambda: (_llama('mixtral'), _by_model(_llama('mixtral'))),
  'mistral': lambda: (
    _llama(num_layers=1, window=4),
    _by_model(_llama(num_layers=1)),
  ),
  'gemma': lambda: (_llama(**_GEMMA), _by_model(_llama(post_norm=True))),
  'other tokens': _other_tokens,
  'head for states': _head_for_states,
  'head of few ids': _head_of_few_ids,
  'block for states': lambda: _block_for_states('z-lab'),
  'block of few ids': lambda: _block_for_states('speculators gated'),
}
# All that a chain of the first proposes is accepted, of the others little.
_PERFECT = ('table', 'guesses')
_WEAK = ('wrong table', 'lfm2', 'delta', 'other tokens')
_WEAK += ('head for states', 'head of few ids', 'block of few ids')


@functools.cache
def pair(name):
  """The target of a row of `_PAIRS`, and the scorer that drafts for it."""
  return _PAIRS[name]()


def _drafter(name, shape):
  _, scorer = pair(name)
  tree = tiny_drafters.TREE.drafter(scorer)
  lookup = specdec.PromptLookup((0.5,))
  return {
    'plain': lambda: specdec.PLAIN,
    'chain': lambda: specdec.fixed_drafter(scorer, topology_lib.chain(_DEPTH)),
    'tree': lambda: tree,
    'staged': lambda: specdec.staged(
      tree, tiny_drafters.candidates(lookup, config=tiny_drafters.INNER)
    ),
  }[shape]()


# The expected result.

_logits = jax.jit(specdec.LanguageModel.logits)


def _prompts(model):
  return [
    [token % model.spec.vocab_size for token in prompt]
    for prompt in tiny.prompts(len(_KEYS))
  ]


@functools.cache
def _slowly(name, under, row, prompt, limit):
  """The new tokens of a text, in the row of a temperature and a key."""
  model, _ = pair(name)
  adjust = _UNDER[under][1]

  def logits_of(text):
    padded = np.zeros((1, tiny.MAX_POSITIONS), np.int32)
    padded[0, : len(text)] = text
    logits = np.asarray(_logits(model, padded))[0, len(text) - 1]
    return adjust(logits, text, len(prompt))

  options = reference.Options(  # as of `tiny.sampling`
    temperature=_TEMPERATURES[row], top_k=20, top_p=0.95, min_p=0.01
  )
  new, _ = reference.decode(logits_of, prompt, limit, _KEYS[row], options)
  ends = new.index(_END) + 1 if under == 'turns' and _END in new else limit
  return new[:ends]


def _expected(name, under, prompts, limit=_LIMIT):
  return [
    _slowly(name, under, row, tuple(prompt), limit)
    for row, prompt in enumerate(prompts)
  ]


# Forms of decoding.


def _together(name, shape, under, verify='match', **changes):
  model, _ = pair(name)
  options = {
    'max_new_tokens': _LIMIT,
    'drafter': _drafter(name, shape),
    'sampling': tiny.sampling(*_TEMPERATURES),
    'verify': verify,
  }
  return specdec.generate(
    model, _KEYS, _prompts(model), **options | _UNDER[under][0] | changes
  )


def check_together(name, shape, under='filters', verify='match'):
  """In one batch; without match, the greedy rows are the loop's."""
  result = _together(name, shape, under, verify)
  expected = _expected(name, under, _prompts(pair(name)[0]))
  for row, new in enumerate(result.tokens):
    if verify == 'match' or not _TEMPERATURES[row]:
      assert new == expected[row]
    if under == 'turns':
      assert all(_may_follow(index, token) for index, token in enumerate(new))
  stats = result.stats
  if shape == 'plain':
    assert len({*itertools.chain(*expected)}) > 8, 'a poor example'
  elif name in _PERFECT and shape == 'chain' and verify == 'match':
    forwards = sum(-(-len(new) // (_DEPTH + 1)) for new in result.tokens)
    assert stats.target_forwards == forwards
  elif name not in _WEAK and under != 'a fallback':
    assert stats.block_efficiency > 1.1
  if 'block' in stats.stage_forwards and shape != 'staged':
    assert stats.stage_forwards['block'] == stats.target_forwards
  if under == 'a fallback':
    assert 0 < stats.plain_steps < stats.target_forwards


# By pair: the shape of what is drafted, what changes the logits, and the rule.
_TOGETHER = {
  'hashes': ['plain', 'tree, a fallback'],
  'mixtral': ['chain'],
  'mistral': ['tree'],
  'gemma': ['tree'],
  'delta': ['staged, turns'],
  'delta by itself': ['chain'],
  'head for states': ['tree, turns'],
  'head of few ids': ['staged', 'tree, filters, rejection'],
  'block for states': ['tree, turns'],
  'block of few ids': ['tree'],
  'other tokens': ['chain'],
  'block': ['chain', 'staged'],
  'block without edges': ['tree'],
  'block with noise': ['chain'],
  'table': ['plain, turns', 'chain, turns', 'chain, turns, rejection'],
  'guesses': ['chain, turns'],
  'wrong table': ['staged, turns'],
}


@pytest.mark.parametrize(
  'case', [f'{name}, {how}' for name, ways in _TOGETHER.items() for how in ways]
)
def test_in_one_batch(case):
  check_together(*case.split(', '))


@pytest.mark.parametrize(
  'case',
  [
    'hashes, tree',
    'lfm2, tree',
    'block, tree',
    'tail, chain',
    'table, chain, moods',
  ],
)
def test_in_slots(case):
  """Prompts that come and go, long ones read in parts."""
  name, shape, under = [*case.split(', '), 'filters'][:3]
  model, _ = pair(name)
  sampling = lambda temperature: specdec.Sampling(
    temperature=temperature, top_k=20, top_p=0.95, min_p=0.01
  )
  slots = specdec.Slots(
    model,
    num_slots=2,
    context=tiny.MAX_POSITIONS,
    drafter=_drafter(name, shape),
    sampling=sampling(0.0),
    reading=11,
    **_UNDER[under][0],
  )
  jobs = [
    {
      'prompt': prompt,
      'rng_key': _KEYS[row],
      'max_new_tokens': _LIMIT,
      'sampling': sampling(_TEMPERATURES[row]),
    }
    for row, prompt in enumerate(_prompts(model))
  ]
  generations, _ = tiny.in_slots(slots, jobs)
  expected = _expected(name, under, _prompts(model))
  assert [generation.tokens[0] for generation in generations] == expected


@pytest.mark.parametrize(
  'case', ['table, tree, moods', 'hashes, tree', 'tail, staged']
)
def test_in_a_conversation(case):
  """Each turn equals decoding its text; texts go on, end before, or change."""
  name, shape, under = [*case.split(', '), 'filters'][:3]
  model, _ = pair(name)
  texts, answers = _prompts(model)[:2], []
  texts[0] = 4 * texts[0]
  decoding = specdec.Decoding(
    model,
    _KEYS[:2],
    texts,
    max_new_tokens=8,
    room_for_new_tokens=tiny.MAX_NEW_TOKENS,
    drafter=_drafter(name, shape),
    sampling=tiny.sampling(*_TEMPERATURES[:2]),
    **_UNDER[under][0],
  )
  for change in (
    lambda text: text + 9 * [7],
    lambda text: text[:-5],
    lambda text: [*text[:3], 8, *text[4:]],
    None,
  ):
    decoding.run()
    answers = decoding.result().tokens
    assert answers == _expected(name, under, texts, 8)
    if change is not None:
      texts = [*map(change, map(list.__add__, texts, answers))]
      decoding.extend(texts, max_new_tokens=8)


# Drafters of every quality for one target, a GPT-2.

# Which drafters are tried of a shape, and how many tokens a step must have
# emitted now and then: otherwise the equality would be tested at the extremes.
_SHAPES = {
  'tree': ([(kind, 'perfect') for kind in tiny.DRAFTS], range(1, 5)),
  'tables': (
    [('perfect', inner) for inner in tiny_drafters.TABLES],
    range(1, 3),
  ),
  'staged': (
    [
      ('perfect', 'perfect'),
      ('hopeless', 'perfect'),
      ('hopeless', 'empty'),
      ('random', 'empty'),
      ('similar', 'wrong'),
    ],
    range(1, 7),
  ),
}


# The third child, but not the first two, goes on.
_RAGGED = topology_lib.Topology(
  [(0,), (1,), (2,), (2, 0), (2, 1), (2, 1, 0), (2, 1, 0, 0), (0, 3)]
)


def _of_quality(shape, kind, inner):
  """A kind of `tiny.DRAFTS` around one of `tiny_drafters.TABLES`.

  A perfect table knows these very texts by heart. The model between is similar.
  """
  draft = lambda kind: tiny.draft(kind, num_layers=1)
  prompts = _prompts(tiny_drafters.target())
  texts = map(list.__add__, prompts, _expected('tail', 'filters', prompts))
  tables = functools.partial(
    tiny_drafters.candidates,
    tiny_drafters.table_of([*texts], inner),
    specdec.PromptLookup((0.0, 0.3, 0.6), num_matches=2),
  )
  small = tiny_drafters.model(draft('similar'), tiny_drafters.INNER, 'small')
  tree = tiny_drafters.model(draft(kind), tiny_drafters.TREE)
  return {
    'tree': lambda: tree,
    # Not all that has a place in the tree is guessed.
    'tables': lambda: tables(config=tiny_drafters.Settings(topology=_RAGGED)),
    'staged': lambda: specdec.staged(
      tree, specdec.staged(small, tables(config=tiny_drafters.INNER))
    ),
  }[shape]()


# One test for all kinds of a shape, so that no two processes compile the same.
@pytest.mark.parametrize('shape', _SHAPES)
def test_of_every_quality(shape):
  kinds, lengths = _SHAPES[shape]
  prompts, histograms = _prompts(tiny_drafters.target()), {}
  # The trees of a row that fills the context reach beyond its end.
  assert max(map(len, prompts)) + _LIMIT == tiny.MAX_POSITIONS
  for kind, inner in kinds:
    drafter = _of_quality(shape, kind, inner)
    result = _together('tail', 'plain', 'filters', drafter=drafter)
    expected = _expected('tail', 'filters', prompts)
    assert result.tokens == expected, f'{kind} model, {inner} inner'
    histograms[kind, inner] = np.array(result.stats.accepted_histogram)
  emitted = np.flatnonzero(sum(histograms.values())) + 1
  assert {*lengths} <= {*emitted.tolist()}
  if shape == 'staged':  # a better stage inside is worth it
    steps = lambda inner: histograms['hopeless', inner].sum()
    assert 1.3 * steps('perfect') < steps('empty')
  if shape == 'tree':  # the draft sees what the target sees, in three rounds
    perfect = histograms['perfect', 'perfect']
    assert perfect[3] > 0.9 * perfect.sum()


# Under what cannot be said.


def test_the_example_has_texts_that_end_and_the_constraint_matters():
  prompts = _prompts(_table(_TABLE))
  bound, free = (_expected('table', of, prompts) for of in ('turns', 'filters'))
  assert {_END in new for new in bound} == {True, False}
  assert all(text != other for text, other in zip(bound, free, strict=True))


def test_where_nothing_may_follow_the_row_ends_with_an_error():
  bias = {token: -np.inf for token in range(24) if token % 3 == 2}
  sampling = tiny.sampling(*_TEMPERATURES)
  sampling = dataclasses.replace(sampling, logit_bias=[None, bias] + 3 * [None])
  result = _together('table', 'chain', 'turns', sampling=sampling)
  assert result.finish_reasons[1] == 'error'
  assert len(result.tokens[1]) == 2
  assert 'or constraint and bias exclude all tokens' in result.errors[1]
  prompts = _prompts(_table(_TABLE))
  assert result.tokens[0] == _expected('table', 'turns', prompts)[0]


class _Wrong(specdec.Constraint):
  def next_state(self, state, tokens):
    return jnp.where(tokens > state, 1.0, -1.0)


_ALIEN = automaton_lib.stack([None], 64)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'constraint': _Wrong()}, r'constraint\.next_state must return'),
    ({'constraint': _ALIEN}, r'constraint\.allowed must return'),
    ({'constraint': Turns}, r'must be a specdec\.Constraint'),
    ({'adjusters': [Moods]}, 'adjusters must be a sequence of'),
  ],
)
def test_what_changes_no_logits_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    _together('table', 'plain', 'filters', **options)


# All sequences: whatever the noise, the tokens are the best ones after it was
# added, draws from the target's distribution.

_LENGTH = 4
_FEW = 3
_DEEPEST = 6


def _decode_with_noise(target, drafter, sampling, noise):
  """Decodes rows with the given noise `[B, T, V]` in place of drawn noise."""

  def given(keys, positions, is_drawn):
    del keys, is_drawn
    return randomness_lib.noise_table(noise).at(positions)

  keys = jax.random.split(jax.random.key(0), noise.shape[0])
  sampling = jax.tree.map(
    lambda array: jnp.repeat(array, len(noise), axis=0), sampling
  )
  request = enumeration.request(keys, sampling, _LENGTH)
  config = specdec.DecodeConfig(max_new_tokens=_LENGTH)
  with mock.patch.object(randomness_lib, 'position_noise', given):
    result = specdec.decode.__wrapped__(target, drafter, request, config=config)
  return result.tokens[:, 1:], result.counters.target_forwards


def _noises(logits_of, values):
  """`[n, T, V]` noises by position, `[n, L]` what they lead to.

  Every possible sequence is among these; `logits_of` texts `[n, L]` are the
  target's after them, `[n, V]`.
  """
  rng = np.random.default_rng(0)
  tokens = range(_FEW)
  sequences = [*itertools.product(tokens, repeat=_LENGTH)]
  total = 1 + _LENGTH + _DEEPEST
  noises = rng.gumbel(size=(3, len(sequences), total, _FEW))
  for index, sequence in enumerate(sequences):
    for place, token in enumerate(sequence, start=1):
      noises[0, index, place, token] += 20.0  # more than any token is unlikely
  noises = noises.reshape(-1, total, _FEW).astype(np.float32)
  noises *= values.get('temperature', 1.0) > 0
  texts = np.full((len(noises), 1), enumeration.PROMPT)
  for place in range(1, _LENGTH + 1):
    seen = (texts[:, :, None] == np.array(tokens)).any(1)
    probs = enumeration.exact_probs(logits_of(texts), seen, values)
    with np.errstate(divide='ignore'):
      best = np.argmax(np.log(probs) + noises[:, place], axis=1)
    texts = np.concatenate([texts, best[:, None]], axis=1)
  return noises, texts[:, 1:]


def _of_tables(name, target, draft):
  """A target and a drafter that are tables, and the target's logits."""
  model = _table(target)
  if name == 'block':  # It reads the target's states, as heads do.
    edges = draft - draft.mean(0)
    scorer = tiny_drafters.block_table(np.tile(draft.mean(0), (2, 1)), edges)
    drafter = specdec.fixed_drafter(scorer, topology_lib.k_ary(2, 2))
    model = tiny_drafters.keeping_states(model)
  else:
    wrong = tiny_drafters.exact(np.roll(draft, 1, axis=0))
    drafter = tiny_drafters.simple('staged', _table(draft), wrong)
  return model, drafter, lambda texts: target[texts[:, -1]]


def _of_states(name, target, draft):
  """States of target and draft are hashes of the path, so any fold counts."""
  del name, target, draft
  target = tiny_recurrent.hashed(_FEW)
  draft = tiny_recurrent.hashed(_FEW, noise=9.0)
  logits = np.asarray(target.params['logits'])
  logits_of = lambda texts: logits[[*map(tiny_recurrent.hash_of, texts)]]
  return target, tiny_drafters.simple('staged', draft), logits_of


@pytest.mark.parametrize('name', ['staged', 'block', 'states'])
def test_match_says_what_plain_decoding_does(name):
  """All sequences that are possible, with noises that lead to them."""
  run = enumeration.quick_jit(_decode_with_noise)
  make, steps = _of_states if name == 'states' else _of_tables, []
  for number, (sampling, values) in enumerate(enumeration.SAMPLINGS.items()):
    rng = np.random.default_rng(number)
    table = 1.3 * rng.normal(size=(_FEW,) * 2)
    table = table.astype(np.float32)
    for kind in ('similar', 'adversarial'):
      draft = enumeration.draft_logits(kind, table, rng)
      target, drafter, logits_of = make(name, table, draft)
      noises, expected = _noises(logits_of, values)
      if sampling == 'temperature 1':
        assert len(np.unique(expected, axis=0)) == 3**_LENGTH
      sampling_params = enumeration.full_sampling(values, _FEW)
      emitted, num_steps = run(target, drafter, sampling_params, noises)
      np.testing.assert_array_equal(emitted, expected, err_msg=sampling)
      steps += np.asarray(num_steps).tolist()
  # More than one step, and fewer than in plain decoding.
  assert 1.2 < np.mean(steps) < 0.9 * _LENGTH
