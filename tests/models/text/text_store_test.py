"""A folder of earlier texts: its files, and what fills it."""

import dataclasses
import tempfile

import command_lines
import numpy as np
import pytest
import tiny_demo

import specdec
from specdec.models.text import settings as settings_lib
from specdec.models.text import text_store


def _texts(store):
  return [text.tolist() for text in store.newest()]


def _indexed(index):
  """All texts of an index."""
  text = ' '.join(map(str, np.asarray(index.tokens)))
  return {part.strip() for part in text.split('-1')} - {''}


def test_stores_of_one_folder(tmp_path):
  """Each sees what the other adds; a text that comes again is kept once."""
  store, other = (
    text_store.TextStore(tmp_path / 'new' / 'store', 'digest', 2000)
    for _ in '12'
  )
  assert not _texts(store)
  store.add([[1, 2, 3], [4]])
  other.add([[5, 6], [1, 2, 3]])
  assert _texts(store) == _texts(other) == [[5, 6], [1, 2, 3]]


def test_the_index_follows():
  """It has what both stores add, once it is worth the sorting."""
  with tempfile.TemporaryDirectory() as folder:
    store, other = (text_store.TextStore(folder, 'digest', 2000) for _ in '12')
    other.add([[1, 2, 3] * 4])
    store.add([[7, 8]])
    assert _indexed(store.index()) == {'1 2 3 1 2 3 1 2 3 1 2 3', '7 8'}
    other.add([[5, 6] * 50])
    sizes = [store.index().num_places.item()]
    other.add([[5, 6]])
    sizes.append(store.index().num_places.item())
    other.add([[5, 9] * 10])
    sizes.append(store.index().num_places.item())
  assert sizes == [111, 111, 131]


def test_many_files_become_one_and_the_oldest_texts_go(tmp_path):
  store = text_store.TextStore(tmp_path, 'digest', 2000, most_tokens=100)
  for number in range(70):
    store.add([[number, number, number]])
  assert len(list(tmp_path.iterdir())) < 10
  expected = [[number] * 3 for number in range(37, 70)]
  assert _texts(store)[1:] == expected
  store.add([range(1000)])
  assert _texts(store) == [[*range(900, 1000)]]


def test_what_is_added_last_is_the_newest(tmp_path):
  """Even if another machine's clock was ahead, or a file came meanwhile."""
  store = text_store.TextStore(tmp_path, 'digest', 2000, most_tokens=6)
  store.add([[1, 1, 1]])
  (file,) = tmp_path.iterdir()
  file.rename(tmp_path / f'texts_{2**63:020d}_7.safetensors')
  store.add([[2, 2, 2]])
  store.add([[3, 3, 3]])
  assert _texts(store) == [[2, 2, 2], [3, 3, 3]]


def test_a_file_that_comes_during_a_join_is_newer(tmp_path, monkeypatch):
  store, other = (
    text_store.TextStore(tmp_path, 'digest', 2000, most_tokens=6) for _ in '12'
  )
  for token in (1, 2, 3):
    store.add([[token] * 6])
  newest, added = store.newest, []

  def meanwhile():
    texts = newest()
    added.append(other.add([[9, 9, 9]]))
    return texts

  monkeypatch.setattr(store, 'newest', meanwhile)
  store.add([[4] * 6])
  assert len(added) == 1
  assert _texts(other) == [[4, 4, 4], [9, 9, 9]]


def test_ids_outside_the_vocabulary(tmp_path):
  text_store.TextStore(tmp_path, 'digest', 2000).add([[1, 1999]])
  with pytest.raises(ValueError, match='the token 1999, and the target has 10'):
    text_store.TextStore(tmp_path, 'digest', 10)


def test_what_is_refused(tmp_path):
  text_store.TextStore(tmp_path, 'digest', 2000).add([[1, 2]])
  with pytest.raises(ValueError, match='another tokenizer; remove it, or give'):
    text_store.TextStore(tmp_path, 'another', 2000)
  (file,) = tmp_path.iterdir()
  with pytest.raises(ValueError, match='is a file; give a folder'):
    text_store.TextStore(file, 'digest', 2000)
  content = file.read_bytes()
  file.write_bytes(content[:-3])
  with pytest.raises(ValueError, match=f'{file.name} cannot be read'):
    text_store.TextStore(tmp_path, 'digest', 2000)
  file.write_bytes(content.replace(b'texts 1', b'texts 9'))
  with pytest.raises(ValueError, match='no texts of this version'):
    text_store.TextStore(tmp_path, 'digest', 2000)


_tiny_pair = tiny_demo.in_this_file


def _settings(folder):
  few = {'num_nodes': 4, 'capacity': 16, 'width': 2, 'inner_width': 2}
  settings = settings_lib.with_options(settings_lib.DraftSettings(), few)
  return dataclasses.replace(settings, store=str(folder), inner_rounds_alone=3)


def _load(folder):
  return specdec.load(method='lookup', drafting=_settings(folder))


def test_decoding_fills_it_and_drafts_from_it(tmp_path):
  options = {
    'max_new_tokens': 16,
    'sampling': specdec.Sampling(temperature=1.0),
  }
  plain = specdec.load(method='plain').generate('import ', **options)
  lm = _load(tmp_path)
  first = lm.generate('import ', **options)
  again = lm.generate('import ', **options)
  assert first.text == again.text == plain.text
  assert 2 * again.stats.target_forwards < first.stats.target_forwards
  assert again.stats.origins['store'] > 6
  # Another process reads it, once; a stream adds what it decoded only once.
  reads, read = [], text_store.TextStore._texts_of
  with pytest.MonkeyPatch.context() as patch:
    count = lambda store, path: reads.append(path) or read(store, path)
    patch.setattr(text_store.TextStore, '_texts_of', count)
    lm = _load(tmp_path)
  assert len(reads) == len({*reads}) > 0
  stream = lm.stream('def ', **options)
  assert len(_texts(lm.store)) == 1
  assert ''.join(new for (new,) in stream) == stream.result().text[0]
  stream.run()
  assert len(_texts(lm.store)) == 2


def test_many_prompts_profit_from_the_first(tmp_path):
  prompts = [specdec.Job(prompt='import ', seed=seed) for seed in (0, 0, 1)]
  options = {'batch_size': 1, 'max_new_tokens': 16, 'context': 64}
  options['sampling'] = specdec.Sampling(temperature=1.0)
  lm = _load(tmp_path)
  results = [
    completion.result for completion in lm.generate_many(prompts, **options)
  ]
  assert results[0].text == results[1].text
  forwards = [result.stats.target_forwards for result in results]
  assert 2 * forwards[1] < forwards[0]
  assert len(_texts(lm.store)) == 2


def test_files_of_ones_own(tmp_path):
  for name, text in (('a.py', 'import os\n'), ('b.py', 'x = 1\n'), ('c', '')):
    (tmp_path / name).write_text(text)
  files, folder = f'--files={tmp_path}/*.py', tmp_path / 'store'
  ended = command_lines.run('build_store.py', f'--store={folder}', files)
  assert ended.output.startswith(f'{folder} has '), ended
  lm = _load(folder)
  assert [lm.pair.decode(text) for text in _texts(lm.store)] == [
    'import os\n',
    'x = 1\n',
  ]
  refusal = command_lines.refusal(
    'build_store.py', f'--store={folder}', '--files=nothing*'
  )
  assert 'there is no such file' in refusal
