"""Models whose files are cut, emptied or filled with zeros.

They are refused by the name of their path. The tests of other files are next to
the tests of the code that reads them.
"""

import json
import re
import struct

import gguf
import gguf_files
import pytest
from safetensors import numpy as safetensors_numpy
import tiny
import tiny_heads

from specdec.models.checkpoints import hub
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.nn import rope as rope_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import pair as pair_lib


def _damaged(content):
  """A file may be left in parts, or others may stand in its place."""
  return b'', content[: len(content) // 2], bytes(len(content)), b'3'


def _tokenizer():
  return tokenizer_lib.train_tokenizer(
    ['def add(first, second):'] * 9, vocab_size=270, context=64
  )


def _folder(path):
  """Two files of weights with their index, and all else that may be read."""
  module = tiny.llama_module('llama', num_layers=1, vocab_size=288)
  hub.save_pretrained(module, path, tokenizer=_tokenizer())
  weights = path / 'model.safetensors'
  tensors = safetensors_numpy.load_file(weights)
  parts = {name: f'part_{place % 2}' for place, name in enumerate(tensors)}
  for part in {*parts.values()}:
    shard = {
      name: tensor for name, tensor in tensors.items() if parts[name] == part
    }
    safetensors_numpy.save_file(shard, path / f'{part}.safetensors')
  weights.unlink()
  shards = {name: f'{part}.safetensors' for name, part in parts.items()}
  for name, content in {
    'model.safetensors.index.json': {'weight_map': shards},
    'generation_config.json': {'eos_token_id': [0, 5]},
    'special_tokens_map.json': {'bos_token': {'content': '<|endoftext|>'}},
  }.items():
    (path / name).write_text(json.dumps(content))
  (path / 'chat_template.jinja').write_text("{{ messages[0]['content'] }}")


def _gguf_file(path):
  path.mkdir()
  tokenizer = _tokenizer()
  shape = {'vocab_size': len(tokenizer) + 3, 'width': 32, 'inner_width': 32}
  module = tiny.llama_module(
    'llama', num_layers=1, rope=rope_lib.Rope(), qk_norm=False, **shape
  )
  kind = gguf.GGMLQuantizationType.Q8_0
  file = path / 'model.gguf'
  gguf_files.write(file, module, 'llama', kind, tokenizer=tokenizer)


def _head_file(path):
  path.mkdir()
  values = tiny_heads.tensors('eagle3', reduced=True)
  tiny_heads.write_gguf(path / 'head.gguf', values)


def _load_model(path):
  choice = choice_lib.ModelChoice(str(path), None, cpu_kernels=False)
  pair = pair_lib.load_pair(choice)
  pair.decode(pair.encode('def a'))


@pytest.mark.parametrize(
  ('write', 'load'),
  [
    (_folder, _load_model),
    (_gguf_file, _load_model),
    (_head_file, tiny_heads.load),
  ],
)
def test_a_damaged_model_is_refused_by_name(write, load, tmp_path):
  folder = tmp_path / 'model'
  write(folder)
  files = sorted(folder.iterdir())
  path = files[0] if files[0].suffix == '.gguf' else folder
  load(path)
  for file in files:
    whole = file.read_bytes()
    for content in _damaged(whole) if file.suffix != '.jinja' else ():
      file.write_bytes(content)
      with pytest.raises(ValueError, match=re.escape(str(path))):
        load(path)
    file.write_bytes(whole)


def test_a_tensor_that_is_larger_than_its_file_is_refused_at_once(tmp_path):
  """Its size may be damaged, so no memory is asked for it."""
  _head_file(tmp_path / 'head')
  (file,) = (tmp_path / 'head').iterdir()
  size = lambda number: b'd2t' + struct.pack('<IQ', 1, number)
  content = file.read_bytes().replace(size(len(tiny_heads.IDS)), size(2**32))
  file.write_bytes(content)
  with pytest.raises(ValueError, match=r'd2t of shape \[4294967296\] does not'):
    tiny_heads.load(file)
