"""GPT-2, Llama and the models that differ from a Llama in single fields."""

import math
import re
from typing import Any

import transformers

from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.text import text_files

_Keys = model_type.Keys
_POST_NORM = {
  'pre_norm': False,
  'post_norm': True,
  'qk_norm': True,
  'joint_qk_norm': True,
}
# The four `Conv1D` matrices of each block of a GPT-2 are stored `[in, out]`.
_CONV1D = re.compile(r'h\.\d+\.(attn|mlp)\.\w+\.weight')
# The multipliers of a MiniCPM (arXiv 2404.06395), which computes as a Granite.
_MINICPM = ('scale_emb', 'scale_depth', 'dim_model_base')

_GPT2_FILES = model_type.Architecture(
  'gpt2',
  keys={
    'context_length': 'n_positions',
    'embedding_length': 'n_embd',
    'block_count': 'n_layer',
    'attention.head_count': 'n_head',
    'feed_forward_length': 'n_inner',
    'attention.layer_norm_epsilon': 'layer_norm_epsilon',
  },
  names={
    'token_embd': 'wte',
    'position_embd': 'wpe',
    'output_norm': 'ln_f',
    'output': 'lm_head',
    'attn_norm': 'ln_1',
    'attn_qkv': 'attn.c_attn',
    'attn_output': 'attn.c_proj',
    'ffn_norm': 'ln_2',
    'ffn_up': 'mlp.c_fc',
    'ffn_down': 'mlp.c_proj',
  },
  layers='h',
)


def _as_granite(raw: _Keys) -> dict[str, Any]:
  """The keys of the Granite that computes the same as a MiniCPM."""
  text_files.check_types(raw, dict.fromkeys(_MINICPM, float))
  for key in _MINICPM:
    if not raw.get(key, 0) > 0:
      raise ValueError(f'{key}={raw.get(key)!r}: a MiniCPM needs one above 0')
  width = raw['hidden_size']
  head_width = raw.get('head_dim') or width // raw['num_attention_heads']
  keys = {key: raw[key] for key in raw if key not in _MINICPM}
  keys['embedding_multiplier'] = raw['scale_emb']
  keys['residual_multiplier'] = (
    raw['scale_depth'] / raw['num_hidden_layers'] ** 0.5
  )
  keys['logits_scaling'] = width / raw['dim_model_base']
  keys['attention_multiplier'] = 1 / math.sqrt(head_width)
  return {'tie_word_embeddings': True} | keys


def _llama_windows(keys: _Keys, _: _Keys) -> dict[str, Any]:
  """A Llama with windows is a Mistral, or a Ministral if layers differ."""
  types = {*keys.get('layer_types', ())}
  if not types or keys['model_type'] != 'llama':
    return {}
  every = types == {model_type.SLIDING}
  return {'model_type': 'mistral' if every else 'ministral'}


def _mistral_growth(keys: _Keys, _: _Keys) -> dict[str, Any]:
  """Without growth of the queries it is a Mistral, such as Mistral Small 3."""
  grows = 'llama_4_scaling_beta' in keys['rope_parameters']
  return {} if grows else {'model_type': 'mistral'}


def granite_rotation(keys: _Keys, metadata: _Keys) -> dict[str, Any]:
  """A Granite that has experts or rotates nothing is a Granite 4."""
  rotates = metadata.get('rope.scaling.finetuned', True)
  if rotates and keys['model_type'] == 'granite':
    return {}
  num_experts = keys.get('num_experts', 0)
  size = 0 if num_experts else keys['intermediate_size']
  return {
    'model_type': 'granitemoehybrid',
    'num_experts': None,
    'num_local_experts': num_experts,
    'shared_intermediate_size': keys.get('shared_intermediate_size', size),
    'layer_types': ['attention'] * keys['num_hidden_layers'],
    'position_embedding_type': 'rope' if rotates else None,
  }


ROWS = (
  model_type.ModelType(
    'gpt2',
    transformers.GPT2Config,
    shape=nn_gpt2.GPT2Config,
    module=nn_gpt2.GPT2,
    keys={
      'num_positions': 'n_positions',
      'width': 'n_embd',
      'num_layers': 'n_layer',
      'num_heads': 'n_head',
      'inner_width': 'n_inner',
      'activation': 'activation_function',
      'norm_epsilon': 'layer_norm_epsilon',
      'scale_attention': 'scale_attn_weights',
      'scale_attention_by_layer': 'scale_attn_by_inverse_layer_idx',
    },
    stays_float=lambda name: name == 'wpe.weight',
    is_transposed=lambda name: _CONV1D.fullmatch(name) is not None,
    gguf=_GPT2_FILES,
  ),
  model_type.ModelType(
    'llama',
    transformers.LlamaConfig,
    gguf=model_type.Architecture(
      'llama',
      experts='mixtral',
      swaps_rows=True,
      pattern=0,
      finish=_llama_windows,
    ),
  ),
  model_type.ModelType('mistral', transformers.MistralConfig),
  model_type.ModelType('ministral', transformers.MinistralConfig),
  model_type.ModelType(
    'ministral3',
    transformers.Ministral3Config,
    whole='mistral3',
    ropes='growing',
    gguf=model_type.Architecture(
      'mistral3', swaps_rows=True, pattern=0, finish=_mistral_growth
    ),
  ),
  model_type.ModelType(
    'qwen2',
    transformers.Qwen2Config,
    fixed={'qkv_bias': True},
    idle=('attention_bias', 'qkv_bias'),
    gguf=model_type.Architecture('qwen2'),
  ),
  model_type.ModelType(
    'mimo',
    transformers.Qwen2Config,
    fixed={'qkv_bias': True},
    idle=('attention_bias', 'qkv_bias'),
  ),
  model_type.ModelType(
    'qwen3',
    transformers.Qwen3Config,
    fixed={'qk_norm': True},
    gguf=model_type.Architecture('qwen3'),
  ),
  model_type.ModelType(
    'phi3',
    transformers.Phi3Config,
    is_partial=True,
    gguf=model_type.Architecture(
      'phi3',
      names=model_type.NAMES
      | {'attn_qkv': 'self_attn.qkv_proj', 'ffn_up': 'mlp.gate_up_proj'},
      pattern=0,
    ),
  ),
  model_type.ModelType(
    'olmo2',
    transformers.Olmo2Config,
    fixed=_POST_NORM,
    gguf=model_type.Architecture(
      'olmo2', windowed='olmo3', names=model_type.POST_NORM_NAMES
    ),
  ),
  model_type.ModelType(
    'olmo3', transformers.Olmo3Config, fixed=_POST_NORM, ropes='kinds'
  ),
  model_type.ModelType(
    'granite',
    transformers.GraniteConfig,
    gguf=model_type.Architecture(
      'granite',
      keys=model_type.GRANITE_KEYS,
      swaps_rows=True,
      finish=granite_rotation,
    ),
  ),
  model_type.ModelType(
    'minicpm',
    transformers.GraniteConfig,
    translate=_as_granite,
    # llama.cpp takes missing factors of one of its models.
    gguf=model_type.Architecture(
      'minicpm',
      keys=model_type.MULTIPLIER_KEYS,
      needed=model_type.MULTIPLIER_KEYS.keys() - model_type.KEYS.keys(),
      swaps_rows=True,
      fixed={'model_type': 'granite'},
    ),
  ),
  model_type.ModelType(
    'smollm3',
    transformers.SmolLM3Config,
    gguf=model_type.Architecture('smollm3', swaps_rows=True),
  ),
)
