"""GGUF files give the same models as the folders that they were made from."""

import dataclasses
import re
import struct
import sys

from flax import nnx
from flax import traverse_util
import gguf
from gguf import GGMLQuantizationType as Kind
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import tiny
import tiny_blocks
import variants

from specdec.models import extras
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.gguf_parts import gguf_file
from specdec.models.checkpoints.gguf_parts import gguf_keys
from specdec.models.checkpoints.heads import heads
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import delta as delta_lib
from specdec.models.nn import dtypes
from specdec.models.nn import gemma as gemma_lib
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import mixtral as mixtral_lib
from specdec.models.nn import rope as rope_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import pair as pair_lib

_LLAMA3 = rope_lib.Llama3Scaling(
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=8192,
)
_YARN = rope_lib.YarnScaling(
  factor=4.0, original_max_position_embeddings=16, truncate=False
)
_YARN_OF_8 = rope_lib.YarnScaling(
  factor=8.0, original_max_position_embeddings=16, attention_factor=1.5
)
_LONGROPE = rope_lib.LongRopeScaling(
  short_factor=tuple(1 + np.arange(24) / 16),
  long_factor=tuple(2 + np.arange(24) / 16),
  original_max_position_embeddings=48,
  attention_factor=1.25,
)
_WIDE = rope_lib.Rope(theta=5e5)
_LOCAL = rope_lib.Rope()
_GLOBAL = rope_lib.Rope(theta=1e6, scaling=rope_lib.LinearScaling(factor=2.0))
_PROPORTIONAL = rope_lib.Rope(
  theta=1e6, scaling=rope_lib.ProportionalScaling(partial_rotary_factor=0.5)
)
# Rows of 256 numbers, the longest block of any type.
_SHAPE = {'vocab_size': 40, 'num_layers': 2, 'width': 256, 'num_heads': 4}
_LLAMA = _SHAPE | {'num_kv_heads': 2, 'head_width': 64, 'inner_width': 256}
_LLAMA |= {'num_positions': 64, 'tie_embeddings': False}
_MIXTURE = _LLAMA | {'num_experts': 3, 'experts_per_token': 2}
_GEMMA = _LLAMA | {'activation': 'gelu_pytorch_tanh', 'tie_embeddings': True}
_GEMMA |= {'post_norm': True, 'window': (8, None)}
# Models in blocks of few bits, and what no variant of `variants` has.
_CONFIGS = {
  'gpt2': nn_gpt2.GPT2Config(**_SHAPE, num_positions=16, inner_width=512),
  'llama': nn_llama.LlamaConfig(**_LLAMA, rope=rope_lib.Rope(theta=5e5)),
  'llama, llama3': nn_llama.LlamaConfig(
    **_LLAMA, rope=rope_lib.Rope(scaling=_LLAMA3)
  ),
  'llama, vocabulary': nn_llama.LlamaConfig(**_LLAMA | {'vocab_size': 293}),
  'llama, mixture': mixtral_lib.MixtralConfig(**_MIXTURE),
  'gemma2': gemma_lib.GemmaConfig(**_GEMMA, score_cap=5.0, logit_cap=3.0),
  'gemma3': gemma_lib.GemmaConfig(
    **_GEMMA | {'num_layers': 7, 'window': (*[8] * 5, None, 8)},
    qk_norm=True,
    rope=(*[_LOCAL] * 5, _GLOBAL, _LOCAL),
  ),
  'gemma4': gemma_lib.Gemma4Config(
    **_GEMMA
    | {'num_layers': 4, 'window': (8, None) * 2, 'head_width': (64, 128) * 2}
    | {'inner_width': (256, 256, 512, 512), 'kv_source': (None, None, 0, 1)},
    rope=(rope_lib.Rope(theta=5e3), _PROPORTIONAL) * 2,
    attention_scale=1.0,
    qk_norm=True,
    value_norm=True,
    layer_width=256,
    logit_cap=3.0,
  ),
  'qwen35': delta_lib.DeltaConfig(
    **_LLAMA | {'rope': rope_lib.Rope(fraction=0.25), 'num_layers': 3},
    qk_norm=True,
    mixers=('linear_attn', 'self_attn', 'linear_attn'),
    key_heads=2,
    value_heads=4,
    key_width=64,
    value_width=32,
    conv_size=4,
    tiled=True,
  ),
  'olmo2': nn_llama.LlamaConfig(
    **_LLAMA | {'pre_norm': False, 'post_norm': True, 'window': (8, None)},
    qk_norm=True,
    joint_qk_norm=True,
    rope=(_WIDE, dataclasses.replace(_WIDE, scaling=_YARN_OF_8)),
  ),
  'smollm3': nn_llama.LlamaConfig(
    **_LLAMA | {'num_layers': 4, 'rope': (*[_LOCAL] * 3, None)}
  ),
  # llama.cpp has another default for the number of heads than transformers.
  'mistral3': nn_llama.LlamaConfig(**_LLAMA | {'num_kv_heads': 4}),
  'phi3': nn_llama.LlamaConfig(
    **_LLAMA | {'num_positions': 48},
    rope=rope_lib.Rope(scaling=_LONGROPE, fraction=0.75),
  ),
  'gpt-oss': mixtral_lib.GptOssConfig(
    **_MIXTURE,
    **dict.fromkeys(('qkv_bias', 'output_bias', 'mlp_bias'), True),
    **dict.fromkeys(('sinks', 'clamped'), True),
    window=(8, None),
    rope=rope_lib.Rope(scaling=_YARN),
  ),
}
_BLOCKS = (
  ('gpt2', Kind.Q8_0),
  ('llama', Kind.Q4_K),
  ('llama, mixture', Kind.Q5_0),
  ('gpt-oss', Kind.MXFP4),
  ('gemma4', Kind.Q4_K),
  ('phi3', Kind.Q8_0),
)


def _write(path, name, kind=Kind.F32, **options):
  """A model of `_CONFIGS`, whose name begins with the architecture."""
  rng = np.random.default_rng(0)
  # Hardly two numbers are equal.
  shaped = hub.shape_module(_CONFIGS[name], jnp.float32)
  graph, shapes = hub.flat_params(shaped)
  draw = lambda leaf: jnp.asarray(0.1 * rng.standard_normal(leaf.shape))
  drawn = {name: draw(leaf) for name, leaf in shapes.items()}
  module = nnx.merge(graph, traverse_util.unflatten_dict(drawn))
  arch = name.partition(',')[0]
  return gguf_files.write(path, module, arch, kind, **options)


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'model.gguf'


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    *((name, Kind.F32) for name in ('llama, llama3', 'gemma2', 'gemma3')),
    *((name, Kind.F32) for name in ('qwen35', 'smollm3', 'mistral3')),
    ('olmo2', Kind.F32),
    ('gpt2', Kind.F16),
    ('gpt2', Kind.BF16),
    ('llama', Kind.Q4_K),
    ('llama, mixture', Kind.Q5_0),
    ('gpt-oss', Kind.MXFP4),
  ],
)
def test_parameters_and_shape_are_those_that_were_written(name, kind, path):
  expected = _write(path, name, kind)
  module = hub.load_module(path)
  assert module.config == _CONFIGS[name]
  expected = {k: v for k, v in expected.items() if not k.startswith('rope_')}
  tensors = dict(gguf_files.tensors_of(module, name.partition(',')[0]))
  assert tensors.keys() == expected.keys()
  for key, array in tensors.items():
    np.testing.assert_array_equal(array, expected[key], err_msg=key)


# Variants that a file can be of; `families_test` has more.
_VARIANTS = {
  **dict.fromkeys(('tied', 'linear', 'yarn', 'mistral', 'mixtral'), 'llama'),
  'gpt2': 'gpt2',
  'gpt2_untied': 'gpt2',
  'lfm2': 'lfm2',
  'olmo2': 'olmo2',
  'qwen2': 'qwen2',
  'qwen3': 'qwen3',
  'qwen3_moe_renormalized': 'qwen3moe',
  'gemma': 'gemma',
  'granite': 'granite',
}


@pytest.mark.parametrize('name', _VARIANTS)
def test_a_file_of_a_folder_is_the_same_model(name, path, tmp_path):
  module = hub.load_module(variants.write(name, tmp_path / name))
  gguf_files.write(path, module, _VARIANTS[name])
  loaded = hub.load_module(path)
  assert loaded.config == module.config
  both = map(tiny.parameters, (module, loaded))
  jax.tree.map(np.testing.assert_array_equal, *both)


def test_tokenizer_and_ends(path):
  text = 'def add(a, b):\n  return a + b\n' * 9 + 'naïve 日本 \n\n  x'
  tokenizer = tokenizer_lib.train_tokenizer([text], vocab_size=290, context=64)
  # The last one has letters that no byte is spelled with.
  special = ['<|im_end|>', '<日>']
  tokenizer.add_special_tokens({'additional_special_tokens': special})
  _write(path, 'llama, vocabulary', tokenizer=tokenizer)
  pair = pair_lib.load_pair(choice_lib.ModelChoice(str(path), None))
  # The keys, and a special token that llama.cpp knows by its text.
  turn = tokenizer.convert_tokens_to_ids('<|im_end|>')
  assert pair.eos_ids == (tokenizer.eos_token_id, 7, turn)
  assert pair.tokenizer.get_vocab() == tokenizer.get_vocab()
  assert pair.encode(text) == tokenizer(text)['input_ids']
  assert pair.decode(pair.encode(text)) == text
  assert pair.tokenizer.chat_template == '{{ messages }}'


# Its elements are 3; without a shape it is gone.
@pytest.mark.parametrize(
  ('name', 'tensor', 'shape', 'message'),
  refusals.of('models/checkpoints', 'gguf tensor'),
)
def test_tensors_that_do_not_fit(name, tensor, shape, message, path):
  def change(tensors):
    others = {key: tensors[key] for key in tensors if key != tensor}
    if shape is None:
      return others
    return others | {tensor: (np.full(shape, 3, np.float32), Kind.F32)}

  _write(path, name, change=change)
  with pytest.raises(ValueError, match=f'{path}.*{message}'):
    hub.load_module(path)


def test_a_scale_that_is_not_finite_is_refused_in_every_format(path):
  """By the names of file and tensor; `blocks_test` has all kinds."""
  name = 'blk.1.attn_output.weight'
  data = np.zeros((256, 144), np.uint8)
  data[200, 2:4] = 0x00, 0xFC  # -inf
  change = lambda tensors: tensors | {name: (data, Kind.Q4_K)}
  _write(path, 'gpt2', change=change)
  for dtype in matrices_lib.DTYPES:
    message = f'^{path}: tensor {name}: .*(scale|weights).* not finite'
    with pytest.raises(ValueError, match=message):
      hub.load_module(path, dtype=dtype)


# A name, and before its type the number of axes, and two lengths.
_TYPE = b'blk.0.attn_q.weight' + struct.pack('<IQQ', 2, 256, 256)


@pytest.mark.parametrize(
  ('old', 'new', 'message'),
  [
    (b'GGUF', b'GGML', 'is not a GGUF file'),
    (b'GGUF\x03', b'GGUF\x09', 'version 9 is not known'),
    (b'GGUF\x03\0\0\0', b'GGUF\0\0\0\x03', 'it is big-endian; gguf-convert'),
    (b'llama', b'lamma', "architecture 'lamma' is not known; choose from"),
    (b'.rope.freq_base', b'.rope.freq_bass', 'rope.freq_bass is not supported'),
    (_TYPE + b'\0', _TYPE + b'\xfa', 'attn_q.weight: it is of type 250, w'),
    (b'.vocab_sizE', b'.vocab_size', 'vocab_size is there twice'),
  ],
)
def test_headers_that_say_something_else(old, new, message, path):
  twice = {'vocab_size': 40, 'vocab_sizE': 41} if b'sizE' in old else {}
  _write(path, 'llama', keys=twice)
  assert old in path.read_bytes()
  path.write_bytes(path.read_bytes().replace(old, new))
  with pytest.raises(ValueError, match=f'{path}.*{message}'):
    hub.load_module(path)


_LISTS = {'attention.head_count_kv': [2, 2], 'feed_forward_length': [256] * 2}
# The converter keeps keys of Mamba layers and experts that a model has not.
_LEFT_OVER = {'ssm.conv_kernel': 4, 'expert_shared_feed_forward_length': 64}
_LEFT_OVER |= {'attn_logit_softcapping': 0.0, 'attention.sliding_window': 0}
# One more block predicts the token after the next one.
_MTP = {'block_count': 4, 'nextn_predict_layers': 1}
_MTP |= {'attention.head_count_kv': [2, 2, 2, 4]}


def _with(*names):
  """A change of tensors: some of the fourth layer that nothing reads."""
  row = np.ones((40, 256), np.float32), Kind.F32
  more = {f'blk.3.{name}.weight': row for name in names}
  return lambda tensors: tensors | more


@pytest.mark.parametrize(
  ('name', 'other'),
  [
    ('llama', {'keys': _LISTS}),
    ('llama', {'keys': _LEFT_OVER}),
    (
      'qwen35',
      {
        'keys': _MTP,
        'change': _with('attn_norm', 'attn_k', 'nextn.eh_proj', 'nextn.enorm'),
      },
    ),
    # The layer reads the keys of another one.
    ('gemma4', {'change': _with('attn_k')}),
  ],
)
def test_what_a_file_may_also_say_changes_nothing(name, other, path):
  loaded, configs = [], set()
  for options in ({}, other):
    _write(path, name, **options)
    module = hub.load_module(path)
    configs.add(module.config)
    loaded.append(tiny.parameters(module))
  assert len(configs) == 1
  jax.tree.map(np.testing.assert_array_equal, *loaded)


def test_scales_of_0_are_off(path, tmp_path):
  module = hub.load_module(variants.write('granite', tmp_path / 'folder'))
  names = 'embedding_scale', 'residual_scale', 'logit_scale', 'attention.scale'
  gguf_files.write(path, module, 'granite', keys=dict.fromkeys(names, 0.0))
  off = {'embedding_scale': 1.0, 'residual_scale': 1.0, 'logit_divisor': 1.0}
  expected = dataclasses.replace(module.config, attention_scale=None, **off)
  assert hub.locate(path).config == expected


@pytest.mark.parametrize(
  ('stated', 'factor'),
  [
    ({}, 0.1 * np.log(4.0) + 1),
    ({'rope.scaling.attn_factor': 1.5}, 1.5),
    ({'rope.scaling.yarn_attn_factor': 1.0}, 1.0),
    # It is the usual one, rounded to float32.
    ({'rope.scaling.attn_factor': 1.1386294}, 0.1 * np.log(4.0) + 1),
  ],
)
def test_the_factor_of_yarn_may_be_stated(stated, factor, path):
  keys = {'rope.scaling.type': 'yarn', 'rope.scaling.factor': 4.0}
  keys |= {'rope.scaling.original_context_length': 16} | stated
  _write(path, 'llama', keys=keys)
  scaling = hub.locate(path).config.rope.scaling
  assert scaling.attention_factor == factor


@pytest.mark.parametrize(
  ('keys', 'message'),
  [
    ({'general.type': 'adapter'}, r'not a model but an adapter \(LoRA\)'),
    ({'general.type': 'mmproj'}, r'not a model but the projector \(mmproj\)'),
    ({'general.architecture': 'clip'}, 'not a model but the projector'),
    ({'split.count': 3}, 'one of 3 parts of a model; merge them'),
  ],
)
def test_files_that_hold_no_model(keys, message, path):
  writer = gguf.GGUFWriter(path, keys.get('general.architecture', 'llama'))
  if 'general.type' in keys:
    writer.add_type(keys['general.type'])
  if 'split.count' in keys:
    writer.add_uint16('split.count', keys['split.count'])
  tiny_blocks.finish(writer)
  for read in (
    lambda: hub.locate(path).config,
    lambda: heads.locate(path, _CONFIGS['llama']),
  ):
    with pytest.raises(ValueError, match=f'^{path}: it is {message}'):
      read()


@pytest.mark.parametrize(
  ('name', 'keys', 'message'), refusals.of('models/checkpoints', 'gguf')
)
def test_keys_that_say_something_else(name, keys, message, path):
  _write(path, name, keys=keys)
  with pytest.raises(ValueError, match=f'^{path}: .*{message}'):
    hub.locate(path).config  # noqa: B018


def test_so_many_pairs_are_rotated_as_a_file_says():
  for whole in range(1, 129):
    for count in range(1, whole + 1):
      part = gguf_keys.part_of(count, whole)
      assert int(part * whole) == int(part * 2 * whole // 2) == count
      assert part == pytest.approx(count / whole)


def test_tensors_lie_by_the_alignment_that_a_file_says(path):
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_custom_alignment(256)
  arrays = {name: np.full(5, at, np.float32) for at, name in enumerate('ab')}
  for name, array in arrays.items():
    writer.add_tensor(name, array)
  tiny_blocks.finish(writer)
  tensors = gguf_file.read_header(path).tensors
  for name, array in arrays.items():
    [(_, stored)] = gguf_file.Tensor(tensors[name]).row_batches()
    np.testing.assert_array_equal(stored, array)


def test_a_file_of_any_name(path):
  """Ollama keeps such files; the folder of a model is not such a file."""
  _write(path, 'gpt2')
  for name in ('model.GGUF', 'sha256-0123abcd'):
    renamed = path.rename(path.with_name(name))
    assert hub.locate(str(renamed)).path == renamed
    assert hub.locate(str(renamed)).config == _CONFIGS['gpt2']
    renamed.rename(path)
  other = path.with_name('model.safetensors')
  other.touch()
  with pytest.raises(ValueError, match='is a file, but no GGUF file; give the'):
    hub.locate(str(other))


@pytest.mark.parametrize(('name', 'kind'), _BLOCKS)
def test_matrices_stay_as_they_are_stored(name, kind, path, caplog):
  """But one that is in no blocks, and positions and routers."""

  def change(tensors):
    key = 'blk.0.attn_output.weight'
    exact = gguf.dequantize(*tensors[key])
    return tensors | {key: (exact.astype(np.float16), Kind.F16)}

  _write(path, name, kind, change=change)
  leaves = hub.flat_params(hub.load_module(path, dtype='stored'))[1]
  expected = hub.flat_params(hub.load_module(path))[1]
  floats = set()
  for key, leaf in leaves.items():
    values = np.asarray(expected[key])
    if isinstance(leaf, blocks_lib.GroupedMatrix):
      assert leaf.codes.dtype == blocks_lib.KINDS[kind.name].code_dtype
      weights = jax.tree.map(np.asarray, leaf).take(np.arange(len(values)))
      np.testing.assert_array_equal(weights, values)
    elif leaf.ndim == 2:
      assert leaf.dtype == jnp.bfloat16
      rounded = values.astype(jnp.bfloat16)
      np.testing.assert_array_equal(np.asarray(leaf), rounded)
      floats.add(key[-2:])
  has_router = isinstance(_CONFIGS[name], mixtral_lib.MixtralConfig)
  assert len(floats) == 1 + (name == 'gpt2' or has_router), floats
  assert '1 matrices are in bfloat16' in caplog.text


def test_auto_is_what_is_stored_and_native(path, monkeypatch):
  for kind, native, dtype in (
    (Kind.F16, {'float16', 'bfloat16'}, 'float16'),
    (Kind.F16, {'bfloat16'}, 'float32'),
    (Kind.BF16, {'bfloat16'}, 'bfloat16'),
    (Kind.Q8_0, {'float16', 'bfloat16'}, 'bfloat16'),
    (Kind.Q8_0, {'float16'}, 'float16'),
    (Kind.Q8_0, set(), 'float32'),
    (Kind.F32, {'float16', 'bfloat16'}, 'float32'),
  ):
    monkeypatch.setattr(dtypes, 'native_dtypes', lambda native=native: native)
    _write(path, 'gpt2', kind)
    stored = hub.locate(path)
    name = lambda *args, **options: (
      checkpoint_lib.resolve_dtype(*args, **options).name
    )
    assert name('auto', stored) == dtype
    assert name('int8', stored) == 'int8'
    packed = 'stored' if kind == Kind.Q8_0 else dtype
    assert name('auto', stored, packed=True) == packed


def test_what_is_not_there(path, monkeypatch):
  with pytest.raises(ValueError, match=r'there is no file .*model\.gguf'):
    hub.load_module(path)
  _write(path, 'gpt2')
  with pytest.raises(ValueError, match=r'model\.gguf has no tokenizer'):
    pair_lib.load_pair(choice_lib.ModelChoice(str(path), None))
  monkeypatch.setitem(sys.modules, 'gguf', None)
  with pytest.raises(ValueError, match=re.escape(extras.command('gguf'))):
    hub.load_module(path)
