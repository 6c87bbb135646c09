"""Plants known bugs in a copy of the source; the suite must notice each.

Most of them were seen in other systems. A check that stays green with its bug
planted would have no teeth. Bugs that cannot change the text, only waste
drafts, are noticed because a perfect draft no longer fills every block.
"""

import functools
import importlib
import inspect
import types

import numpy as np
import pytest
import tiny_models

from models.table import table_model
from specdec import decode
from specdec import DecodeConfig
from specdec import Sampling

G = 3
LIMIT = 64  # a multiple of a block
VOCAB_SIZE = 12
EOS = 5


def _source(name):
  # Not an attribute: `specdec.decode` is the function.
  return inspect.getsource(importlib.import_module(f'specdec.{name}'))


def _execute(name, source):
  module = types.ModuleType(f'specdec.{name}')
  exec(compile(source, f'<specdec.{name}, planted>', 'exec'), vars(module))
  return module


def _decode_with(name, old, new):
  """A fresh `decode`, with one place of `specdec.<name>` replaced."""
  source = _source(name)
  assert source.count(old) == 1, f'{name} has changed: plant this bug anew'
  mutant = _execute(name, source.replace(old, new))
  if name == 'decode':
    return mutant.decode
  decoder = _execute('decode', _source('decode'))
  planted = {
    key: value
    for key, value in vars(mutant).items()
    if inspect.isfunction(value)
    and key in vars(decoder)
    and value.__module__ == mutant.__name__
  }
  assert planted
  vars(decoder).update(planted)
  return decoder.decode


def _run(decode, target, draft, prompts, temperature, eos_ids=()):
  padded, lengths = tiny_models.pad(prompts)
  num_rows = len(prompts)
  config = DecodeConfig(
    num_draft_tokens=0 if draft is None else G,
    max_new_tokens=LIMIT,
    eos_ids=eos_ids,
  )
  result = decode(
    target,
    draft,
    tiny_models.row_keys(num_rows),
    padded,
    lengths,
    np.full(num_rows, LIMIT, np.int32),
    Sampling(temperature=np.full(num_rows, temperature)).validated(),
    config=config,
  )
  return (
    tiny_models.new_tokens(result, lengths),
    np.asarray(result.counters.emitted_histogram).sum(axis=0).tolist(),
  )


def _full(histogram, num_rows):
  return histogram == [0] * G + [num_rows * LIMIT // (G + 1)]


def _table(noise, ends):
  rng = np.random.default_rng(0)
  table = 2 * rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE))
  table[:, EOS] = -2 if ends else -100
  rng = np.random.default_rng(1)
  table += noise * rng.normal(size=table.shape)
  return table_model(table, max_positions=200)


def _failures_on_tables(decode):
  """Which checks fail: chain == plain, or full blocks of a perfect draft.

  Both arms are the given `decode`, as they are in the real suite.
  """
  run = functools.partial(_run, decode, eos_ids=(EOS,))
  prompts = [[1, 2], [3], [4]]
  failures = set()
  for temperature in (0.0, 1.0):
    for ends in (False, True):
      target, draft = _table(0, ends), _table(1, ends)
      plain, _ = run(target, None, prompts, temperature)
      chain, _ = run(target, draft, prompts, temperature)
      if chain != plain:
        failures.add('equal')
    target = _table(0, ends=False)
    if not _full(run(target, target, prompts, temperature)[1], 3):
      failures.add('full')
  return failures


_SHAPE = {'num_layers': 1, 'num_heads': 1}


@functools.cache
def _plain_gpt2(temperature):
  target = tiny_models.gpt2(**_SHAPE)
  return _run(decode, target, None, tiny_models.prompts(1), temperature)[0]


def _failures_on_gpt2(decode):
  """The same, with real caches; plain decoding is the unchanged one."""
  target = tiny_models.gpt2(**_SHAPE)
  run = functools.partial(_run, decode, target, prompts=tiny_models.prompts(1))
  failures = set()
  for temperature in (0.0, 1.0):
    draft = tiny_models.draft('similar', **_SHAPE)
    chain, _ = run(draft, temperature=temperature)
    if chain != _plain_gpt2(temperature):
      failures.add('equal')
    if not _full(run(target, temperature=temperature)[1], 1):
      failures.add('full')
  return failures


def test_without_a_bug_nothing_fails():
  """Nor does the way in which they are planted break anything."""
  harmless = _decode_with('drafting', 'root = length - 1', 'root = length - 1')
  assert _failures_on_tables(harmless) == set()
  assert _failures_on_gpt2(harmless) == set()


_ACCEPTED = '    accepted = count_accepted(block[:, 1:], chosen)\n'


@pytest.mark.parametrize(
  ('name', 'old', 'new', 'failure'),
  [
    pytest.param(
      'verification',
      'jnp.cumprod(agrees.astype(jnp.int32), axis=1)',
      'agrees.astype(jnp.int32)',
      'equal',
      id='accepts tokens behind a rejected one',
    ),
    pytest.param(
      'decode',
      _ACCEPTED,
      _ACCEPTED
      + '    chosen = chosen.at[jnp.arange(batch_size), accepted].set('
      'chosen[:, -1])\n',
      'equal',
      id='bonus token from the wrong depth',
    ),
    pytest.param(
      'decode',
      'position_noise(row_keys, positions,',
      'position_noise(row_keys, state.counters.steps + 0 * positions,',
      'equal',
      id='noise keyed by step, not by position',
    ),
    pytest.param(
      'decode',
      'position_noise(row_keys, positions,',
      'position_noise(row_keys, 0 * positions + offsets,',
      'equal',
      id='noise used again in every step',
    ),
    pytest.param(
      'decode',
      'noise[:, :-1],',
      'noise[:, 1:],',
      'full',
      id='draft guesses with the noise of the next position',
    ),
    pytest.param(
      'verification',
      'jnp.minimum(until_end, room)',
      'room',
      'equal',
      id='continues past an EOS accepted within a block',
    ),
    pytest.param(
      'verification',
      'jnp.minimum(until_end, room)',
      'until_end',
      'equal',
      id='overshoots the limit',
    ),
    pytest.param(
      'decode',
      'jnp.where(state.done, 0, end - length)',
      'end - length',
      'equal',
      id='goes on with a row that is done',
    ),
  ],
)
def test_a_bug_in_the_loop_is_noticed(name, old, new, failure):
  assert failure in _failures_on_tables(_decode_with(name, old, new))


@pytest.mark.parametrize(
  ('name', 'old', 'new', 'failure'),
  [
    pytest.param(
      'drafting',
      'jnp.minimum(num_emitted, num_drafted)',
      'num_emitted',
      'full',
      id='draft cache keeps one too many after full acceptance',
    ),
    pytest.param(
      'drafting',
      'logits[rows, root]',
      'logits[rows, 0]',
      'full',
      id='drafts from before the root after full acceptance',
    ),
    pytest.param(
      'drafting',
      '(first, length, written)',
      '(first, length - 1, written)',
      'full',
      id='draft overwrites the root in its cache',
    ),
    pytest.param(
      'decode',
      'target_cache.length + emitted',
      'target_cache.length + emitted + 1',
      'equal',
      id='target cache keeps one too many',
    ),
    pytest.param(
      'decode',
      'target_cache.length + emitted',
      'target_cache.length + num_drafted + 1',
      'equal',
      id='target cache keeps rejected tokens',
    ),
    pytest.param(
      'decode',
      'positions - 1,',
      '0 * positions + length[:, None] - 1,',
      'equal',
      id='all of a block at the position of its root',
    ),
    pytest.param(
      'decode',
      'causal_mask(length - 1, num_drafted + 1, num_slots)',
      'causal_mask(length - 1 + num_drafted, num_drafted + 1, num_slots)',
      'equal',
      id='root sees the drafted tokens',
    ),
  ],
)
def test_a_bug_in_the_caches_is_noticed(name, old, new, failure):
  assert failure in _failures_on_gpt2(_decode_with(name, old, new))
