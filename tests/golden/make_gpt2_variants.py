"""Makes tests/golden/gpt2_variants: what transformers says of many GPT-2s.

Each folder is a checkpoint with random weights, plus `reference.npz`: tokens
and the float32 logits that transformers computes from the stored weights.

  python tests/golden/make_gpt2_variants.py

Made with torch 2.13.0+cpu and transformers 5.23.0.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / 'gpt2_variants'

VOCAB_SIZE = 40


@dataclasses.dataclass(frozen=True)
class Variant:
  """How a checkpoint differs from the plain one.

  Attributes:
    config: keys of its config.json.
    dtype: of the stored tensors.
    bare: stored as `GPT2Model`, without head and without prefix.
    buffers: with the causal masks that old versions stored.
    max_shard_size: as in `save_pretrained`.
  """

  config: dict[str, Any] = dataclasses.field(default_factory=dict)
  dtype: torch.dtype = torch.float32
  bare: bool = False
  buffers: bool = False
  max_shard_size: str = '1GB'


def _activation(name: str) -> Variant:
  return Variant({'activation_function': name, 'n_layer': 1})


VARIANTS = {
  'tied': Variant(),
  'untied': Variant({'tie_word_embeddings': False}),
  'default_inner': Variant({'n_inner': None}),
  'scaled_by_layer': Variant({'scale_attn_by_inverse_layer_idx': True}),
  'unscaled': Variant({'scale_attn_weights': False}),
  'unscaled_but_by_layer': Variant(
    {'scale_attn_weights': False, 'scale_attn_by_inverse_layer_idx': True}
  ),
  'reordered': Variant(
    {'reorder_and_upcast_attn': True, 'scale_attn_by_inverse_layer_idx': True}
  ),
  'epsilon': Variant({'layer_norm_epsilon': 0.1}),
  'short_context': Variant({'n_positions': 3}),
  'bare': Variant(bare=True),
  'buffers': Variant(buffers=True),
  'untied_buffers': Variant({'tie_word_embeddings': False}, buffers=True),
  'float16': Variant(dtype=torch.float16),
  'bfloat16': Variant(dtype=torch.bfloat16),
  'sharded': Variant(max_shard_size='6KB'),
  'sharded_float16': Variant(dtype=torch.float16, max_shard_size='4KB'),
} | {
  name: _activation(name)
  for name in ('gelu', 'quick_gelu', 'relu', 'silu', 'tanh')
}

# Compared where torch is installed, without stored references.
MORE_ACTIVATIONS = {
  name: _activation(name)
  for name in (
    *('gelu_accurate', 'gelu_fast', 'gelu_python', 'gelu_python_tanh'),
    *('gelu_pytorch_tanh', 'leaky_relu', 'linear', 'mish', 'relu2', 'relu6'),
    *('sigmoid', 'swish'),
  )
}


def write_checkpoint(
  variant: Variant, folder: pathlib.Path, *, seed: int
) -> None:
  """Writes a checkpoint whose every tensor matters for its logits."""
  torch.manual_seed(seed)
  config = {'n_positions': 8, 'n_embd': 16, 'n_layer': 2, 'n_head': 2}
  config |= {'n_inner': 24} | variant.config
  model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
      vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0, **config
    )
  )
  with torch.no_grad():
    # Wide enough that activations are far from linear; scales are centred on 1.
    for name, parameter in model.named_parameters():
      parameter.normal_(std=0.3)
      if 'ln_' in name and name.endswith('weight'):
        parameter.add_(1.0)
  model.to(variant.dtype)
  stored = model.transformer if variant.bare else model
  stored.save_pretrained(folder, max_shard_size=variant.max_shard_size)
  (folder / 'generation_config.json').unlink(missing_ok=True)
  if variant.buffers:
    _add_buffers(folder / 'model.safetensors', model.config)


def _add_buffers(path: pathlib.Path, config: transformers.GPT2Config) -> None:
  tensors = safetensors.torch.load_file(path)
  context = config.n_positions
  for layer in range(config.n_layer):
    attention = f'transformer.h.{layer}.attn'
    causal = torch.ones(context, context, dtype=torch.uint8).tril()
    tensors[f'{attention}.bias'] = causal.view(1, 1, context, context)
    tensors[f'{attention}.masked_bias'] = torch.tensor(-1e4)
  safetensors.torch.save_file(tensors, path, metadata={'format': 'pt'})


def reference_logits(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
  """What transformers computes in float32 from the stored weights."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  with torch.no_grad():
    return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def main() -> None:
  for seed, (name, variant) in enumerate(VARIANTS.items()):
    folder = FOLDER / name
    write_checkpoint(variant, folder, seed=seed)
    length = variant.config.get('n_positions', 8)
    tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (2, length))
    np.savez(
      folder / 'reference.npz',
      tokens=tokens,
      logits=reference_logits(folder, tokens),
    )


if __name__ == '__main__':
  main()
