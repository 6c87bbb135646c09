"""Why a row ends: its limit, an EOS, a stop string, or a cancellation."""

import itertools
from unittest import mock

import jax
import numpy as np
import tiny
import tiny_drafters

import specdec
from specdec.models.nn import table_model
from specdec.text import stop_strings

VOCAB_SIZE = 64
EOS_IDS = (60, 40, 7)
G = 3
OFFSETS = range(2 * (G + 1) + 1)
# The longest prompt and the largest limit, so that some rows fill the context.
MAX_POSITIONS = 2 + OFFSETS[-1] + 2


def _model(step=1):
  """Predicts i + step after i."""
  table = 10 * np.roll(np.eye(VOCAB_SIZE, dtype=np.float32), step, axis=1)
  return table_model.table_model(table, max_positions=MAX_POSITIONS)


def _rows():
  """Prompts, limits, and the last byte of the stop string of each row.

  The EOS is at each offset after the prompt, with all limits around it, and a
  stop string ends before, with, or after it.
  """
  prompts, limits, stops = [], [], []
  eos = EOS_IDS[1]
  for offset in OFFSETS:
    first = eos - 1 - offset
    around = {0, 1, G, G + 1, offset, offset + 1, offset + 2}
    ends = (None, eos - 1, eos, eos + 1, first + 1, first + 2)
    for limit, end in itertools.product(sorted(around), ends):
      # An EOS in the prompt ends nothing, nor does half of a stop string.
      prompts.append([EOS_IDS[0], first] if len(prompts) % 2 else [first])
      limits.append(limit)
      stops.append(None if end is None else bytes([end - 1, end]))
  return prompts, limits, stops


def _expected(prompt, limit, stop):
  new = []
  while len(new) < limit:
    new.append(prompt[-1] + len(new) + 1)
    if new[-1] in EOS_IDS:
      return new, 'eos'
    if stop is not None and stop in bytes(new):
      return new, 'stop'
  return new, 'length'


def test_every_end_at_every_offset_of_a_block():
  prompts, limits, stops = _rows()
  of_rows = [[] if stop is None else [stop] for stop in stops]
  token_bytes = [bytes([token]) for token in range(VOCAB_SIZE)]
  table = stop_strings.build_stop_table(of_rows, token_bytes, VOCAB_SIZE)
  expected = list(map(_expected, prompts, limits, stops))
  reasons = [reason for _, reason in expected]
  assert set(reasons) == {'length', 'eos', 'stop'}
  assert max(np.add([*map(len, prompts)], limits)) == MAX_POSITIONS
  for step, temperature in ((1, 0.0), (2, 0.0), (1, 1.0)):
    generation = specdec.generate(
      _model(),
      jax.random.key(0),
      prompts,
      max_new_tokens=limits,
      drafter=tiny_drafters.simple('chain', _model(step), length=G),
      sampling=specdec.Sampling(temperature=temperature, top_k=1),
      eos_ids=EOS_IDS,
      stop=table,
    )
    assert generation.tokens == [new for new, _ in expected]
    assert generation.finish_reasons == reasons
    sizes = [len(new) for new, _ in expected]
    blocks = [-(-size // (G + 1)) for size in sizes]
    forwards = sum(blocks) if step == 1 else sum(sizes)
    assert generation.stats.target_forwards == forwards


# A table whose texts do not end, for decodes that are stopped.


def _run(make=specdec.generate, **kw):
  """Rows of many tokens; the last is done at once."""
  target = table_model.table_model(tiny.table(VOCAB_SIZE, 3), max_positions=200)
  return make(
    target,
    jax.random.key(1),
    [[1], [2, 3], [4], [5]],
    max_new_tokens=[120, 30, 120, 0],
    drafter=tiny_drafters.simple('chain', target, length=G),
    sampling=specdec.Sampling(temperature=1.0),
    **kw,
  )


def test_a_cancelled_row_has_the_beginning_of_its_text():
  whole = _run()
  counts = []
  for number in range(4):
    after = mock.Mock(side_effect=[False] * number + [True])
    cut = _run(should_stop=after)
    assert after.call_count == number + 1
    counts.append(len(cut.tokens[0]))
    for row, tokens in enumerate(cut.tokens):
      assert tokens == whole.tokens[row][: len(tokens)]
      done = len(tokens) == len(whole.tokens[row])
      assert cut.finish_reasons[row] == ('length' if done else 'cancelled')
      assert cut.origins[row] == whole.origins[row][: len(tokens)]
    if not number:
      assert cut.stats.block_efficiency == 0.0
      assert cut.stats.relative_bandwidth == 1.0
  # It is called again soon, and each time there are more tokens.
  assert counts[0] == 0 < counts[1] <= 8 * (G + 1)
  assert np.all(np.diff(counts) > 0)
  assert {'cancelled', 'length'} == set(cut.finish_reasons)
  # Nobody is asked once all are done.
  never = mock.Mock(return_value=False)
  assert _run(should_stop=never).tokens == whole.tokens
  assert never.call_count == np.ceil(120 / (G + 1) / 8)
