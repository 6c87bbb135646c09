"""Tiny random checkpoints of Llamas and mixtures, as Hugging Face has them."""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import numpy as safetensors_numpy

VOCAB_SIZE = 40
LENGTH = 12


@dataclasses.dataclass(frozen=True)
class Variant:
  """How a checkpoint differs from the plain one.

  Attributes:
    model_type: of its config.json.
    config: keys of its config.json.
    layers: transformer blocks; few, to be quick.
    dtype: of the stored tensors.
    shards: how many files.
    bare: without the prefix of a model with a head.
  """

  model_type: str
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  layers: int = 1
  dtype: Any = np.float32
  shards: int = 1
  bare: bool = False


def _rope(**values: Any) -> dict[str, Any]:
  # A small base, so that scaling meets fast pairs and slow ones.
  return {'rope_parameters': {'rope_theta': 100.0} | values}


_LLAMA3 = _rope(
  rope_type='llama3',
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=16,
)

LLAMAS = {
  'grouped': Variant('llama', layers=2),
  'multi_head': Variant('llama', {'num_key_value_heads': 4}),
  'multi_query': Variant('llama', {'num_key_value_heads': 1}, layers=2),
  'llama3': Variant('llama', _LLAMA3 | {'head_dim': 16}),
  'linear': Variant('llama', _rope(rope_type='linear', factor=2.0)),
  'yarn': Variant(
    'llama',
    _rope(rope_type='yarn', factor=4.0, original_max_position_embeddings=16)
    | {'head_dim': 16},
  ),
  'yarn_in_full': Variant(
    'qwen2',
    _rope(
      rope_type='yarn',
      factor=4.0,
      original_max_position_embeddings=16,
      beta_fast=2.0,
      beta_slow=0.5,
      attention_factor=1.5,
      truncate=False,
    )
    | {'head_dim': 16},
  ),
  'old_keys': Variant(
    'llama',
    {'rope_theta': 50.0, 'rope_scaling': {'type': 'linear', 'factor': 3.0}},
  ),
  'biases': Variant(
    'llama', {'attention_bias': True, 'mlp_bias': True}, layers=2
  ),
  'tied': Variant('llama', {'tie_word_embeddings': True}),
  'bare': Variant('llama', {'tie_word_embeddings': True}, bare=True, shards=2),
  'epsilon': Variant('llama', {'rms_norm_eps': 0.3}),
  'mistral': Variant('mistral', {'head_dim': 6, 'sliding_window': LENGTH}),
  'qwen2': Variant('qwen2', {'tie_word_embeddings': True}, shards=3, layers=2),
  'qwen3': Variant('qwen3', {'head_dim': 8}, layers=2),
  'qwen3_biases': Variant('qwen3', {'head_dim': 4, 'attention_bias': True}),
  'bfloat16': Variant('llama', dtype=ml_dtypes.bfloat16),
}
MIXTURES = {
  'mixtral': Variant('mixtral', layers=2),
  'one_of_three': Variant(
    'mixtral', {'num_local_experts': 3, 'num_experts_per_tok': 1}
  ),
  'all_of_three': Variant(
    'mixtral', {'num_local_experts': 3, 'num_experts_per_tok': 3}
  ),
  'mixture_multi_query': Variant(
    'mixtral', {'num_key_value_heads': 1, 'head_dim': 8}
  ),
  'mixture_of_windows': Variant('mixtral', {'sliding_window': LENGTH}),
  'mixture_tied': Variant('mixtral', {'tie_word_embeddings': True}),
  'mixture_llama3': Variant('mixtral', _LLAMA3),
  'mixture_sharded': Variant('mixtral', shards=4, layers=2),
  'mixture_float16': Variant('mixtral', dtype=np.float16, shards=2),
  'qwen3_moe': Variant('qwen3_moe', {'head_dim': 8}, layers=2),
  'qwen3_moe_renormalized': Variant(
    'qwen3_moe', {'norm_topk_prob': True, 'attention_bias': True}
  ),
}
VARIANTS = LLAMAS | MIXTURES


def config_of(variant: Variant) -> dict[str, Any]:
  """The keys of its config.json."""
  config = {
    'model_type': variant.model_type,
    'vocab_size': VOCAB_SIZE,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_hidden_layers': variant.layers,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 64,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e4,  # Written out: model types have defaults of their own.
    'tie_word_embeddings': False,
    'bos_token_id': 0,
    'eos_token_id': 0,
  }
  if variant.model_type == 'mixtral':
    config |= {'num_local_experts': 4, 'num_experts_per_tok': 2}
  if variant.model_type == 'qwen3_moe':
    config |= {'num_experts': 4, 'num_experts_per_tok': 2}
    config |= {'moe_intermediate_size': 20, 'norm_topk_prob': False}
  return config | variant.config


def _perceptron(names, width, inner):
  gate, up, down = names
  return {
    f'{gate}.weight': (inner, width),
    f'{up}.weight': (inner, width),
    f'{down}.weight': (width, inner),
  }


def _mlp_shapes(variant, config):
  width, inner = config['hidden_size'], config['intermediate_size']
  parts = ('gate_proj', 'up_proj', 'down_proj')
  if variant in LLAMAS.values():
    shapes = _perceptron((f'mlp.{one}' for one in parts), width, inner)
    if config.get('mlp_bias'):
      shapes |= {
        name.replace('weight', 'bias'): shape[:1]
        for name, shape in shapes.items()
      }
    return shapes
  kind, count = 'mlp', config.get('num_experts')
  if variant.model_type == 'mixtral':
    kind, count = 'block_sparse_moe', config['num_local_experts']
    parts = ('w1', 'w3', 'w2')
  else:
    inner = config['moe_intermediate_size']
  shapes = {f'{kind}.gate.weight': (count, width)}
  for expert in range(count):
    names = (f'{kind}.experts.{expert}.{one}' for one in parts)
    shapes |= _perceptron(names, width, inner)
  return shapes


def _layer_shapes(variant, config):
  width, heads = config['hidden_size'], config['num_attention_heads']
  head_width = config.get('head_dim') or width // heads
  query = heads * head_width
  shared = config['num_key_value_heads'] * head_width
  shapes = {
    'input_layernorm.weight': (width,),
    'post_attention_layernorm.weight': (width,),
    'self_attn.q_proj.weight': (query, width),
    'self_attn.k_proj.weight': (shared, width),
    'self_attn.v_proj.weight': (shared, width),
    'self_attn.o_proj.weight': (width, query),
  }
  if variant.model_type == 'qwen2' or config.get('attention_bias'):
    shapes |= {
      'self_attn.q_proj.bias': (query,),
      'self_attn.k_proj.bias': (shared,),
      'self_attn.v_proj.bias': (shared,),
    }
  if config.get('attention_bias'):
    shapes['self_attn.o_proj.bias'] = (width,)
  if variant.model_type.startswith('qwen3'):
    shapes |= {
      'self_attn.q_norm.weight': (head_width,),
      'self_attn.k_norm.weight': (head_width,),
    }
  return shapes | _mlp_shapes(variant, config)


def tensors_of(variant: Variant, seed: int) -> dict[str, np.ndarray]:
  """Random, and every one matters for the logits."""
  rng = np.random.default_rng(seed)
  config = config_of(variant)
  prefix = '' if variant.bare else 'model.'
  embedding = (VOCAB_SIZE, config['hidden_size'])
  shapes = {f'{prefix}embed_tokens.weight': embedding}
  shapes[f'{prefix}norm.weight'] = embedding[1:]
  if not config['tie_word_embeddings']:
    shapes['lm_head.weight'] = embedding
  for layer in range(config['num_hidden_layers']):
    shapes |= {
      f'{prefix}layers.{layer}.{name}': shape
      for name, shape in _layer_shapes(variant, config).items()
    }
  return {
    name: (0.3 * rng.standard_normal(shape) + ('norm' in name)).astype(
      variant.dtype
    )
    for name, shape in shapes.items()
  }


def write(variant: Variant, folder: pathlib.Path, seed: int = 0) -> None:
  """Writes a checkpoint."""
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(config_of(variant)))
  tensors = tensors_of(variant, seed)
  if variant.shards == 1:
    safetensors_numpy.save_file(
      tensors, folder / 'model.safetensors', metadata={'format': 'pt'}
    )
    return
  files = {
    name: f'model-{index % variant.shards:05d}.safetensors'
    for index, name in enumerate(tensors)
  }
  for file in set(files.values()):
    safetensors_numpy.save_file(
      {name: tensors[name] for name in tensors if files[name] == file},
      folder / file,
      metadata={'format': 'pt'},
    )
  index = json.dumps({'metadata': {}, 'weight_map': files})
  (folder / 'model.safetensors.index.json').write_text(index)


def tokens(seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(VOCAB_SIZE, size=(2, LENGTH))
