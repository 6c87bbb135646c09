"""Tokenizers of folders: the ids are the same as by tokenizer.json itself."""

import itertools
import json

import pytest
import refusals
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers
import transformers

from specdec.models.checkpoints import folder_tokenizer
from specdec.models.lab.training import tokenizer as tokenizer_lib

_TEXTS = [
  ' 12 + 3',
  'x = [\n    10,\n     2]\n',
  'Don\'t "STOP"  a\t b',
  'ÄÉ ﬁ naïve\n\n 日本',
  '<s>a<|end|> b </s>',
  'a <|end|>',
  '  ',
]
_byte_level = pre_tokenizers.ByteLevel
_bare = _byte_level(add_prefix_space=False, use_regex=False)
_WORDS = tokenizers.Regex(r"'(?i:[sdmt])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}")
_SPACES = normalizers.Replace(' ', '▁')
_LLAMA = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
# By name: normalizer, pre-tokenizer, decoder.
_LAYOUTS = {
  'digits': (
    None,
    pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _byte_level(False)]),
    decoders.ByteLevel(),
  ),
  'words': (
    normalizers.NFC(),
    pre_tokenizers.Sequence([pre_tokenizers.Split(_WORDS, 'isolated'), _bare]),
    decoders.ByteLevel(),
  ),
  'pieces': (
    normalizers.Sequence([normalizers.Prepend('▁'), _SPACES]),
    None,
    decoders.Sequence([*_LLAMA, decoders.Strip(' ', 1, 0)]),
  ),
}
_CLASSES = {'GPT2Tokenizer': 'gpt2', 'LlamaTokenizerFast': 'llama'}


def _write(folder, layout, **config):
  """A tokenizer that was trained with a layout, and its tokenizer_config."""
  backend = tokenizers.Tokenizer(models.BPE(unk_token='<unk>'))
  backend.normalizer, backend.pre_tokenizer, backend.decoder = _LAYOUTS[layout]
  trainer = trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=['<unk>', '<s>', '</s>', '<|end|>'],
    initial_alphabet=_byte_level.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(_TEXTS * 20, trainer)
  if layout in ('words', 'pieces'):
    backend.post_processor = processors.TemplateProcessing(
      single='<s> $A', pair=None, special_tokens=[('<s>', 1)]
    )
  backend.save(str(folder / 'tokenizer.json'))
  _write_json(folder, 'tokenizer_config.json', config)


def _write_json(folder, name, what):
  (folder / name).write_text(json.dumps(what))


def _token(content, **flags):
  """A token with its flags, as older releases of transformers write it."""
  names = ('lstrip', 'normalized', 'rstrip', 'single_word')
  return {'__type': 'AddedToken', 'content': content} | {
    name: flags.get(name, False) for name in names
  }


@pytest.mark.parametrize(
  ('layout', 'kind', 'legacy'),
  list(itertools.product(_LAYOUTS, _CLASSES, [False, True])),
)
def test_ids_are_those_of_the_file_itself(
  layout, kind, legacy, tmp_path, caplog
):
  config = {'tokenizer_class': kind, 'bos_token': '<s>', 'eos_token': '<|end|>'}
  stripping = _token('<|end|>', lstrip=True, rstrip=True)
  if legacy:
    config |= {'eos_token': stripping, 'legacy': True, 'from_slow': True}
    config |= {'add_bos_token': True, 'add_eos_token': True}
    config |= {'add_prefix_space': True, 'split_special_tokens': True}
    config['added_tokens_decoder'] = {'3': stripping, '9': _token('a')}
    config['additional_special_tokens'] = ['b', '<new>']
  _write(tmp_path, layout, **config)
  _write_json(tmp_path, 'config.json', {'model_type': _CLASSES[kind]})
  file = tmp_path / 'tokenizer.json'
  if legacy:  # Merges were texts.
    state = json.loads(file.read_text())
    merges = state['model']['merges']
    state['model']['merges'] = [' '.join(pair) for pair in merges]
    file.write_text(json.dumps(state))
  expected = tokenizers.Tokenizer.from_file(str(file))
  tokenizer = folder_tokenizer.load_tokenizer(tmp_path)
  assert tokenizer.get_vocab() == expected.get_vocab()
  assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 3)
  begins = layout in ('words', 'pieces')
  assert ('says add_bos_token' in caplog.text) == (legacy and not begins)
  for text in _TEXTS:
    assert tokenizer(text)['input_ids'] == expected.encode(text).ids, text


def test_what_the_other_files_state(tmp_path, caplog):
  named = [{'name': 'default', 'template': 'old'}]
  config = {'chat_template': named, 'model_max_length': 'much'}
  _write(tmp_path, 'digits', pad_token='<new>', **config)
  # Without tokenizer_config.json the config has roles, as GPT-2's config does.
  _write_json(
    tmp_path, 'config.json', {'eos_token_id': 2, 'bos_token_id': None}
  )
  _write_json(tmp_path, 'special_tokens_map.json', {'unk_token': '<unk>'})
  tokenizer = folder_tokenizer.load_tokenizer(tmp_path)
  roles = (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token)
  assert roles == ('</s>', '<unk>', None)
  # A token that is not in the file would not be in the model.
  assert tokenizer.pad_token is None
  assert "pad_token '<new>' is left out" in caplog.text
  assert 'says add_bos_token' not in caplog.text
  assert tokenizer.get_chat_template() == 'old'
  (tmp_path / 'chat_template.jinja').write_text('new')
  assert folder_tokenizer.load_tokenizer(tmp_path).chat_template == 'new'
  others = tmp_path / 'additional_chat_templates'
  others.mkdir()
  (others / 'tool_use.jinja').write_text('tools')
  templates = {'default': 'new', 'tool_use': 'tools'}
  assert folder_tokenizer.load_tokenizer(tmp_path).chat_template == templates
  # Saved files are loaded again, here and by transformers.
  tokenizer.save_pretrained(tmp_path / 'saved')
  for load in (
    folder_tokenizer.load_tokenizer,
    transformers.AutoTokenizer.from_pretrained,
  ):
    again = load(tmp_path / 'saved')
    assert again(_TEXTS[1]) == tokenizer(_TEXTS[1])
    assert again.eos_token == '</s>'


@pytest.fixture
def folder(tmp_path):
  """An old folder of GPT-2, without tokenizer.json."""
  tokenizer = tokenizer_lib.train_tokenizer(_TEXTS, vocab_size=300, context=8)
  tokenizer.save_pretrained(tmp_path)
  state = json.loads((tmp_path / 'tokenizer.json').read_text())['model']
  merges = [' '.join(pair) for pair in state['merges']]
  _write_json(tmp_path, 'vocab.json', state['vocab'])
  (tmp_path / 'merges.txt').write_text('\n'.join(['#version: 0.2', *merges]))
  _write_json(tmp_path, 'config.json', {'model_type': 'gpt2'})
  config = {'tokenizer_class': 'GPT2Tokenizer'}
  _write_json(tmp_path, 'tokenizer_config.json', config)
  return tmp_path


def test_old_folders_that_are_complete(folder):
  expected = folder_tokenizer.load_tokenizer(folder)
  (folder / 'tokenizer.json').unlink()
  tokenizer = folder_tokenizer.load_tokenizer(folder)
  assert tokenizer.convert_tokens_to_ids(['a']) == [expected.get_vocab()['a']]
  for text in _TEXTS:
    assert tokenizer(text)['input_ids'] == expected(text)['input_ids']


def test_a_class_whose_package_is_missing_is_not_needed(folder):
  expected = folder_tokenizer.load_tokenizer(folder)(_TEXTS[0])
  config = {'tokenizer_class': 'MistralCommonBackend'}
  _write_json(folder, 'tokenizer_config.json', config)
  assert folder_tokenizer.load_tokenizer(folder)(_TEXTS[0]) == expected


# A row has what files hold instead, None if they are gone, and what is said.
@pytest.mark.parametrize(
  ('files', 'message'), refusals.of('models/checkpoints', 'folder tokenizer')
)
def test_files_that_are_incomplete_or_cannot_be_read(files, message, folder):
  for name, text in files.items():
    (folder / name).unlink(missing_ok=True)
    if text is not None:
      (folder / name).write_text(text)
  with pytest.raises(ValueError, match=f'{folder}.*{message}'):
    folder_tokenizer.load_tokenizer(folder)


def test_parts_that_a_newer_release_has(folder):
  file = folder / 'tokenizer.json'
  state = json.loads(file.read_text())
  for change in ('pre_tokenizer', 'normalizer', 'decoder', 'model'):
    file.write_text(json.dumps(state | {change: {'type': 'OfTheNextRelease'}}))
    with pytest.raises(ValueError, match=f'{file}.*a newer tokenizers'):
      folder_tokenizer.load_tokenizer(folder)
  state['model'] |= {'vocab': {}, 'merges': []}
  file.write_text(json.dumps(state | {'added_tokens': []}))
  with pytest.raises(ValueError, match='has no tokens'):
    folder_tokenizer.load_tokenizer(folder)
