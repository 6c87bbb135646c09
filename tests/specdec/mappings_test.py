"""Programs are released before the memory mappings run out."""

import logging

import jax
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import loop
from specdec import mappings
from specdec.models.nn import table_model

_MODEL = table_model.table_model(tiny.table(12), max_positions=500)
_DRAFTER = tiny_drafters.simple('chain', _MODEL, length=2)
_KEY = jax.random.key(0)


def _decoding(room):
  return specdec.Decoding(
    _MODEL,
    _KEY,
    [[1], [2, 3]],
    max_new_tokens=9,
    room_for_new_tokens=room,
    drafter=_DRAFTER,
    sampling=specdec.Sampling(temperature=1.0),
  )


def _tokens(room):
  decoding = _decoding(room)
  decoding.run()
  return decoding.result().tokens


_sizes = lambda: (loop.start._cache_size(), loop.advance._cache_size())


@pytest.mark.skipif(not mappings._TAKEN.exists(), reason='there is no limit')
def test_programs_are_released_and_decodes_go_on(monkeypatch, tmp_path, caplog):
  """One word for the first release; no token changes, of no decode."""
  expected = _tokens(64)
  going_on = _decoding(64)
  begun = next(iter(going_on))
  kept = jax.jit(lambda x: x + 1)
  kept(1)
  assert min(_sizes()) > 0
  allowed = tmp_path / 'max_map_count'
  monkeypatch.setattr(mappings, '_ALLOWED', allowed)
  limit = lambda factor: allowed.write_text(
    f'{round(factor * mappings._mappings()[0])}'
  )
  caplog.set_level(logging.WARNING)
  limit(1.4)  # The next program is one too many.
  assert _tokens(128) == expected
  assert max(_sizes()) <= 1  # Only what was compiled after the release.
  assert kept._cache_size() == 1  # Others' programs are theirs.
  assert going_on.step() != begun
  going_on.run()
  assert going_on.result().tokens == expected
  before = _sizes()
  allowed.unlink()  # As on systems that count no mappings.
  assert _tokens(192) == expected
  assert _sizes() == (before[0] + 1, before[1] + 1)
  [record] = caplog.records
  assert 'mappings that Linux allows' in record.message
  assert 'room_for_new_tokens' in record.message
  assert 'sysctl -w vm.max_map_count=' in record.message
