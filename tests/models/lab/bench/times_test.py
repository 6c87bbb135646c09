"""Times of forwards, of drafts and of memory, on a tiny model."""

import json

import block_folders
import pytest
import tiny

from specdec.models.lab.bench import times
from specdec.models.text import choice as choice_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib


def test_what_cannot_be_timed_is_refused():
  usual = {'context': 40, 'node_counts': [2], 'repeats': 1}
  for change, message in (
    ({'context': 1}, 'context must be at least 2 tokens'),
    ({'node_counts': [0]}, 'expected integers of at least 1'),
  ):
    with pytest.raises(ValueError, match=message):
      times.verification_seconds(tiny.gpt2(num_layers=1), **usual | change)


def test_bandwidth_is_the_median_of_samples(monkeypatch):
  monkeypatch.setattr(times, '_READ_BYTES', {'default': 1 << 20})
  bandwidth = times.Bandwidth()
  for _ in range(3):
    bandwidth.sample()
  figures = bandwidth.summary()
  samples = figures['bytes_per_second_samples']
  assert len(samples) == 3
  assert figures['bytes_per_second'] == sorted(samples)[1] > 0


def test_a_pair_with_random_weights_is_timed(tmp_path, monkeypatch):
  target = tmp_path / 'target'
  target.mkdir()
  (target / 'config.json').write_text(json.dumps(block_folders.TARGET))
  head = block_folders.write(tmp_path / 'head', 'deepspec')
  (head / 'model.safetensors').unlink()
  models = choice_lib.ModelChoice(
    str(target), None, head=str(head), dtype='float32', draft_vocab=10
  )
  drafting = settings_lib.with_options(
    settings_lib.DraftSettings(),
    {'num_draft_tokens': '3', 'num_nodes': '6', 'width': '4'},
  )
  planted = {1: 0.5e-3, 4: 1e-3, 6: 2e-3}
  monkeypatch.setattr(times, 'verification_seconds', lambda *_, **__: planted)
  chain, tree = times.draft(
    pair_lib.drawn_pair(models),
    drafting,
    context=20,
    repeats=2,
  )
  assert (chain['N'], tree['N']) == (4, 6)
  assert (tree['plain_ms'], tree['verify_ms']) == (0.5, 2.0)
  assert tree['draft_per_plain'] == pytest.approx(tree['draft_ms'] / 0.5)
