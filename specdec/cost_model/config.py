"""Shapes of checkpoints, from their config.json in Hugging Face format."""

from collections.abc import Mapping
from typing import Any

from specdec.cost_model.shapes import Experts
from specdec.cost_model.shapes import LatentAttention
from specdec.cost_model.shapes import ModelShape

_GATED = ('llama', 'mistral', 'qwen2', 'qwen3', 'mixtral', 'qwen3_moe')
_FAMILIES = ('gpt2', *_GATED, 'deepseek_v3')


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
  """What a config.json says about sizes; 16 bits throughout.

  Args:
    config: its keys and values.
    name: of the shape.

  Raises:
    ValueError: the family is not known, a key is missing, or layers with and
      without experts alternate.
  """
  family = config.get('model_type')
  if family not in _FAMILIES:
    raise ValueError(
      f'{name}: model_type={family!r} is none of {", ".join(_FAMILIES)}'
    )
  try:
    return _gpt2(config, name) if family == 'gpt2' else _gated(config, name)
  except KeyError as error:
    raise ValueError(
      f'{name}: the config of a {family} has no {error}'
    ) from error


def _gpt2(config: Mapping[str, Any], name: str) -> ModelShape:
  width, heads = config['n_embd'], config['n_head']
  return ModelShape(
    name=name,
    num_layers=config['n_layer'],
    width=width,
    num_heads=heads,
    num_kv_heads=heads,
    head_width=width // heads,
    mlp_width=config.get('n_inner') or 4 * width,
    vocab_size=config['vocab_size'],
    gated=False,
    tied=config.get('tie_word_embeddings', True),
  )


def _gated(config: Mapping[str, Any], name: str) -> ModelShape:
  heads, experts = config['num_attention_heads'], _experts(config, name)
  has_mlp = experts is None or experts.dense_layers
  return ModelShape(
    name=name,
    num_layers=config['num_hidden_layers'],
    width=config['hidden_size'],
    num_heads=heads,
    num_kv_heads=config.get('num_key_value_heads') or heads,
    head_width=config.get('head_dim') or config['hidden_size'] // heads,
    mlp_width=config['intermediate_size'] if has_mlp else 0,
    vocab_size=config['vocab_size'],
    tied=config.get('tie_word_embeddings', False),
    experts=experts,
    latent=_latent(config),
  )


def _experts(config: Mapping[str, Any], name: str) -> Experts | None:
  match config['model_type']:
    case 'mixtral':
      return Experts(
        count=config['num_local_experts'],
        per_token=config['num_experts_per_tok'],
        width=config['intermediate_size'],
      )
    case 'qwen3_moe':
      alternates = config.get('decoder_sparse_step', 1) != 1
      if alternates or config.get('mlp_only_layers'):
        raise ValueError(
          f'{name}: decoder_sparse_step and mlp_only_layers are not supported'
        )
      return Experts(
        count=config['num_experts'],
        per_token=config['num_experts_per_tok'],
        width=config['moe_intermediate_size'],
      )
    case 'deepseek_v3':
      return Experts(
        count=config['n_routed_experts'],
        per_token=config['num_experts_per_tok'],
        width=config['moe_intermediate_size'],
        shared=config['n_shared_experts'],
        dense_layers=config['first_k_dense_replace'],
      )
  return None


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
  if config['model_type'] != 'deepseek_v3':
    return None
  return LatentAttention(
    query_rank=config['q_lora_rank'],
    kv_rank=config['kv_lora_rank'],
    rope_width=config['qk_rope_head_dim'],
    nope_width=config['qk_nope_head_dim'],
    value_width=config['v_head_dim'],
  )
