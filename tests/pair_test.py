"""What is read beside the weights: tokenizer and end-of-text tokens."""

import json

from flax import nnx
import pytest

from models.checkpoints import hub
from models.nn.gpt2 import GPT2
from models.nn.gpt2 import GPT2Config
from models.text.pair import load_pair
from models.training.tokenizer import train_tokenizer

_TEXT = 'def add(first, second):\n  return first + second\n' * 20


@pytest.fixture
def folder(tmp_path):
  tokenizer = train_tokenizer([_TEXT], vocab_size=280, context=64)
  config = GPT2Config(
    vocab_size=len(tokenizer),
    num_positions=64,
    width=8,
    num_layers=1,
    num_heads=2,
  )
  hub.save_pretrained(
    GPT2(config, rngs=nnx.Rngs(0)), tmp_path, tokenizer=tokenizer
  )
  return tmp_path


def _state_eos(folder, eos, *, file='config.json'):
  path = folder / file
  config = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(config | {'eos_token_id': eos}))


@pytest.mark.parametrize(
  ('stated', 'expected'),
  [
    (5, (5,)),
    ([5, 7], (5, 7)),
    ([5, 50256], (5,)),
    (50256, (0,)),
    (None, (0,)),
  ],
)
def test_eos_is_what_the_config_states_if_usable(folder, stated, expected):
  _state_eos(folder, stated)
  assert load_pair(str(folder), None).eos_ids == expected


def test_generation_config_goes_first(folder):
  _state_eos(folder, 5)
  _state_eos(folder, [9], file='generation_config.json')
  assert load_pair(str(folder), None).eos_ids == (9,)


def test_target_without_tokenizer_is_refused(folder):
  for file in folder.glob('tokenizer*'):
    file.unlink()
  with pytest.raises(ValueError, match='has no tokenizer'):
    load_pair(str(folder), None)


def test_loading_again_shares_the_definition(folder):
  first, second = (load_pair(str(folder), None) for _ in range(2))
  assert first.target.spec is second.target.spec


def test_demo_as_draft_is_the_embedded_draft():
  pair = load_pair('demo', 'demo')
  draft, target = pair.draft.spec, pair.target.spec
  assert draft.weight_bytes < target.weight_bytes
