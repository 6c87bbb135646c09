"""GGUF files give the same models as the folders that they were made from."""

import collections
import dataclasses
import itertools
import json
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
import long_logits
import numpy as np
import pytest
import tiny_blocks
import tiny_drafters

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import families
from models.checkpoints import hub
from models.checkpoints.gguf_parts import gguf_rope
from models.lab.training import tokenizer as tokenizer_lib
from models.nn import adapter
from models.nn import blocks as blocks_lib
from models.nn import delta as delta_lib
from models.nn import dtypes
from models.nn import gemma as gemma_lib
from models.nn import gpt2 as nn_gpt2
from models.nn import lfm2 as lfm2_lib
from models.nn import llama_config
from models.nn import matrices as matrices_lib
from models.nn import mixtral as mixtral_lib
from models.nn import rope as rope_lib
from models.nn.cpu import build
from models.text import choice as choice_lib
from models.text import pair as pair_lib
import specdec

_LLAMA3 = rope_lib.Llama3Scaling(
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=8192,
)
_LINEAR = rope_lib.LinearScaling(factor=2.0)
_YARN = rope_lib.YarnScaling(factor=4.0, original_max_position_embeddings=16)
_LONGROPE = rope_lib.LongRopeScaling(
  short_factor=tuple(1 + np.arange(24) / 16),
  long_factor=tuple(2 + np.arange(24) / 16),
  original_max_position_embeddings=48,
  attention_factor=1.25,
)
# Rows of 256 numbers, the longest block of any type.
_SHAPE = {'vocab_size': 40, 'num_layers': 2, 'width': 256, 'num_heads': 4}
_LLAMA = _SHAPE | {'num_kv_heads': 2, 'head_width': 64, 'inner_width': 256}
_LLAMA |= {'num_positions': 64, 'tie_embeddings': False}
_MIXTURE = _LLAMA | {'num_experts': 3, 'experts_per_token': 2}
_GEMMA = _LLAMA | {'activation': 'gelu_pytorch_tanh', 'tie_embeddings': True}
_GEMMA |= {'post_norm': True, 'window': (8, None)}
_LOCAL, _GLOBAL = rope_lib.Rope(), rope_lib.Rope(theta=1e6, scaling=_LINEAR)
_ROPE_3 = (*[_LOCAL] * 5, _GLOBAL, _LOCAL)
_PROPORTIONAL = rope_lib.Rope(
  theta=1e6, scaling=rope_lib.ProportionalScaling(partial_rotary_factor=0.5)
)
_BEHIND = {'pre_norm': False, 'post_norm': True, 'qk_norm': True}
_BEHIND |= {'joint_qk_norm': True}
_MULTIPLIERS = {'embedding_scale': 3.0, 'attention_scale': 0.25}
_MULTIPLIERS |= {'residual_scale': 0.5, 'logit_divisor': 2.0}
_CONFIGS = {
  'gpt2': nn_gpt2.GPT2Config(**_SHAPE, num_positions=16, inner_width=512),
  'llama': llama_config.LlamaConfig(**_LLAMA, rope=rope_lib.Rope(theta=5e5)),
  'llama, tied': llama_config.LlamaConfig(**_LLAMA | {'tie_embeddings': True}),
  'llama, llama3': llama_config.LlamaConfig(
    **_LLAMA, rope=rope_lib.Rope(scaling=_LLAMA3)
  ),
  'llama, mixture': mixtral_lib.MixtralConfig(**_MIXTURE),
  'qwen2': llama_config.LlamaConfig(**_LLAMA, qkv_bias=True),
  'qwen2, yarn': llama_config.LlamaConfig(
    **_LLAMA, qkv_bias=True, rope=rope_lib.Rope(scaling=_YARN)
  ),
  'qwen3': llama_config.LlamaConfig(**_LLAMA, qk_norm=True),
  'qwen3moe': mixtral_lib.MixtralConfig(**_MIXTURE, qk_norm=True),
  'llama, window': llama_config.LlamaConfig(**_LLAMA, window=8),
  'gemma': gemma_lib.GemmaConfig(
    **_LLAMA | {'activation': 'gelu_pytorch_tanh', 'tie_embeddings': True}
  ),
  'gemma2': gemma_lib.GemmaConfig(**_GEMMA, score_cap=5.0, logit_cap=3.0),
  'gemma3': gemma_lib.GemmaConfig(
    **_GEMMA
    | {'num_layers': 7, 'window': (*[8] * 5, None, 8), 'rope': _ROPE_3},
    qk_norm=True,
  ),
  'gemma4': gemma_lib.Gemma4Config(
    **_GEMMA
    | {'num_layers': 4, 'window': (8, None) * 2, 'head_width': (64, 128) * 2}
    | {'inner_width': (256, 256, 512, 512), 'kv_source': (None, None, 0, 1)},
    **{'rope': (_LOCAL, _PROPORTIONAL) * 2, 'attention_scale': 1.0},
    **{'qk_norm': True, 'value_norm': True, 'layer_width': 256},
    logit_cap=3.0,
  ),
  'granite': llama_config.LlamaConfig(**_LLAMA, **_MULTIPLIERS),
  'lfm2': lfm2_lib.Lfm2Config(
    **_LLAMA | {'num_layers': 3, 'conv_size': 4, 'tie_embeddings': True},
    qk_norm=True,
    mixers=('conv', 'self_attn', 'conv'),
  ),
  'qwen35': delta_lib.DeltaConfig(
    **_LLAMA | {'rope': rope_lib.Rope(fraction=0.25), 'num_layers': 3},
    **{'qk_norm': True, 'mixers': ('linear_attn', 'self_attn', 'linear_attn')},
    **{'key_heads': 2, 'value_heads': 4, 'key_width': 64, 'value_width': 32},
    **{'conv_size': 4, 'tiled': True},
  ),
  'olmo2': llama_config.LlamaConfig(**_LLAMA, **_BEHIND),
  'smollm3': llama_config.LlamaConfig(
    **_LLAMA | {'num_layers': 4, 'rope': (*[_LOCAL] * 3, None)}
  ),
  'granite, no rotation': llama_config.LlamaConfig(**_LLAMA, rope=None),
  'granitemoe': mixtral_lib.MixtralConfig(
    **_MIXTURE, **_MULTIPLIERS, shared_width=512, shared_gate=False
  ),
  'minicpm': llama_config.LlamaConfig(
    **_LLAMA | _MULTIPLIERS | {'attention_scale': None}
  ),
  'mistral3': llama_config.LlamaConfig(
    **_LLAMA,
    rope=rope_lib.Rope(
      scaling=dataclasses.replace(_YARN, attention_factor=1.0),
      query_growth=0.25,
    ),
  ),
  # llama.cpp has another default for the number of heads than transformers.
  'mistral3, plain': llama_config.LlamaConfig(**_LLAMA | {'num_kv_heads': 4}),
  'phi3': llama_config.LlamaConfig(
    **_LLAMA | {'num_positions': 48},
    rope=rope_lib.Rope(scaling=_LONGROPE, fraction=0.75),
  ),
  'gpt-oss': mixtral_lib.GptOssConfig(
    **_MIXTURE,
    **dict.fromkeys(('qkv_bias', 'output_bias', 'mlp_bias'), True),
    **dict.fromkeys(('sinks', 'clamped'), True),
    window=(8, None),
    rope=rope_lib.Rope(scaling=dataclasses.replace(_YARN, truncate=False)),
  ),
  'vocabulary': llama_config.LlamaConfig(**_LLAMA | {'vocab_size': 293}),
}
# Folders have the experts of these in another layout.
_OTHERWISE = ('granite', 'granitemoe', 'gpt-oss')
# As published files of families have them.
_FAMILIES = (
  *(('mistral3', Kind.Q4_K), ('phi3', Kind.Q8_0), ('minicpm', Kind.Q4_K)),
  *(('granitemoe', Kind.Q8_0), ('granite', Kind.Q4_K)),
  *(('gpt-oss', Kind.MXFP4), ('gemma4', Kind.Q4_K)),
)
_EXPERT = re.compile(r'(mlp|block_sparse_moe)\.experts\.\d+')


def _stored(module, arch):
  """Names and arrays of a file, by gguf's own table of names."""
  config, family = module.config, families.family_of(module.config)
  architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
  table = gguf.get_tensor_name_map(architectures[arch], config.num_layers)
  stacks = collections.defaultdict(list)
  for path, leaf in hub.flat_params(module)[1].items():
    name = families.parameter_name(path)
    array = np.asarray(leaf, np.float32)
    if array.ndim == 3:  # A convolution.
      array = array[:, 0].T
    for part, heads in (('q', config.num_heads), ('k', config.num_kv_heads)):
      if arch in gguf_files.SWAPPED and f'.{part}_proj.' in name:
        array = gguf_files.permuted(array, heads)
    if name.endswith('.rate') or name.endswith('.dt_bias'):
      layer, own = name.split('.')[1], name.rsplit('.', 1)[1]
      known = {'rate': 'ssm_a', 'dt_bias': 'ssm_dt.bias'}[own]
      stacks[f'blk.{layer}.{known}', False].append(array)
      continue
    whole = (
      dataclasses.replace(config, tiled=False) if arch == 'qwen35' else config
    )
    own = family.stored_name(name, whole)
    if arch in _OTHERWISE and name != 'lm_head.weight':
      own = f'model.{name}'
    own += '.weight' * own.endswith(('sinks', 'layer_scalar'))
    stem, leaf_name = own.rsplit('.', 1)
    stem, is_expert = _EXPERT.subn('mlp.experts', stem)
    if is_expert:
      for ours, theirs in (('w1', 'gate'), ('w2', 'down'), ('w3', 'up')):
        stem = re.sub(rf'\.{ours}$', f'.{theirs}_proj', stem)
    known = table.get_name(stem)
    assert known, stem
    stacks[f'{known}.{leaf_name}', bool(is_expert)].append(array)
  for (name, is_expert), arrays in stacks.items():
    if '_qkv' in name and arch == 'phi3':  # The module has keys first.
      arrays = [arrays[1], arrays[0], arrays[2]]
    yield name, np.stack(arrays) if is_expert else np.concatenate(arrays)


def _random_q4_k(rng, shape):
  """Bytes of type Q4_K with scales of a sensible size."""
  blocks = rng.integers(256, size=(*shape[:-1], shape[-1] // 256, 144))
  blocks = blocks.astype(np.uint8)
  blocks[..., :4] = np.frombuffer(np.float16([1e-3, 5e-3]).tobytes(), np.uint8)
  return blocks.reshape(*shape[:-1], -1)


def _write(
  path, name, kind=Kind.F32, *, change=dict, tokenizer=None, keys=None
):
  """Writes a model of `_CONFIGS`; returns the tensors, rounded as in the file.

  The name begins with the architecture, and `kind` is that of the matrices; the
  rest is float32. The function `change` gets the tensors, and may change them;
  `keys` are further ones of the architecture, or other values.
  """
  arch = 'llama' if name == 'vocabulary' else name.split(',')[0]
  config = _CONFIGS[name]
  writer = gguf.GGUFWriter(path, arch)
  gguf_files.metadata(writer, config, arch)
  tiny_blocks.set_keys(writer, arch, keys or {})
  if tokenizer is not None:
    _add_tokenizer(writer, tokenizer)
  rng = np.random.default_rng(0)
  # Hardly two numbers are equal.
  graph, shapes = hub.flat_params(hub.shape_module(config, jnp.float32))
  draw = lambda leaf: jnp.asarray(0.1 * rng.standard_normal(leaf.shape))
  drawn = {name: draw(leaf) for name, leaf in shapes.items()}
  module = nnx.merge(graph, traverse_util.unflatten_dict(drawn))
  tensors = dict(_stored(module, arch))
  if 'llama3' in name:
    plain = rope_lib.Rope(theta=config.rope.theta).frequencies(
      config.head_width
    )
    scaled = config.rope.frequencies(config.head_width)
    tensors['rope_freqs.weight'] = plain / scaled
  tensors |= gguf_files.rope_factors(config)
  expected = {}
  for key, array in tensors.items():
    own = kind if array.ndim > 1 else Kind.F32
    if own == Kind.Q4_K:  # which gguf does not write
      data = _random_q4_k(rng, array.shape)
    else:
      data = gguf.quantize(array, own)
    expected[key] = gguf.dequantize(data, own)
    tensors[key] = (data, own)
  for key, (data, own) in change(tensors).items():
    writer.add_tensor(key, data, raw_dtype=own)
  tiny_blocks.finish(writer)
  return expected


def _pure(module):
  return nnx.to_pure_dict(nnx.split(module)[1])


def _add_tokenizer(writer, tokenizer):
  words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
  merges = json.loads(tokenizer.backend_tokenizer.to_str())['model']['merges']
  filling = [f'[PAD{index}]' for index in range(3)]
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre('gpt-2')
  writer.add_token_list([*words, *filling])
  special = {*tokenizer.all_special_tokens}
  kinds = [3 if word in special else 1 for word in words]
  writer.add_token_types([*kinds, *(5 for _ in filling)])
  writer.add_token_merges([' '.join(pair) for pair in merges])
  writer.add_eos_token_id(tokenizer.eos_token_id)
  writer.add_eot_token_id(7)
  writer.add_chat_template('{{ messages }}')


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'model.gguf'


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    *((name, Kind.F32) for name in _CONFIGS if name != 'vocabulary'),
    *itertools.product(
      ['gpt2', 'llama', 'llama, mixture'],
      [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_K],
    ),
  ],
)
def test_parameters_and_shape_are_those_that_were_written(name, kind, path):
  expected = _write(path, name, kind)
  module = hub.load_module(path)
  assert module.config == _CONFIGS[name]
  expected = {k: v for k, v in expected.items() if not k.startswith('rope_')}
  found = dict(_stored(module, name.split(',')[0]))
  assert found.keys() == expected.keys()
  for key, array in found.items():
    np.testing.assert_array_equal(array, expected[key], err_msg=key)


def test_keys_of_a_layer_that_reads_others_are_not_read(path):
  expected = _write(path, 'gemma4', change=_with('blk.3.attn_k.weight', _ROW))
  assert 'blk.3.attn_k.weight' not in expected
  found = hub.load_module(path)
  _write(path, 'gemma4')
  both = map(_pure, (found, hub.load_module(path)))
  jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.parametrize('dtype', ['bfloat16', 'int8'])
def test_final_dtypes_are_those_of_a_folder(dtype, path, tmp_path):
  _write(path, 'llama', Kind.Q8_0)
  hub.save_pretrained(hub.load_module(path), tmp_path)
  both = [_pure(hub.load_module(one, dtype=dtype)) for one in (path, tmp_path)]
  jax.tree.map(np.testing.assert_array_equal, *both)


def test_tokenizer_and_ends(path):
  text = 'def add(a, b):\n  return a + b\n' * 9 + 'naïve 日本 \n\n  x'
  tokenizer = tokenizer_lib.train_tokenizer([text], vocab_size=290, context=64)
  # The last one has letters that no byte is spelled with.
  special = ['<|im_end|>', '<日>']
  tokenizer.add_special_tokens({'additional_special_tokens': special})
  _write(path, 'vocabulary', tokenizer=tokenizer)
  pair = pair_lib.load_pair(choice_lib.ModelChoice(str(path), None))
  # The keys, and a special token that llama.cpp knows by its text.
  turn = tokenizer.convert_tokens_to_ids('<|im_end|>')
  assert pair.eos_ids == (tokenizer.eos_token_id, 7, turn)
  assert pair.tokenizer.get_vocab() == tokenizer.get_vocab()
  assert pair.encode(text) == tokenizer(text)['input_ids']
  assert pair.decode(pair.encode(text)) == text
  assert pair.tokenizer.chat_template == '{{ messages }}'


_with = lambda key, array: lambda all_: all_ | {key: (array, Kind.F32)}
_without = lambda key: lambda all_: {k: v for k, v in all_.items() if k != key}
_ROW = np.ones((40, 256), np.float32)


_ODD = _with('rope_freqs.weight', _ROW[0, :32] * 3)


@pytest.mark.parametrize(
  ('change', 'message', 'name'),
  [
    (
      _without('blk.1.attn_k.weight'),
      'lacks 1 ten.*1.self_attn.k_proj',
      'llama',
    ),
    (_without('token_embd.weight'), 'lacks the tensor token_embd', 'llama'),
    (_with('blk.0.ssm_in.weight', _ROW), 'ssm_in.weight is not part', 'llama'),
    (
      _with('blk.2.attn_k.weight', _ROW),
      '2.attn_k.weight is not part',
      'llama',
    ),
    (
      _with('output.weight', _ROW[:, :9]),
      r'\(40, 9\), expected \(40, 2',
      'llama',
    ),
    (_ODD, "not those of Llama 3's", 'llama'),
    (_with('rope_factors_short.weight', _ROW[0]), 'lacks .*_long', 'llama'),
    (_without('rope_freqs.weight'), 'lacks the tensor rope_freqs', 'gemma4'),
    (
      _without('blk.0.inp_gate.weight'),
      'lacks 1.*0.per_layer_input_g',
      'gemma4',
    ),
    (
      _with('blk.4.attn_k.weight', _ROW),
      '4.attn_k.weight is not part',
      'gemma4',
    ),
  ],
)
def test_tensors_that_do_not_fit(change, message, name, path):
  _write(path, name, change=change)
  with pytest.raises(ValueError, match=f'{path}.*{message}'):
    hub.load_module(path)


@pytest.mark.parametrize(
  ('kind', 'place'), [(Kind.Q8_0, 0), (Kind.Q4_K, 2), (Kind.Q6_K, 208)]
)
def test_a_scale_that_is_not_finite_is_refused_in_every_format(
  kind, place, path
):
  name = 'blk.1.attn_output.weight'
  per_block, size = gguf.GGML_QUANT_SIZES[kind]

  def damage(tensors):
    data = np.zeros((256, 256 // per_block * size), np.uint8)
    data[200, place : place + 2] = 0x00, 0xFC  # -inf
    return tensors | {name: (data, kind)}

  _write(path, 'gpt2', change=damage)
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
    (b'.block_count', b'.block_cOunt', 'block_cOunt is not supported'),
    (_TYPE + b'\0', _TYPE + b'\xfa', 'attn_q.weight is of type 250, which gg'),
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


def test_lists_with_a_value_for_each_layer(path):
  _write(path, 'llama')
  expected = hub.load_module(path)
  lists = {'attention.head_count_kv': [2, 2], 'feed_forward_length': [256] * 2}
  _write(path, 'llama', keys=lists)
  both = [_pure(one) for one in (expected, hub.load_module(path))]
  jax.tree.map(np.testing.assert_array_equal, *both)


_KV, _PATTERN = 'attention.head_count_kv', 'attention.sliding_window_pattern'
_EPSILON, _GROWTH = (
  'attention.layer_norm_epsilon',
  'attention.temperature_scale',
)
_ALL_SHARED = {'attention.shared_kv_layers': 4, 'feed_forward_length': 256}
_LINEAR_TYPE = {'rope.scaling.type': 'linear', 'rope.scaling.factor': 2.0}


@pytest.mark.parametrize(
  ('name', 'keys', 'message'),
  [
    ('llama', {_KV: [2, 4]}, 'llama.attention.head_count_kv differs between'),
    ('llama', {_KV: [2] * 3}, 'head_count_kv has 3 values for block_count=2'),
    ('llama', {'vocab_size': 41}, 'llama.vocab_size=41 contradicts the 40 row'),
    ('llama, llama3', _LINEAR_TYPE, "type='linear' and the tensor rope_freqs"),
    ('llama', {_PATTERN: 2}, 'sliding_window_pattern says which layers have a'),
    ('gemma2', {_PATTERN: [True]}, 'pattern has 1 values for 2 layers'),
    ('qwen2', {'rope.freq_base_swa': 5.0}, 'rope.freq_base_swa=5.0 is not'),
    ('qwen2', {'rope.scaling.attn_factor': 2.0}, 'attn_factor=2.0 is not supp'),
    ('qwen3', {'rope.dimension_count': 32}, 'dimension_count=32 is not th'),
    ('qwen3', {'context_length': 'a'}, "qwen3.context_length='a' must be an"),
    ('gpt2', {'block_count': 2.0}, 'gpt2.block_count=2.0 must be an integer'),
    ('gpt2', {_EPSILON: np.nan}, f'gpt2.{_EPSILON}=nan must be a finite num'),
    ('gemma2', {_PATTERN: 'all'}, "gemma2.*_pattern='all' must be an integer"),
    ('llama, mixture', {'expert_feed_forward_length': 128}, 'contradict'),
    ('phi3', {'rope.dimension_count': 32}, 'short_factor field must have len'),
    ('qwen2, yarn', {_GROWTH: 0.1}, 'llama_4_scaling_beta'),
    ('gpt-oss', {'expert_used_count': 9}, 'num_experts=3, got 9'),
    ('granitemoe', {'expert_count': 0}, 'granitemoe with 0 experts'),
    ('gemma4', {'expert_count': 4}, 'gemma4 with 4 experts is not supported'),
    (
      'gemma4',
      {'feed_forward_length': [256] * 3 + [512]},
      'forward_length=.256',
    ),
    (
      'gemma4',
      {'rope.dimension_count_swa': 32},
      'count_swa=32 is not the width',
    ),
    (
      'gemma4',
      {'attention.key_length': 64},
      'value_length=128 is not the width',
    ),
    (
      'gemma4',
      _ALL_SHARED,
      'num_kv_shared_layers=4 must',
    ),
  ],
)
def test_keys_that_say_something_else(name, keys, message, path):
  _write(path, name, keys=keys)
  with pytest.raises(ValueError, match=f'^{path}: .*{message}'):
    hub.locate(path).config  # noqa: B018


def test_so_many_pairs_are_rotated_as_a_file_says():
  for whole in range(1, 129):
    for count in range(1, whole + 1):
      part = gguf_rope.part_of(count, whole)
      assert int(part * whole) == int(part * 2 * whole // 2) == count
      assert part == pytest.approx(count / whole)


def test_a_file_of_any_name(path):
  """Such as those that Ollama keeps; the folder of a model is none of them."""
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


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    *(('llama', Kind.Q4_K), ('gpt2', Kind.Q8_0)),
    *(('llama, mixture', Kind.Q5_0), *_FAMILIES),
  ],
)
def test_matrices_stay_as_they_are_stored(name, kind, path, caplog):
  """But one that is in no blocks, and positions and routers."""

  def change(tensors):
    key = 'blk.0.attn_output.weight'
    exact = gguf.dequantize(*tensors[key])
    return tensors | {key: (exact.astype(np.float16), Kind.F16)}

  _write(path, name, kind, change=change)
  found = hub.flat_params(hub.load_module(path, dtype='stored'))[1]
  expected = hub.flat_params(hub.load_module(path))[1]
  floats = set()
  for key, leaf in found.items():
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


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    pytest.param(
      *row, marks=[pytest.mark.long] if row[0][:4] in ('gran', 'mini') else []
    )
    for row in _FAMILIES
  ],
)
def test_logits_as_stored_are_those_of_the_rounded_weights(name, kind, path):
  """Rows are rounded to eight bits, see `families_test.py`."""
  _write(path, name, kind)
  floats = hub.load_module(path)
  logits = lambda dtype: long_logits.logits(
    long_logits.in_floats(hub.load_module(path, dtype=dtype), floats)
  )
  difference = lambda one, other: np.median(np.abs(one - other))
  rounding = difference(logits('int8'), long_logits.logits(floats))
  packed = build.is_available()
  found = long_logits.logits(
    hub.load_module(path, dtype='stored', packed=packed)
  )
  assert 0 < difference(found, logits('stored')) < 3 * rounding


@pytest.mark.long
def test_greedy_text_as_stored_is_that_of_plain_decoding(path):
  _write(path, 'gemma4', Kind.Q4_K)
  load = lambda **options: adapter.as_model(hub.load_module(path, **options))
  target = load(dtype='stored', packed=build.is_available())
  plain, *drafted = [
    specdec.generate(
      *(target, jax.random.key(0), [[1, 2, 3]]),
      max_new_tokens=24,
      drafter=tiny_drafters.simple(kind, load()),
    )
    for kind in ('plain', 'chain', 'tree')
  ]
  assert len({*plain.tokens[0]}) > 1
  for found in drafted:
    assert found.tokens == plain.tokens
    assert found.stats.block_efficiency > 1


def test_a_file_that_is_cut_off_is_noticed_at_every_length(path):
  _write(path, 'qwen2')
  whole = path.read_bytes()
  lengths = np.random.default_rng(0).integers(1, len(whole), size=20)
  for length in (0, 3, 20, 200, *lengths, len(whole) - 1000):
    path.write_bytes(whole[:length])
    with pytest.raises(ValueError, match=f'{path}'):
      hub.load_module(path)


def test_auto_is_what_is_stored_and_native(path, monkeypatch):
  for kind, native, dtype in (
    (Kind.F16, {'float16', 'bfloat16'}, 'float16'),
    (Kind.F16, {'bfloat16'}, 'float32'),
    (Kind.BF16, {'bfloat16'}, 'bfloat16'),
    (Kind.Q8_0, {'float16', 'bfloat16'}, 'bfloat16'),
    *((Kind.Q8_0, {'float16'}, 'float16'), (Kind.Q8_0, set(), 'float32')),
    (Kind.F32, {'float16', 'bfloat16'}, 'float32'),
  ):
    monkeypatch.setattr(dtypes, 'native_dtypes', lambda found=native: found)
    _write(path, 'gpt2', kind)
    stored = hub.locate(path)
    assert checkpoint_lib.resolve_dtype('auto', stored) == dtype
    assert checkpoint_lib.resolve_dtype('int8', stored) == 'int8'
    packed = 'stored' if kind == Kind.Q8_0 else dtype
    assert checkpoint_lib.resolve_dtype('auto', stored, packed=True) == packed


def test_what_is_not_there(path, monkeypatch):
  with pytest.raises(ValueError, match=r'there is no file .*model\.gguf'):
    hub.load_module(path)
  _write(path, 'gpt2')
  with pytest.raises(ValueError, match='is not a hub id'):
    hub.load_module(path, revision='main')
  with pytest.raises(ValueError, match=r'model\.gguf has no tokenizer'):
    pair_lib.load_pair(choice_lib.ModelChoice(str(path), None))
  monkeypatch.setitem(sys.modules, 'gguf', None)
  with pytest.raises(ValueError, match=re.escape("pip install -e '.[gguf]'")):
    hub.load_module(path)
