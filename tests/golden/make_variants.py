"""Makes tests/golden/variants.*: what transformers says of many models.

The JSON file has the config.json of each variant, and the names and shapes of
the tensors that transformers stores; the NumPy file has the float32 logits that
it computes. Weights are in neither: `variants.py` draws them by name.

  PYTHONPATH=tests python tests/golden/make_variants.py

Made with torch 2.13.0+cpu and transformers 5.24.0.
"""

import json
import pathlib
import tempfile
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
import variants

_PLAIN = {
  'vocab_size': variants.VOCAB_SIZE,
  **{'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 1},
  **{'num_attention_heads': 4, 'num_key_value_heads': 2},
  **{'max_position_embeddings': 64, 'rms_norm_eps': 1e-6},
  'rope_theta': 1e4,  # Written out: model types have defaults of their own.
  **{'tie_word_embeddings': False, 'bos_token_id': 0, 'eos_token_id': 0},
}
_GPT2 = {
  'vocab_size': variants.VOCAB_SIZE,
  **{'n_positions': 64, 'n_embd': 16, 'n_layer': 1, 'n_head': 2, 'n_inner': 24},
  **{'bos_token_id': 0, 'eos_token_id': 0},
}
_OF_TYPE = {
  'mixtral': {'num_local_experts': 4, 'num_experts_per_tok': 2},
  'qwen3_moe': {
    **{'num_experts': 4, 'num_experts_per_tok': 2},
    **{'moe_intermediate_size': 20, 'norm_topk_prob': False},
  },
  'qwen2_moe': {
    **{'num_experts': 4, 'num_experts_per_tok': 2},
    **{'moe_intermediate_size': 20, 'shared_expert_intermediate_size': 12},
  },
  'phi3': {'pad_token_id': 0},
  'smollm3': {'pad_token_id': 0},
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
  # A small base, so that scaling meets fast pairs and slow ones.
  values = {'rope_theta': 100.0, 'rope_type': kind} | values
  if kind != 'linear':
    values['original_max_position_embeddings'] = 16
  return {'rope_theta': values['rope_theta'], 'rope_parameters': values}


_LLAMA3 = _rope('llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_DEEP = {'num_hidden_layers': 2}
_TIED = {'tie_word_embeddings': True}
_UNTIED = {'tie_word_embeddings': False}
_UNSCALED = {'scale_attn_weights': False}
_TWO_LAYERS = {'n_layer': 2}
_BY_LAYER = {'scale_attn_by_inverse_layer_idx': True} | _TWO_LAYERS
_ENDS = {'beta_fast': 2.0, 'beta_slow': 0.5, 'attention_factor': 1.5}
_IN_FULL = _rope('yarn', factor=4.0, truncate=False, **_ENDS)
_OLD = {'type': 'linear', 'factor': 3.0}
_WINDOW = {'sliding_window': 5}  # Below the length of the texts.
_LONG_WINDOW = {'sliding_window': 11, 'max_position_embeddings': 12}
_SLIDING, _FULL = 'sliding_attention', 'full_attention'
_WINDOWS = _WINDOW | _DEEP | {'use_sliding_window': True}
_FIRST = _WINDOWS | {'layer_types': [_SLIDING, _FULL]}  # As in gpt-oss.
_CAPS = {'attn_logit_softcapping': 2.0, 'final_logit_softcapping': 3.0}
_GEMMA = {'head_dim': 8, 'query_pre_attn_scalar': 12, 'pad_token_id': 0}
_GEMMA |= _TIED | _WINDOW | _DEEP
_MULTIPLIERS = {'embedding_multiplier': 3.0, 'logits_scaling': 0.5}
_MULTIPLIERS |= {'residual_multiplier': 0.7, 'attention_multiplier': 0.4}
_LFM2 = {'rms_norm_eps': None, 'norm_eps': 1e-5, 'num_hidden_layers': 4}
_LFM2 |= {'layer_types': ['conv', _FULL, 'conv', 'conv'], 'pad_token_id': 0}
_AUTO = {'block_multiple_of': 8, 'block_ffn_dim_multiplier': 1.6}
_OLD_LFM2 = {'layer_types': None, 'full_attn_idxs': [0, 2], 'block_ff_dim': 40}
_OLD_LFM2 |= {'conv_L_cache': 5, 'conv_bias': True, 'intermediate_size': 40}
_DELTA = {'num_hidden_layers': 3, 'linear_num_key_heads': 2, 'head_dim': 8}
_DELTA |= {'linear_num_value_heads': 2, 'linear_key_head_dim': 8}
_DELTA |= {'linear_value_head_dim': 8, 'full_attention_interval': 2}
_SHARED = {'linear_num_value_heads': 6, 'linear_key_head_dim': 16}
_SHARED |= {'linear_value_head_dim': 20, 'linear_conv_kernel_dim': 5}
_SHARED |= {'attention_bias': True, 'partial_rotary_factor': 0.5}
_LONG = {'length': 40}  # So that states and chunks matter.
_of_three = lambda chosen: {
  **{'num_local_experts': 3, 'num_experts_per_tok': chosen},
}

# The model_type of each variant, how its config.json differs from the plain
# one, and how its files do.
MODELS: dict[str, tuple[str, dict[str, Any]] | tuple[str, dict, dict]] = {
  'grouped': ('llama', _DEEP),
  'multi_head': ('llama', {'num_key_value_heads': 4}),
  'multi_query': ('llama', {'num_key_value_heads': 1} | _DEEP),
  'llama3': ('llama', _LLAMA3 | {'head_dim': 16}),
  'linear': ('llama', _rope('linear', factor=2.0)),
  'yarn': ('llama', _rope('yarn', factor=4.0) | {'head_dim': 16}),
  'yarn_in_full': ('qwen2', _IN_FULL | {'head_dim': 16}),
  'old_keys': ('llama', {'rope_theta': 50.0, 'rope_scaling': _OLD}),
  'biases': ('llama', {'attention_bias': True, 'mlp_bias': True}),
  'tied': ('llama', _TIED),
  'bare': ('llama', _TIED, {'bare': True, 'shards': 2}),
  'epsilon': ('llama', {'rms_norm_eps': 0.3}),
  'mistral': ('mistral', {'head_dim': 6} | _WINDOW),
  'qwen2': ('qwen2', _TIED, {'shards': 3}),
  'qwen3': ('qwen3', {'head_dim': 8} | _DEEP),
  'qwen2_windows': ('qwen2', _WINDOWS | {'max_window_layers': 1}),
  'qwen3_windows': ('qwen3', _FIRST | {'head_dim': 8}),
  'ministral': ('ministral', _FIRST | {'head_dim': 6}),
  'phi3': ('phi3', _WINDOW | {'partial_rotary_factor': 0.6}),
  'olmo2': ('olmo2', {}),
  'olmo3': (
    'olmo3',
    _FIRST | {'head_dim': 16, 'rope_scaling': _OLD | {'rope_type': 'linear'}},
  ),
  'granite': ('granite', _MULTIPLIERS),
  'smollm3': ('smollm3', _DEEP | {'no_rope_layers': [1, 0]}),
  'gemma': ('gemma', _TIED | {'head_dim': 6, 'pad_token_id': 0}),
  'gemma2': ('gemma2', _GEMMA | _CAPS),
  'gemma3': (
    'gemma3_text',
    _GEMMA
    | {'rope_local_base_freq': 50.0, 'sliding_window_pattern': 2}
    | {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}},
  ),
  'lfm2': ('lfm2', _LFM2 | _TIED | {'block_auto_adjust_ff_dim': False}, _LONG),
  'lfm2_old_keys': ('lfm2', _LFM2 | _OLD_LFM2 | _AUTO, _LONG),
  'lfm2_of_one': ('lfm2', _LFM2 | _TIED | {'conv_L_cache': 1} | _AUTO, _LONG),
  'qwen3_5': ('qwen3_5_text', _DELTA, _LONG),
  'qwen3_5_shared_keys': ('qwen3_5_text', _DELTA | _SHARED | _TIED, _LONG),
  'qwen3_biases': ('qwen3', {'head_dim': 4, 'attention_bias': True}),
  'bfloat16': ('llama', {}, {'dtype': 'bfloat16'}),
  **{'mixtral': ('mixtral', _DEEP), 'one_of_three': ('mixtral', _of_three(1))},
  'all_of_three': ('mixtral', _of_three(3)),
  'mixture_multi_query': ('mixtral', {'num_key_value_heads': 1, 'head_dim': 8}),
  'mixture_of_windows': ('mixtral', _LONG_WINDOW),
  'mixture_tied': ('mixtral', _TIED),
  'mixture_llama3': ('mixtral', _LLAMA3),
  'mixture_sharded': ('mixtral', {}, {'shards': 4}),
  'mixture_float16': ('mixtral', {}, {'dtype': 'float16', 'shards': 2}),
  'qwen3_moe': ('qwen3_moe', {'head_dim': 8}),
  'qwen2_moe': ('qwen2_moe', {}),
  'qwen3_moe_renormalized': (
    'qwen3_moe',
    {'norm_topk_prob': True, 'attention_bias': True, 'head_dim': 4},
  ),
  **{'gpt2': ('gpt2', _TWO_LAYERS), 'gpt2_untied': ('gpt2', _UNTIED)},
  'gpt2_default_inner': ('gpt2', {'n_inner': None}),
  'gpt2_scaled_by_layer': ('gpt2', _BY_LAYER),
  'gpt2_unscaled': ('gpt2', _UNSCALED),
  'gpt2_unscaled_but_by_layer': ('gpt2', _UNSCALED | _BY_LAYER),
  'gpt2_reordered': ('gpt2', {'reorder_and_upcast_attn': True} | _BY_LAYER),
  'gpt2_epsilon': ('gpt2', {'layer_norm_epsilon': 0.1}),
  'gpt2_short_context': ('gpt2', {'n_positions': 3}),
  'gpt2_bare': ('gpt2', {}, {'bare': True}),
  'gpt2_buffers': ('gpt2', {}, {'buffers': True}),
  'gpt2_untied_buffers': ('gpt2', _UNTIED, {'buffers': True}),
  'gpt2_float16': ('gpt2', {}, {'dtype': 'float16'}),
  'gpt2_bfloat16': ('gpt2', {}, {'dtype': 'bfloat16'}),
  'gpt2_sharded': ('gpt2', {}, {'shards': 5}),
  'gpt2_sharded_float16': ('gpt2', {}, {'dtype': 'float16', 'shards': 4}),
} | {
  f'gpt2_{name}': ('gpt2', {'activation_function': name})
  for name in (
    *('gelu', 'gelu_accurate', 'gelu_fast', 'gelu_python', 'gelu_python_tanh'),
    *('gelu_pytorch_tanh', 'leaky_relu', 'linear', 'mish', 'quick_gelu'),
    *('relu', 'relu2', 'relu6', 'sigmoid', 'silu', 'swish', 'tanh'),
  )
}


def _load(folder: pathlib.Path):
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  ).eval()


def reference_logits(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
  """The logits of transformers in float32 from the stored weights."""
  with torch.no_grad():
    return _load(folder)(torch.from_numpy(tokens)).logits.numpy()


def _chosen_experts(folder: pathlib.Path, count: int) -> np.ndarray:
  """The experts with the largest router logits, by layer, row and token."""
  tokens = torch.from_numpy(variants.tokens('mixtral'))
  with torch.no_grad():
    layers = _load(folder)(tokens, output_router_logits=True).router_logits
  best = [layer.topk(count).indices.sort().values for layer in layers]
  return torch.stack(best).view(len(best), *tokens.shape, count).numpy()


def _describe(kind, changes, files=None) -> variants.Variant:
  plain = _GPT2 if kind == 'gpt2' else _PLAIN
  config = {'model_type': kind} | plain | _OF_TYPE.get(kind, {}) | changes
  return describe(config, **(files or {}))


def describe(config: dict[str, Any], **files: Any) -> variants.Variant:
  """A config, and the tensors that transformers stores of it."""
  kind = config['model_type']
  # It changes objects within.
  made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
  with tempfile.TemporaryDirectory() as folder:
    model = transformers.AutoModelForCausalLM.from_config(made)
    model.save_pretrained(folder)
    stored = safetensors.torch.load_file(f'{folder}/model.safetensors')
    if kind == 'gpt2':  # With all the keys that transformers writes.
      config = json.loads(pathlib.Path(folder, 'config.json').read_text())
  prefix = 'transformer.' if kind == 'gpt2' else 'model.'
  prefix = prefix if files.pop('bare', False) else ''
  shapes = {
    name.removeprefix(prefix): list(array.shape)
    for name, array in stored.items()
  }
  return {'config': config, 'tensors': shapes} | files


def main() -> None:
  described = {name: _describe(*row) for name, row in MODELS.items()}
  results = {}
  for name, variant in described.items():
    with tempfile.TemporaryDirectory() as parent:
      folder = variants.write(variant, pathlib.Path(parent) / name)
      logits = reference_logits(folder, variants.tokens(variant))
      first, second = np.sort(logits)[..., [-1, -2]].reshape(-1, 2).T
      # Rounding must not decide, and the text must not be trivial.
      assert np.min(first - second) > 2e-4, name
      assert len(np.unique(logits.argmax(-1))) > 3, name
      results[name] = logits
      if name == 'mixtral':
        results['chosen_experts'] = _chosen_experts(folder, 2).astype(np.int8)
  np.savez(variants.RESULTS, **results)
  lines = [f'{json.dumps(n)}: {json.dumps(v)}' for n, v in described.items()]
  variants.DESCRIBED.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


if __name__ == '__main__':
  main()
