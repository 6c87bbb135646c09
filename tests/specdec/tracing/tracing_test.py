"""A trace tells what really happened: the tree, the path, all counts."""

import collections
import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import tracing
from specdec.models.nn import table_model
from specdec.tree import topology as topology_lib

_VOCAB_SIZE = 24
_PROMPTS = [[1, 2, 4], [3], [5, 6, 7, 5]]
_LIMITS = (30, 0, 17)
_PATHS = [(0,), (1,), (2,), (2, 0), (0, 0), (0, 2)]
_TABLE = tiny.table(_VOCAB_SIZE)
_TABLES = (_TABLE, _TABLE + 0.5 * tiny.table(_VOCAB_SIZE, 1))


def _few(logits):
  """One guess or none for each token: a fixed topology then has gaps."""
  table = tiny_drafters.exact(logits, 'few')
  best = np.argsort(-logits, axis=1)[:, :3]
  log_probs = np.full(best.shape, specdec.EXCLUDED, np.float32)
  log_probs[::2, 0] = -0.1
  log_probs[::2, 2] = -0.7
  return dataclasses.replace(table, tokens=best, log_probs=log_probs)


@functools.cache
def _arguments(shape):
  """The arguments of a decode; if the tree has gaps, with a fallback."""
  guesses = tiny_drafters.exact(tiny.table(_VOCAB_SIZE, 2) + _TABLE)
  target, draft = (
    table_model.table_model(table, max_positions=96) for table in _TABLES
  )
  drafter = tiny_drafters.simple('staged', draft, guesses)
  if shape == 'gaps':
    gaps = tiny_drafters.Settings(topology=topology_lib.Topology(_PATHS))
    drafter = tiny_drafters.candidates(_few(_TABLE), config=gaps)
  return {
    'target': target,
    'rng_key': jax.random.key(3),
    'prompts': _PROMPTS,
    'drafter': drafter,
    'max_new_tokens': _LIMITS,
    'sampling': specdec.Sampling(temperature=[0.0, 0.0, 0.8]),
    'log_probs': True,
    'eos_ids': [int(_TABLE.argmax(1)[0])],
    'break_even': 1.5 if shape == 'gaps' else None,
  }


@functools.cache
def _both(shape):
  """Traces and `generate`."""
  traces = tracing.record(specdec.Decoding(**_arguments(shape)))
  return traces, specdec.generate(**_arguments(shape))


@pytest.mark.parametrize('shape', ['gaps', 'staged'])
def test_it_tells_what_generate_says(shape):
  traces, result = _both(shape)
  sums = collections.Counter()
  for row, trace in enumerate(traces):
    for name in ('tokens', 'origins', 'log_probs'):
      assert list(getattr(trace, name)) == getattr(result, name)[row]
    assert trace.labels == result.labels
    assert trace.finish_reason == result.finish_reasons[row]
    assert list(trace.prompt_tokens) == _PROMPTS[row]
    sums.update(trace.stage_forwards)
    sums.update(dict(enumerate(trace.accepted_histogram)))
  assert not traces[1].blocks  # its limit is 0
  stats = result.stats
  assert sums['target'] == stats.target_forwards
  for name, forwards in stats.stage_forwards.items():
    assert sums[name] == forwards > 0
  for accepted, count in enumerate(stats.accepted_histogram):
    assert sums[accepted] == count
  sizes = [len(block.tokens) for trace in traces for block in trace.blocks]
  if shape == 'staged':
    verified = stats.nodes_per_forward * stats.target_forwards
    assert sum(sizes) == pytest.approx(verified)
  else:  # Gaps are fed, but nobody guessed them; plain steps are told.
    assert min(sizes) == 1 < max(sizes)
  first = traces[0]
  assert next(iter(first.blocks[0].forwards)) == 'target'
  assert first.block_efficiency == len(first.tokens) / len(first.blocks)


@pytest.mark.parametrize('shape', ['gaps', 'staged'])
def test_the_path_is_the_walk_of_the_target(shape):
  """Greedy: from node to node as long as a child is what the table says."""
  trace = _both(shape)[0][0]
  says = _TABLE.argmax(1)
  text = list(_PROMPTS[0])
  for block in trace.blocks:
    assert (block.start, block.tokens[0]) == (len(text), text[-1])
    edges = list(zip(block.parents, block.tokens, strict=True))
    path = [0]
    while (edge := (path[-1], says[block.tokens[path[-1]]])) in edges:
      path.append(edges.index(edge))
    assert list(block.path) == path
    assert block.bonus in (None, edge[1])
    text += block.emitted
  assert sum(len(block.path) - 1 for block in trace.blocks) > 5


_BLOCK = tracing.Block(
  start=2,
  tokens=(7, 8, 9, 8, 5),
  parents=(-1, 0, 0, 1, 3),
  origins=(0, 1, 2, 1, 1),
  probs=(1.0, 0.5, 0.25, 0.5, 0.1),
  path=(0, 1, 3),
  emitted=(8, 8, 4),
  forwards={'target': 1, 'draft': 2},
)
_block = functools.partial(dataclasses.replace, _BLOCK)
_TRACE = specdec.Trace(
  prompt='ab',
  prompt_tokens=(1, 7),
  labels=('target', 'draft', 'ngram'),
  blocks=(_BLOCK, _block(start=5, emitted=(8,))),
  pieces=tuple('xxxx'),
  texts={token: str(token) for token in (4, 5, 7, 8, 9)},
  finish_reason='length',
)


def _read(**changes):
  """A trace from the JSON of one with these changes."""
  record = json.loads(_TRACE.to_json()) | changes
  return specdec.Trace.from_json(json.dumps(record, default=dataclasses.asdict))


def test_what_follows_from_a_block_by_hand():
  assert _BLOCK.depths == (0, 1, 1, 2, 3)
  assert _BLOCK.path_probs == (1.0, 0.5, 0.25, 0.25, 0.025)
  assert _BLOCK.emitted_origins == (1, 1, 0)
  assert _BLOCK.bonus == 4
  cut = _block(emitted=(8,))
  assert cut.emitted_origins == (1,)
  assert cut.bonus is None
  assert _TRACE.tokens == (8, 8, 4, 8)
  assert _TRACE.origins == (1, 1, 0, 1)
  assert _TRACE.accepted_histogram == [1, 0, 1]
  assert _TRACE.stage_forwards == {'target': 2, 'draft': 4}
  assert _TRACE.block_efficiency == 2.0


def test_what_is_no_trace_is_refused():
  decoding = specdec.Decoding(**_arguments('gaps'))
  decoding.step_recorded()
  with pytest.raises(ValueError, match='but some have been decoded'):
    tracing.record(decoding)
  read = lambda changes: functools.partial(_read, **changes)
  for call, message in (
    (read({'format': 'else'}), "'specdec trace 1'"),
    (read({'prompt': 5}), 'prompt must be text, got 5'),
    (read({'texts': {'1': 5}}), 'texts must be an object of texts'),
    (
      read({'blocks': [_BLOCK, _block(probs='x')]}),
      'block 1, probs must be a list of numbers',
    ),
    (read({'blocks': [{}]}), 'missing'),
    (read({'more': 3}), 'more'),
    (lambda: specdec.Trace.from_json('{'), 'Expecting'),
    (lambda: specdec.Trace.from_json('null'), 'not a JSON object'),
  ):
    with pytest.raises(ValueError, match='not a trace of a decode.*' + message):
      call()


def test_json_there_and_back():
  for trace in (_TRACE, _both('staged')[0][0]):
    assert specdec.Trace.from_json(trace.to_json()) == trace
    assert '\n' not in trace.to_json()
