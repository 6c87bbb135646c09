"""Files with bytes cut, emptied and flipped, and JSON with other values.

What is ours to make again is made again. All else is an error in one sentence
with the name of the file, or what was written.
"""

import functools
import json
import logging
import random
import shutil
import struct

import gguf
import gguf_files
import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import plans
import pytest
from safetensors import numpy as safetensors_numpy
import tiny
import tiny_heads

from specdec.models.checkpoints import hub
from specdec.models.lab.training import kept
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.nn import rope as rope_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import draft_vocabulary
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.ngram import counting
from specdec.ngram import table as table_lib
from specdec.tree import topology as topology_lib

_CACHE_FOLDER = 'jax_compilation_cache_dir'
_CACHE = {
  _CACHE_FOLDER: None,
  'jax_compilation_cache_max_size': 2**20,
  'jax_persistent_cache_min_compile_time_secs': 0,
}
_VALUES = [None, True, 0, -1, 3, 10**12, 1.5, -2.5, 1e400, 'x', '', '\ud800']
_VALUES += [[], {}, [1], ['x'], {'a': 1}]


def _places(value):
  """The places of all values within a value of JSON."""
  yield ()
  pairs = value.items() if isinstance(value, dict) else ()
  if isinstance(value, list):
    pairs = enumerate(value[:3])
  for key, one in pairs:
    for place in _places(one):
      yield (key, *place)


def _other_json(content, rng):
  """A key within it is lost or renamed, or its value is another."""
  value = json.loads(content)
  depth = rng.choice((1, 1, 2, 3, 9))
  *outer, last = rng.choice(
    [place for place in _places(value) if 0 < len(place) <= depth] or [[None]]
  )
  if last is None:
    return json.dumps(rng.choice(_VALUES)).encode()
  within = value
  for key in outer:
    within = within[key]
  how = rng.randrange(4)
  if how == 0:
    del within[last]
  elif how == 1 and isinstance(within, dict):
    within[f'{last}s'] = within.pop(last)
  else:
    within[last] = rng.choice(_VALUES)
  return json.dumps(value).encode()


def _damaged(content, rng, is_json=False):
  """The content of a file, damaged in one of several ways."""
  way = rng.choice(('cut', 'empty', 'flip', 'flip', 'bytes', *('json',) * 4))
  if way == 'cut':
    return content[: rng.randrange(len(content))]
  if way == 'empty':
    return b''
  if way == 'json' and is_json:
    return _other_json(content, rng)
  changed = bytearray(content)
  # Files say at their beginning what is in them.
  end = rng.choice((len(changed), min(len(changed), 2000)))
  for _ in range(1 if way == 'flip' else 3):
    place = rng.randrange(end)
    changed[place] ^= 1 << rng.randrange(8)
    if way != 'flip':
      changed[place] = rng.choice((0, 1, 4, 9, 255, rng.randrange(256)))
  return bytes(changed)


def _outcome(read):
  """A function's result, and the message of the ValueError that it raises."""
  try:
    return read(), None
  except ValueError as error:
    return None, str(error)


# Files by kind: what writes one into a folder, and what reads it.


def _plan():
  context = plan_lib.Context(
    models={'target': 't', 'draft': None, 'vocabulary': 'v'},
    machine={'device': 'cpu', 'cores': 2},
    dtype='float32',
    draft_dtype='int4',
    batch_size=2,
    sampling={'top_k': 50},
  )
  way = plans.way('staged', width=5, num_nodes=17, ngram='a')
  return plans.plan(context, way)


def _write_table(path):
  table = table_lib.NGramTable.make(
    edge_token=np.array([0, 2, 5]),
    first_child=np.array([1, 3, 3, 3]),
    next_tokens=np.arange(6).reshape(3, 2),
    next_log_probs=np.log(np.arange(1, 7).reshape(3, 2) / 9),
    order=2,
    vocab_size=9,
  )
  table_lib.save_table(path, table, {'draft': 'a', 'tokens': 5})


def _read_table(path):
  table, provenance = table_lib.load_table(path)
  arrays = (table.edge_token, table.first_child, table.next_tokens)
  arrays = [one.tolist() for one in (*arrays, table.next_log_probs)]
  return arrays, table.order, table.vocab_size, provenance


_RECORD = {'seed': 3, 'corpus': {'folder': 'a', 'files': ['b', 'c']}}

# The name of the file, what writes and what reads it.
_FILES = {
  'plan': (
    'plan.json',
    lambda path: _plan().save(path),
    plan_lib.load_plan,
  ),
  'table': ('table.safetensors', _write_table, _read_table),
  'settings of a run': (
    'run.json',
    lambda path: kept.write_once(path, _RECORD),
    lambda path: kept.write_once(path, _RECORD),
  ),
  'topology': (
    'shape.json',
    lambda path: path.write_text('[[0], [1], [0, 0], [0, 1], [0, 0, 2]]'),
    lambda path: topology_lib.load_topology(str(path)).children.shape,
  ),
  'counts': (
    'counts.npy',
    lambda path: np.save(path, np.arange(20)),
    lambda path: draft_vocabulary.most_frequent(str(path), 5),
  ),
  'tokens': (
    'tokens.npy',
    lambda path: np.save(path, np.arange(20) % 7),
    lambda path: (
      counting.count_ngrams([path], order=3, vocab_size=7).num_tokens
    ),
  ),
}


@pytest.mark.parametrize('kind', _FILES)
def test_a_damaged_file_is_refused_by_name(kind, tmp_path):
  name, write, read = _FILES[kind]
  path, refused = tmp_path / name, 0
  write(path)
  whole = path.read_bytes()
  read(path)
  for seed in range(60):
    rng = random.Random(seed)
    content = _damaged(whole, rng, name.endswith('.json'))
    path.write_bytes(content)
    _, error = _outcome(lambda: read(path))
    assert error is None or str(path) in error, seed
    refused += error is not None
    assert path.read_bytes() == content
  assert refused > 20


def test_a_damaged_program_is_compiled_again(tmp_path):
  """JAX says so, and goes on; its cache is what scripts use."""
  before = {name: getattr(jax.config, name) for name in _CACHE}
  compute = lambda: jax.jit(lambda x: 3 * x + 1)(np.arange(4)).tolist()
  try:
    for name, value in {**_CACHE, _CACHE_FOLDER: str(tmp_path)}.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
    assert compute() == [1, 4, 7, 10]
    (file,) = tmp_path.glob('jit__lambda*-cache')
    whole = file.read_bytes()
    for content in (
      b'',
      whole[:40],
      whole[:-1],
      random.Random(0).randbytes(99),
    ):
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
    own = {name: one for name, one in tensors.items() if parts[name] == part}
    safetensors_numpy.save_file(own, path / f'{part}.safetensors')
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
  ('write', 'load', 'number'),
  [
    (_folder, _load_model, 120),
    (_rounded_folder, _load_model, 50),
    (_gguf_file, _load_model, 80),
    (_head_folder, tiny_heads.load, 50),
    (_head_file, tiny_heads.load, 50),
  ],
)
def test_a_damaged_model_is_loaded_or_refused_by_name(
  write, load, number, tmp_path, monkeypatch
):
  monkeypatch.setattr(logging.root, 'level', logging.ERROR)
  folder = tmp_path / 'model'
  write(folder)
  files = sorted(folder.iterdir())
  path = files[0] if files[0].suffix == '.gguf' else folder
  contents = {file: file.read_bytes() for file in files}
  load(path)
  refused = 0
  for seed in range(number):
    rng = random.Random(seed)
    file = rng.choice(files)
    file.write_bytes(_damaged(contents[file], rng, file.suffix == '.json'))
    _, error = _outcome(functools.partial(load, path))
    assert error is None or str(path) in error, (seed, file)
    refused += error is not None
    file.write_bytes(contents[file])
  assert refused > number // 3


def test_a_tensor_that_is_larger_than_its_file_is_refused_at_once(tmp_path):
  """No memory is asked for its size, which a damaged file may say."""
  _head_file(tmp_path / 'head')
  (file,) = (tmp_path / 'head').iterdir()
  size = lambda number: b'd2t' + struct.pack('<IQ', 1, number)
  content = file.read_bytes().replace(size(len(tiny_heads.IDS)), size(2**32))
  file.write_bytes(content)
  with pytest.raises(ValueError, match=r'd2t of shape \[4294967296\] does not'):
    tiny_heads.load(file)
