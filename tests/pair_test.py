"""What is read beside the weights: tokenizer and end-of-text tokens."""

import json
import shutil

import pytest
import tiny

from models.checkpoints import hub
from models.text.pair import load_pair
from models.training.tokenizer import train_tokenizer

_TEXT = 'def add(first, second):\n  return first + second\n' * 20


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp('saved')
  tokenizer = train_tokenizer([_TEXT], vocab_size=280, context=8)
  module = tiny.module(vocab_size=len(tokenizer), width=8, num_layers=1)
  hub.save_pretrained(module, folder, tokenizer=tokenizer)
  return folder


@pytest.fixture
def folder(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / 'model')


@pytest.mark.parametrize(
  ('stated', 'expected'),
  [
    ({'config': 5}, (5,)),
    ({'config': [5, 7]}, (5, 7)),
    ({'config': [5, 50256]}, (5,)),
    ({'config': 50256}, (0,)),
    ({'config': None}, (0,)),
    ({'config': 5, 'generation_config': [9]}, (9,)),
  ],
)
def test_eos_is_what_the_configs_state_if_usable(folder, stated, expected):
  for name, eos in stated.items():
    path = folder / f'{name}.json'
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | {'eos_token_id': eos}))
  assert load_pair(str(folder), None).eos_ids == expected


def test_target_without_tokenizer_is_refused(folder):
  for file in folder.glob('tokenizer*'):
    file.unlink()
  with pytest.raises(ValueError, match='has no tokenizer'):
    load_pair(str(folder), None)


def test_loading_again_shares_the_definition(saved):
  first, second = (load_pair(str(saved), None) for _ in range(2))
  assert first.target.spec is second.target.spec


def test_demo_as_draft_is_the_embedded_draft():
  pair = load_pair('demo', 'demo')
  assert pair.draft.spec.weight_bytes < pair.target.spec.weight_bytes
