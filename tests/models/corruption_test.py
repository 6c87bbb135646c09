"""Models and programs whose files are cut, emptied or filled with zeros.

A program is compiled again; a model is refused by the name of its path. The
tests of other files are next to the tests of the code that reads them.
"""

import json
import re
import shutil
import struct

import gguf
import gguf_files
import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny
import tiny_heads

from specdec.models.checkpoints import hub
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.nn import rope as rope_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import pair as pair_lib

_CACHE_FOLDER = 'jax_compilation_cache_dir'
_CACHE = {
  _CACHE_FOLDER: None,
  'jax_compilation_cache_max_size': 2**20,
  'jax_persistent_cache_min_compile_time_secs': 0,
}


def _damaged(content):
  """A file may be left in parts, or others may stand in its place."""
  return b'', content[: len(content) // 2], bytes(len(content)), b'3'


def test_a_damaged_program_is_compiled_again(tmp_path):
  """JAX says so, and goes on; its cache is what scripts use."""
  before = {name: getattr(jax.config, name) for name in _CACHE}
  compute = lambda: jax.jit(lambda x: 3 * x + 1)(np.arange(4)).tolist()
  try:
    for name, value in (_CACHE | {_CACHE_FOLDER: str(tmp_path)}).items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
    assert compute() == [1, 4, 7, 10]
    (file,) = tmp_path.glob('jit__lambda*-cache')
    whole = file.read_bytes()
    for content in _damaged(whole):
      file.write_bytes(content)
      with pytest.warns(UserWarning, match='persistent compilation cache'):
        assert compute() == [1, 4, 7, 10]
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


# Models: whatever is loaded, it is loaded or refused with the name of its path.


def _tokenizer():
  return tokenizer_lib.train_tokenizer(
    ['def add(first, second):'] * 9, vocab_size=270, context=64
  )


def _llama(**changes):
  return tiny.llama_module('llama', num_layers=1, vocab_size=288, **changes)


def _folder(path):
  """Two files of weights with their index, and all else that may be read."""
  hub.save_pretrained(_llama(), path, tokenizer=_tokenizer())
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


def _rounded_folder(path):
  wide = _llama(width=32, inner_width=32)
  hub.save_pretrained(wide, path / 'floats', tokenizer=_tokenizer())
  hub.save_in_four_bits(str(path / 'floats'), path)
  shutil.rmtree(path / 'floats')


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


def _head_folder(path):
  values = tiny_heads.tensors('eagle3', reduced=True)
  tiny_heads.write(path, 'sglang', values, reduced=True)


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
    (_rounded_folder, _load_model),
    (_gguf_file, _load_model),
    (_head_folder, tiny_heads.load),
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
