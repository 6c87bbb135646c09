"""Training of a drafting head: features, resuming, and what is written."""

import dataclasses

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny

import models
from models.checkpoints import hub
from models.lab.training import corpus as corpus_lib
from models.lab.training import head_trainer
from models.lab.training import tokenizer as tokenizer_lib
from models.nn import rope as rope_lib
import specdec

_CODE = 'def add_{0}(first, second):\n  return first + second * {0}\n'
_SETTINGS = head_trainer.HeadTraining(
  dtype='float32',
  vocabulary=40,
  depth=2,
  length=16,
  feature_bytes=40_000,
  num_steps=4,
  batch_tokens=32,
  warmup_steps=1,
  eval_every=2,
  eval_windows=3,
  train_dtype='float32',
)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp('corpus')
  for number in range(30):
    text = ''.join(_CODE.format(number + one) for one in range(9))
    (folder / f'{number}.py').write_text(text)
  return corpus_lib.Corpus(folder=str(folder), held_out_percent=30)


@pytest.fixture(scope='module')
def settings(corpus, tmp_path_factory):
  texts = [*corpus.texts(held_out=False)]
  tokenizer = tokenizer_lib.train_tokenizer(texts, vocab_size=300, context=64)
  module = tiny.module(
    vocab_size=len(tokenizer), num_positions=64, num_layers=3
  )
  folder = tmp_path_factory.mktemp('target')
  hub.save_pretrained(module, folder, tokenizer=tokenizer)
  return dataclasses.replace(_SETTINGS, target=str(folder))


def _train(settings, corpus, folder, report=lambda line: None):
  head_trainer.train(
    settings,
    corpus,
    workdir=folder / 'work',
    output=folder / 'head',
    output_dtype='float32',
    report=report,
  )


def test_a_killed_run_resumes_and_the_head_drafts(settings, corpus, tmp_path):
  lines = []

  def interrupt(line):
    lines.append(line)
    if getattr(line, 'step', 0) == 2:
      raise KeyboardInterrupt

  killed, whole = tmp_path / 'killed', tmp_path / 'whole'
  with pytest.raises(KeyboardInterrupt):
    _train(settings, corpus, killed, interrupt)
  files = sorted((killed / 'work' / 'features').rglob('*.npy'))
  size = sum(file.stat().st_size for file in files)
  stated = float(lines[0].partition(' GB')[0].split()[-1])
  assert 0 < size <= settings.feature_bytes + 128 * len(files)
  assert stated == pytest.approx(size / 1e9, abs=0.006)
  assert [len(lines[-1].accepted), min(lines[-1].accepted) >= 0] == [2, True]
  times = [file.stat().st_mtime_ns for file in files]
  files[0].unlink()  # As if it had been killed before.
  _train(settings, corpus, killed)
  after = [file.stat().st_mtime_ns for file in files]
  assert [a == b for a, b in zip(times, after, strict=True)].count(False) == 2
  _train(settings, corpus, whole)
  tensors = [
    safetensors_numpy.load_file(folder / 'head' / 'model.safetensors')
    for folder in (killed, whole)
  ]
  for name, array in tensors[0].items():
    np.testing.assert_array_equal(array, tensors[1][name])
  lm = models.load(
    settings.target, head=str(whole / 'head'), method='chain', dtype='float32'
  )
  assert lm.pair.head.spec.reads == (1, 2, 3)
  result = lm.generate('def add_3(', max_new_tokens=20)
  plain = dataclasses.replace(lm, drafter=specdec.PLAIN).generate(
    'def add_3(', max_new_tokens=20
  )
  assert result.text == plain.text
  assert result.stats.stage_forwards['head'] > 0


def test_what_cannot_be_trained_is_refused(settings, corpus, tmp_path):
  for change, message in (
    ({'num_heads': 5}, '--heads=5 must divide the width 16'),
    ({'feature_bytes': 100}, 'room for 0 windows'),
  ):
    changed = dataclasses.replace(settings, **change)
    with pytest.raises(ValueError, match=message):
      _train(changed, corpus, tmp_path / next(iter(change)))
  with pytest.raises(ValueError, match='less than a window, --context=16'):
    dataclasses.replace(settings, batch_tokens=8)


def test_a_head_has_one_rotation_whatever_the_layers_of_the_target_have():
  config = tiny.llama_module('llama').config
  base = dataclasses.replace(config, num_layers=2)
  local, whole = rope_lib.Rope(theta=50.0), rope_lib.Rope(theta=1e6)
  for ropes, expected in (
    *((local, local), ((local, whole), whole), ((local, None), local)),
    (None, rope_lib.Rope()),
  ):
    target = dataclasses.replace(base, rope=ropes)
    assert head_trainer.head_config(_SETTINGS, target).rope == expected
