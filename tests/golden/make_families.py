"""Makes tests/golden/families.*: random shapes of families, by transformers.

For each family there are twelve shapes. The JSON file has configs, and names
and shapes of tensors, as `variants.json` has them; the NumPy file has the
logits of some tokens at every position.

  PYTHONPATH=tests:tests/golden python tests/golden/make_families.py

Made with torch 2.13.0+cpu and transformers 5.24.0.
"""

from collections.abc import Callable
import json
import pathlib
import random
import tempfile
from typing import Any

import make_variants
import numpy as np
import variants

Config = dict[str, Any]


def _plain(rng: random.Random) -> Config:
  return {
    'vocab_size': variants.VOCAB_SIZE,
    'hidden_size': rng.choice([16, 24]),
    'intermediate_size': rng.choice([20, 24]),
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': rng.choice([1, 2, 4]),
    'max_position_embeddings': 64,
    'rms_norm_eps': 1e-6,
    'tie_word_embeddings': rng.random() < 0.5,
    **dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id'), 0),
  }


def _rope(rng: random.Random) -> Config:
  kind = rng.choice(['default', 'linear', 'yarn', 'llama3'])
  rope: Config = {'rope_type': kind, 'rope_theta': rng.choice([100.0, 1e4])}
  if kind != 'default':
    rope['factor'] = 4.0
  if kind in ('yarn', 'llama3'):
    rope['original_max_position_embeddings'] = 16
  if kind == 'llama3':
    rope |= {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
  return rope


def _longrope(rng: random.Random, pairs: int) -> Config:
  draw = lambda low, high: [
    round(rng.uniform(low, high), 3) for _ in range(pairs)
  ]
  short, long = draw(1, 2), draw(2, 9)
  return {'type': 'longrope', 'short_factor': short, 'long_factor': long}


def _granite(rng: random.Random) -> Config:
  return {
    'model_type': 'granitemoehybrid',
    'layer_types': ['attention'] * 2,
    'shared_intermediate_size': rng.choice([12, 20]),
    'num_local_experts': rng.choice([0, 3]),
    'num_experts_per_tok': 2,
    'position_embedding_type': rng.choice(['rope', 'rope', 'nope']),
    'embedding_multiplier': rng.choice([1.0, 3.0]),
    'attention_multiplier': rng.choice([0.25, 0.4]),
    'residual_multiplier': rng.choice([1.0, 0.7]),
    'logits_scaling': rng.choice([0.5, 2.0]),
    'attention_bias': rng.random() < 0.3,
    'head_dim': rng.choice([4, 6, 10]),
    'rope_parameters': _rope(rng),
    **{'mamba_n_heads': 4, 'mamba_expand': 2},
  }


def _ministral3(rng: random.Random) -> Config:
  rope = {
    **{'rope_type': 'yarn', 'rope_theta': rng.choice([100.0, 1e6])},
    **{'factor': rng.choice([2.0, 16.0]), 'beta_fast': 32.0, 'beta_slow': 1.0},
    'original_max_position_embeddings': rng.choice([4, 16]),
    'llama_4_scaling_beta': rng.choice([0.1, 0.5]),
  }
  if scale := rng.choice([1.0, 0.7, None]):
    rope |= {'mscale': 1.0, 'mscale_all_dim': scale}
  return {
    'model_type': 'ministral3',
    'head_dim': rng.choice([6, 8, 10, 16]),
    'sliding_window': rng.choice([None, 5, 64]),
    'rope_parameters': rope,
  }


def _phi4_mini(rng: random.Random) -> Config:
  pairs = rng.choice([1, 2])
  return {
    'model_type': 'phi3',
    **{'hidden_size': 16, 'partial_rotary_factor': pairs / 2},
    'max_position_embeddings': rng.choice([64, 128, 512]),
    'original_max_position_embeddings': rng.choice([40, 48]),
    **{'rope_theta': 100.0, 'rope_scaling': _longrope(rng, pairs)},
    'sliding_window': rng.choice([None, 7, 4096]),
  }


def _minicpm(rng: random.Random) -> Config:
  """As the Granite that computes the same; see `_as_minicpm`."""
  original = {'original_max_position_embeddings': rng.choice([40, 64])}
  scaled = rng.random() < 0.7
  return {
    'model_type': 'granite',
    'hidden_size': 16,
    'embedding_multiplier': rng.choice([1.0, 12.0]),
    'residual_multiplier': rng.choice([1.0, 1.4]) / 2**0.5,
    'logits_scaling': rng.choice([1.0, 2.0]),
    'attention_multiplier': 0.5,
    'rope_theta': 100.0,
    'rope_scaling': _longrope(rng, 2) | original if scaled else None,
  }


def _as_minicpm(config: Config) -> Config:
  """The keys of the code that MiniCPM's folders have, not of transformers."""
  config = dict(config) | {'model_type': 'minicpm', 'mup_denominator': 32}
  config['scale_emb'] = config.pop('embedding_multiplier')
  config['scale_depth'] = config.pop('residual_multiplier') * 2**0.5
  config['dim_model_base'] = 16 / config.pop('logits_scaling')
  del config['attention_multiplier']
  return config


def _gpt_oss(rng: random.Random) -> Config:
  yarn = {'rope_type': 'yarn', 'factor': 32.0, 'truncate': False}
  yarn |= {'rope_theta': 1.5e5, 'original_max_position_embeddings': 16}
  config = {
    'model_type': 'gpt_oss',
    'head_dim': rng.choice([6, 8, 10, 16]),
    'num_local_experts': rng.choice([2, 4]),
    'num_experts_per_tok': 2,
    'sliding_window': rng.choice([5, 9, 128]),
    'attention_bias': rng.random() < 0.7,
    'rope_parameters': rng.choice([yarn, _rope(rng)]),
  }
  if rng.random() < 0.5:
    kinds = ['sliding_attention', 'full_attention']
    config['layer_types'] = rng.sample(kinds, 2)
  return config


def _gemma4(rng: random.Random) -> Config:
  kinds = ['sliding_attention', 'full_attention']
  first = rng.sample(kinds * 2, rng.choice([3, 4]))
  shared = rng.choice([0, 1, 2, 3])
  last = [rng.choice(first) for _ in range(shared)][1:]
  types = [*first, *last, 'full_attention']
  proportional = {'rope_type': 'proportional', 'rope_theta': 1e3}
  proportional['partial_rotary_factor'] = rng.choice([0.25, 0.4, 1.0])
  return {
    'model_type': 'gemma4_text',
    **{'num_hidden_layers': len(types), 'layer_types': types},
    'num_kv_shared_layers': shared,
    'use_double_wide_mlp': rng.random() < 0.5,
    **{'head_dim': rng.choice([6, 8]), 'global_head_dim': rng.choice([8, 14])},
    'sliding_window': rng.choice([5, 9, 32]),
    # With few, a norm may enlarge the rounding of what the gate lets through.
    # transformers fails where layers share and have none.
    'hidden_size_per_layer_input': rng.choice([16, 20] if shared else [0, 16]),
    'vocab_size_per_layer_input': variants.VOCAB_SIZE,
    'final_logit_softcapping': rng.choice([None, 30.0, 5.0]),
    'attention_bias': rng.random() < 0.2,
    'rope_parameters': {
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
      'full_attention': rng.choice([proportional, proportional, _rope(rng)]),
    },
  }


# A function of a random generator, and how large weights are.
FAMILIES: dict[str, tuple[Callable[[random.Random], Config], float]] = {
  'granite4': (_granite, 0.3),
  'ministral3': (_ministral3, 0.3),
  'phi4_mini': (_phi4_mini, 0.3),
  'minicpm': (_minicpm, 0.3),
  'gpt_oss': (_gpt_oss, 0.6),  # So that values are clamped.
  'gemma4': (_gemma4, 0.3),
}


def main() -> None:
  described, results = dict[str, variants.Variant](), {}
  for family, (make, scale) in FAMILIES.items():
    for seed in range(12):
      name, rng = f'{family}_{seed}', random.Random(seed)
      config = _plain(rng) | make(rng)
      variant = make_variants.describe(config) | {'scale': scale}
      with tempfile.TemporaryDirectory() as parent:
        folder = variants.write(variant, pathlib.Path(parent) / name)
        logits = make_variants.reference_logits(folder, variants.LONG[None])
      results[name] = logits[0][:, variants.SOME_WORDS]
      if family == 'minicpm':
        variant['config'] = _as_minicpm(variant['config'])
      described[name] = variant
  np.savez_compressed(variants.FAMILY_RESULTS, **results)
  lines = [f'{json.dumps(n)}: {json.dumps(v)}' for n, v in described.items()]
  variants.FAMILIES_DESCRIBED.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


if __name__ == '__main__':
  main()
