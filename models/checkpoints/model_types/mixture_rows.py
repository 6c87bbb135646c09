"""Mixtures of experts."""

import dataclasses
import functools
from typing import Any

import transformers

from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.checkpoints.model_types import llama_rows
from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import mixtral as mixtral_lib

_Keys = model_type.Keys
_Mixture = functools.partial(
  model_type.ModelType,
  shape=mixtral_lib.MixtralConfig,
  module=mixtral_lib.Mixtral,
  # A router in eight bits would route tokens to other experts.
  stays_float=lambda name: 'gate.' in name,
)
_QwenMixture = functools.partial(
  _Mixture,
  keys={'inner_width': 'moe_intermediate_size'},
  # Layers without experts are not supported, and have a size of their own.
  constants={'mlp_only_layers': [], 'decoder_sparse_step': 1},
  idle=('intermediate_size',),
)
_GRANITE_4_GIVEN = {
  'mamba_n_heads': 1,
  'mamba_d_head': 'auto',
  'time_step_limit': None,
}
_GRANITE_4: dict[str, Any] = {
  'extra': {'time_step_limit': list | None},
  'idle': (
    *(
      field.name
      for field in dataclasses.fields(transformers.GraniteMoeHybridConfig)
      if field.name.startswith('mamba_')
    ),
    'init_method',
    'normalization_function',
    'num_experts_per_tok',
    'intermediate_size',
  ),
}


def _gpt_oss_spelling(stored: str) -> str | None:
  """The name of a tensor with its stem and leaf.

  The exponents of a matrix in blocks belong to the tensor of its blocks.
  """
  if stored.endswith(tensor_parts.SCALES):
    return None
  name = stored.removesuffix(tensor_parts.BLOCKS)
  path, _, leaf = name.rpartition('.')
  if not path.endswith('.experts'):
    return name
  matrix = leaf.removesuffix('_bias')
  return f'{path}.{matrix}.{"weight" if matrix == leaf else "bias"}'


def _exact_pairs(keys: _Keys, _: _Keys) -> dict[str, Any]:
  """A gpt-oss does not round which pairs it rotates; no file says it."""
  rope = keys['rope_parameters']
  is_yarn = rope.get('rope_type') == 'yarn'
  return {'rope_parameters': rope | {'truncate': False}} if is_yarn else {}


ROWS = (
  _Mixture(
    'mixtral',
    transformers.MixtralConfig,
    names={
      'block_sparse_moe': 'mlp',
      'w1': 'gate_proj',
      'w3': 'up_proj',
      'w2': 'down_proj',
    },
  ),
  _Mixture(
    'gpt_oss',
    transformers.GptOssConfig,
    shape=mixtral_lib.GptOssConfig,
    fixed={'mlp_bias': True, 'sinks': True, 'clamped': True},
    constants={
      'swiglu_limit': 7.0,
      'swiglu_alpha': 1.702,
      'hidden_act': 'silu',
    },
    idle=('initial_context_length',),
    rounded=('mxfp4',),
    names={'mlp.router': 'mlp.gate'},
    spelling=_gpt_oss_spelling,
    interleaved=True,
    is_transposed=lambda name: '.experts.' in name and name.endswith('.weight'),
    gguf=model_type.Architecture(
      'gpt-oss',
      experts='gpt_oss',
      names=model_type.POST_NORM_NAMES
      | {'attn_sinks.weight': 'self_attn.sinks'},
      pattern=2,
      finish=_exact_pairs,
    ),
  ),
  _QwenMixture(
    'qwen3_moe',
    transformers.Qwen3MoeConfig,
    fixed={'qk_norm': True},
    gguf=model_type.Architecture('qwen3moe', experts='qwen3_moe'),
  ),
  _QwenMixture('qwen2_moe', transformers.Qwen2MoeConfig),
  # A Granite 4; its layers of experts are optional.
  model_type.ModelType(
    'granitemoehybrid',
    transformers.GraniteMoeHybridConfig,
    **_GRANITE_4,
    given=_GRANITE_4_GIVEN | {'num_local_experts': 0},
    keys={'inner_width': 'shared_intermediate_size'},
    names={
      'shared_mlp.input_linear': 'mlp.gate_up_proj',
      'shared_mlp.output_linear': 'mlp.down_proj',
    },
    mixture=_Mixture(
      'granitemoehybrid',
      transformers.GraniteMoeHybridConfig,
      **_GRANITE_4,
      given=_GRANITE_4_GIVEN,
      fixed={'shared_gate': False},
      # The matrices of all experts are in one tensor.
      names={
        'block_sparse_moe.router.layer': 'mlp.gate',
        'block_sparse_moe.input_linear': 'mlp.experts.gate_up_proj',
        'block_sparse_moe.output_linear': 'mlp.experts.down_proj',
        'shared_mlp.input_linear': 'mlp.shared_expert.gate_up_proj',
        'shared_mlp.output_linear': 'mlp.shared_expert.down_proj',
      },
    ),
    gguf=model_type.Architecture(
      'granitemoe',
      experts='granitemoehybrid',
      keys=model_type.GRANITE_KEYS
      | {'expert_shared_feed_forward_length': 'shared_intermediate_size'},
      swaps_rows=True,
      finish=llama_rows.granite_rotation,
    ),
  ),
)
