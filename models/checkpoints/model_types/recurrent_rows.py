"""Models whose layers may have a state in place of keys and values."""

from typing import Any

import numpy as np
import transformers

from specdec.models.checkpoints.model_types import gemma_rows
from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import delta as delta_lib
from specdec.models.nn import lfm2 as lfm2_lib

_Keys = model_type.Keys


def _lfm2_layers(config: Any) -> dict[str, Any]:
  """The width of MLPs; ValueError if keys contradict each other."""
  types, stated = config.layer_types, config.full_attn_idxs
  full = [at for at, name in enumerate(types) if name == model_type.FULL]
  if stated is not None and sorted(stated) != full:
    raise ValueError(
      f'full_attn_idxs={stated!r:.60} and layer_types={types!r:.60} contradict'
      ' each other'
    )
  if not config.block_auto_adjust_ff_dim:
    return {}
  width = int(2 * config.intermediate_size / 3)
  factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
  if factor is None:
    return {'inner_width': width}
  if multiple < 1:
    raise ValueError(f'block_multiple_of must be positive, got {multiple}')
  return {'inner_width': -(-int(factor * width) // multiple) * multiple}


def _lfm2_convolutions(keys: _Keys, _: _Keys) -> dict[str, Any]:
  """The layers that have convolutions: the layers without heads."""
  heads = keys['num_key_value_heads']
  if not isinstance(heads, list):
    raise ValueError(
      f'lfm2.{model_type.KV_HEADS} must say for each layer how many heads it'
      f' has, got {heads!r}'
    )
  types = [model_type.FULL if count else 'conv' for count in heads]
  return {'num_key_value_heads': max(heads), 'layer_types': types}


def _delta_values(name: str, rows: np.ndarray) -> np.ndarray:
  """Rates (folders have their logarithms), and the scales of most norms."""
  if name.endswith('linear_attn.rate'):
    return -np.exp(rows.astype(np.float32))
  if name.endswith('linear_attn.norm.weight'):
    return rows
  return gemma_rows.shift_norms(name, rows)


def _delta_width(keys: _Keys, metadata: _Keys) -> dict[str, Any]:
  """The width of a head of values; files have the sum over all heads."""
  heads = max(keys['linear_num_value_heads'], 1)
  return {'linear_value_head_dim': metadata.get('ssm.inner_size', 0) // heads}


ROWS = (
  model_type.ModelType(
    'lfm2',
    transformers.Lfm2Config,
    shape=lfm2_lib.Lfm2Config,
    module=lfm2_lib.Lfm2,
    fixed={'qk_norm': True, 'activation': 'silu'},
    extra={
      'block_ff_dim': int,
      'tie_embedding': bool,
      'block_multiple_of': int,
      'layer_types': list[str] | None,
      'block_auto_adjust_ff_dim': bool,
      'block_ffn_dim_multiplier': float | None,
      'full_attn_idxs': list[int] | None,
    },
    idle=(
      'block_mlp_init_scale',
      'block_out_init_scale',
      'block_use_xavier_init',
      'conv_use_xavier_init',
    ),
    mixers={model_type.FULL: 'self_attn', 'conv': 'conv'},
    read=_lfm2_layers,
    names={
      'operator_norm': 'input_layernorm',
      'ffn_norm': 'post_attention_layernorm',
      'embedding_norm': 'norm',
      'feed_forward': 'mlp',
      'out_proj': 'o_proj',
      'q_layernorm': 'q_norm',
      'k_layernorm': 'k_norm',
      'w1': 'gate_proj',
      'w3': 'up_proj',
      'w2': 'down_proj',
    },
    gguf=model_type.Architecture(
      'lfm2',
      keys=model_type.KEYS
      | {
        'attention.layer_norm_rms_epsilon': 'norm_eps',
        'shortconv.l_cache': 'conv_L_cache',
      },
      names=model_type.NAMES
      | {
        'token_embd_norm': 'norm',
        'shortconv.conv': 'conv.conv',
        'shortconv.in_proj': 'conv.in_proj',
        'shortconv.out_proj': 'conv.o_proj',
      },
      lists={model_type.KV_HEADS},
      fixed={'block_auto_adjust_ff_dim': False},
      finish=_lfm2_convolutions,
    ),
  ),
  model_type.ModelType(
    'qwen3_5_text',
    transformers.Qwen3_5TextConfig,
    shape=delta_lib.DeltaConfig,
    module=delta_lib.Delta,
    whole='qwen3_5',
    whole_is_tied=False,
    fixed={'qk_norm': True},
    # The last one is of GGUF files, which share heads in another order.
    extra={
      'full_attention_interval': int,
      'layer_types': list[str] | None,
      'linear_heads_tiled': bool,
    },
    is_partial=True,
    idle=(
      'mamba_ssm_dtype',
      'mtp_num_hidden_layers',
      'mtp_use_dedicated_embeddings',
    ),
    mixers={model_type.FULL: 'self_attn', 'linear_attention': 'linear_attn'},
    read=lambda config: {'tiled': getattr(config, 'linear_heads_tiled', False)},
    names={
      'linear_attn.out_proj': 'linear_attn.o_proj',
      'linear_attn.A_log': 'linear_attn.rate',
    },
    convert=_delta_values,
    gguf=model_type.Architecture(
      'qwen35',
      keys=model_type.KEYS
      | {
        'full_attention_interval': 'full_attention_interval',
        'ssm.conv_kernel': 'linear_conv_kernel_dim',
        'ssm.state_size': 'linear_key_head_dim',
        'ssm.group_count': 'linear_num_key_heads',
        'ssm.time_step_rank': 'linear_num_value_heads',
      },
      names=model_type.POST_NORM_NAMES
      | {
        'attn_qkv': 'linear_attn.in_proj_qkv',
        'attn_gate': 'linear_attn.in_proj_z',
        'ssm_a': 'linear_attn.rate',
        'ssm_alpha': 'linear_attn.in_proj_a',
        'ssm_beta': 'linear_attn.in_proj_b',
        'ssm_conv1d': 'linear_attn.conv1d',
        'ssm_dt.bias': 'linear_attn.dt_bias',
        'ssm_norm': 'linear_attn.norm',
        'ssm_out': 'linear_attn.o_proj',
      },
      fixed={'linear_heads_tiled': True},
      finish=_delta_width,
    ),
  ),
)
