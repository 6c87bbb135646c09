"""Files next to the weights: tokenizer and end-of-text tokens."""

import codecs
import dataclasses
import json
import shutil

import pytest
import tiny

import specdec
from specdec.models.checkpoints import hub
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.nn.cpu import build
from specdec.models.text import choice as choice_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import sources as sources_lib

_TEXT = 'def add(first, second):\n  return first + second\n' * 20


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp('saved')
  tokenizer = tokenizer_lib.train_tokenizer([_TEXT], vocab_size=280, context=8)
  module = tiny.module(vocab_size=len(tokenizer), width=8, num_layers=1)
  hub.save_pretrained(module, folder, tokenizer=tokenizer)
  return folder


@pytest.mark.parametrize(
  ('eos', 'generation', 'expected'),
  [
    (5, None, (5,)),
    ([5, 7], None, (5, 7)),
    ([5, 50256], None, (5,)),
    (50256, None, (0,)),
    (None, None, (0,)),
    (5, [9], (9,)),
  ],
)
def test_eos_is_what_the_configs_state_if_usable(
  saved, tmp_path, eos, generation, expected
):
  folder = shutil.copytree(saved, tmp_path / 'model')
  config = json.loads((folder / 'config.json').read_text())
  write = lambda name, what: (folder / name).write_text(json.dumps(what))
  write('config.json', config | {'eos_token_id': eos})
  if generation:
    write('generation_config.json', {'eos_token_id': generation})
  choice = choice_lib.ModelChoice(str(folder), None)
  assert pair_lib.load_pair(choice).eos_ids == expected
  # The ids of the call count, whatever the files say.
  write('generation_config.json', {'eos_token_id': '</s>'})
  chosen = dataclasses.replace(choice, eos_ids=['first', 3])
  assert pair_lib.load_pair(chosen).eos_ids == (266, 3)
  for file in folder.glob('tokenizer*'):
    file.unlink()
  with pytest.raises(ValueError, match='has no tokenizer'):
    pair_lib.load_pair(choice)


def test_byte_order_marks_change_nothing(saved, tmp_path):
  folder = shutil.copytree(saved, tmp_path / 'model')
  (folder / 'model.safetensors').rename(folder / 'a.safetensors')
  index = json.dumps({'weight_map': {'x': 'a.safetensors'}})
  for name, text in (
    ('generation_config.json', '{"eos_token_id": 7}'),
    ('special_tokens_map.json', '{"unk_token": "def"}'),
    ('chat_template.jinja', '{{ messages }}'),
    ('model.safetensors.index.json', index),
  ):
    (folder / name).write_text(text)

  def read():
    source = hub.locate(folder)
    tokenizer = source.tokenizer
    roles = tokenizer.special_tokens_map, tokenizer.chat_template
    text = tokenizer(_TEXT)['input_ids']
    return source.config, source.eos_ids, source.files, text, roles

  expected = read()
  assert expected[1] == (7,)
  for file in [*folder.glob('*.json'), *folder.glob('*.jinja')]:
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
  assert read() == expected


def test_loading_again_shares_the_definition(saved):
  choice = choice_lib.ModelChoice(str(saved), None)
  first, second = (pair_lib.load_pair(choice) for _ in range(2))
  assert first.target.spec is second.target.spec


@pytest.mark.parametrize(
  ('options', 'dtypes', 'is_exact'),
  [
    ({'dtype': 'float32'}, ('float32', 'float32'), True),
    ({'dtype': 'bfloat16'}, ('bfloat16', 'bfloat16'), False),
    ({'dtype': 'int8', 'draft_dtype': 'int4'}, ('int8', 'int4'), False),
    ({'dtype': 'int8', 'draft': None}, ('int8', 'int8'), False),
  ],
)
def test_formats_and_tokens_are_known_before_weights_are_read(
  monkeypatch, options, dtypes, is_exact
):
  """Small drafts have eight bits at least where the kernels are used."""
  monkeypatch.setattr(hub, 'load_network', pytest.fail)
  for kernels in {False, build.is_available()}:
    choice = choice_lib.ModelChoice(**options, cpu_kernels=kernels)
    sources = sources_lib.open_sources(choice)
    small = {('bfloat16', 'bfloat16'): ('bfloat16', 'int8')}
    expected = small.get(dtypes, dtypes) if kernels else dtypes
    placements = sources.placement, sources.draft_placement
    assert tuple(placed.form.name for placed in placements) == expected
    assert all(placed.packed == kernels for placed in placements)
    assert sources.is_exact == (kernels or is_exact)
    assert sources.tokenizer is sources.target.tokenizer
    assert (sources.shared, sources.draft_outputs) == (None, None)


def test_demo_as_draft_is_the_embedded_draft(caplog):
  pair = pair_lib.load_pair(choice_lib.ModelChoice('demo', 'demo'))
  assert pair.draft.spec.weight_bytes < pair.target.spec.weight_bytes
  assert not caplog.text
  large = str(hub.locate('demo').path)
  pair_lib.load_pair(choice_lib.ModelChoice('demo-draft', large))
  assert 'swap them, or choose a smaller draft' in caplog.text
  # A method that drafts without a model loads none, of whatever tokenizer.
  assert specdec.load(method='lookup').pair.draft is None
