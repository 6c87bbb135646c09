"""Models and machines by name, with where their figures are from.

Weights and caches of the models are in 16 bits, but for the weights of those
published in 8; for others, `dataclasses.replace(MODELS[name], weight_bytes=1)`.
"""

from specdec.cost_model.hardware import Hardware
from specdec.cost_model.shapes import Experts
from specdec.cost_model.shapes import LatentAttention
from specdec.cost_model.shapes import ModelShape


def _gpt2(name: str, width: int, num_layers: int) -> ModelShape:
  # Radford et al. 2019, table 2, and config.json of each model on the Hugging
  # Face hub; 64 columns per head.
  return ModelShape(
    name=name,
    num_layers=num_layers,
    width=width,
    num_heads=width // 64,
    num_kv_heads=width // 64,
    head_width=64,
    mlp_width=4 * width,
    vocab_size=50257,
    gated=False,
    tied=True,
  )


def _llama(
  name: str,
  *,
  num_layers: int,
  width: int,
  num_heads: int,
  mlp_width: int,
  vocab_size: int,
  experts: Experts | None = None,
) -> ModelShape:
  return ModelShape(
    name=name,
    num_layers=num_layers,
    width=width,
    num_heads=num_heads,
    num_kv_heads=8,
    head_width=128,
    mlp_width=mlp_width,
    vocab_size=vocab_size,
    experts=experts,
  )


_MODELS = (
  _gpt2('gpt2', 768, 12),
  _gpt2('gpt2-medium', 1024, 24),
  _gpt2('gpt2-large', 1280, 36),
  _gpt2('gpt2-xl', 1600, 48),
  # The draft of arXiv 2308.04623, of which only the size is published, 40
  # million parameters: a GPT-2 of half the smallest's width has as many.
  _gpt2('draft-40m', 384, 12),
  # Touvron et al. 2023 (arXiv 2307.09288); config.json of Llama-2-70b-hf.
  _llama(
    'llama-2-70b',
    num_layers=80,
    width=8192,
    num_heads=64,
    mlp_width=28672,
    vocab_size=32000,
  ),
  # Llama Team 2024 (arXiv 2407.21783), table 3. The context of 3.1 is 128K.
  _llama(
    'llama-3-8b',
    num_layers=32,
    width=4096,
    num_heads=32,
    mlp_width=14336,
    vocab_size=128256,
  ),
  _llama(
    'llama-3-70b',
    num_layers=80,
    width=8192,
    num_heads=64,
    mlp_width=28672,
    vocab_size=128256,
  ),
  _llama(
    'llama-3-405b',
    num_layers=126,
    width=16384,
    num_heads=128,
    mlp_width=53248,
    vocab_size=128256,
  ),
  # Jiang et al. 2024 (arXiv 2401.04088), table 1.
  _llama(
    'mixtral-8x7b',
    num_layers=32,
    width=4096,
    num_heads=32,
    mlp_width=0,
    vocab_size=32000,
    experts=Experts(count=8, per_token=2, width=14336),
  ),
  # config.json of mistralai/Mixtral-8x22B-v0.1.
  _llama(
    'mixtral-8x22b',
    num_layers=56,
    width=6144,
    num_heads=48,
    mlp_width=0,
    vocab_size=32000,
    experts=Experts(count=8, per_token=2, width=16384),
  ),
  # Qwen Team 2025 (arXiv 2505.09388), table 2; config.json of
  # Qwen/Qwen3-30B-A3B.
  ModelShape(
    name='qwen3-30b-a3b',
    num_layers=48,
    width=2048,
    num_heads=32,
    num_kv_heads=4,
    head_width=128,
    mlp_width=0,
    vocab_size=151936,
    experts=Experts(count=128, per_token=8, width=768),
  ),
  # DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; config.json of
  # deepseek-ai/DeepSeek-V3, whose weights are float8. Without the module that
  # predicts a second token.
  ModelShape(
    name='deepseek-v3',
    num_layers=61,
    width=7168,
    num_heads=128,
    num_kv_heads=128,
    head_width=128,
    mlp_width=18432,
    vocab_size=129280,
    experts=Experts(
      count=256, per_token=8, width=2048, shared=1, dense_layers=3
    ),
    latent=LatentAttention(
      query_rank=1536,
      kv_rank=512,
      rope_width=64,
      nope_width=128,
      value_width=128,
    ),
    weight_bytes=1.0,
    dtype='float8',
  ),
)

MODELS = {one.name: one for one in _MODELS}
"""Shapes by name."""

# Rates of tensor cores, without sparsity, summing in float32.
_HOPPER = {'bfloat16': 989.4e12, 'int8': 1978.9e12, 'float8': 1978.9e12}

_HARDWARE = (
  # NVIDIA Ada GPU architecture, white paper, appendix A.
  Hardware(
    name='rtx-4090',
    bytes_per_second=1.008e12,
    flops_per_second={
      'bfloat16': 165.2e12,
      'float8': 330.3e12,
      'int8': 660.6e12,
      'float32': 82.6e12,
    },
    memory_bytes=24e9,
  ),
  # NVIDIA A100 80GB data sheet, SXM.
  Hardware(
    name='a100',
    bytes_per_second=2.039e12,
    flops_per_second={'bfloat16': 312e12, 'int8': 624e12, 'float32': 19.5e12},
    memory_bytes=80e9,
  ),
  # NVIDIA H100 data sheet, SXM, and Hopper architecture white paper.
  Hardware(
    name='h100',
    bytes_per_second=3.35e12,
    flops_per_second=_HOPPER | {'float32': 66.9e12},
    memory_bytes=80e9,
  ),
  # NVIDIA H200 data sheet, SXM.
  Hardware(
    name='h200',
    bytes_per_second=4.8e12,
    flops_per_second=_HOPPER | {'float32': 66.9e12},
    memory_bytes=141e9,
  ),
  # Google Cloud documentation, "TPU v4" and so on, per chip. Of float32
  # nothing is said there.
  Hardware(
    name='v4',
    bytes_per_second=1.2e12,
    flops_per_second={'bfloat16': 275e12, 'int8': 275e12},
    memory_bytes=32e9,
  ),
  Hardware(
    name='v5e',
    bytes_per_second=819e9,
    flops_per_second={'bfloat16': 197e12, 'int8': 393e12},
    memory_bytes=16e9,
  ),
  Hardware(
    name='v5p',
    bytes_per_second=2.765e12,
    flops_per_second={'bfloat16': 459e12, 'int8': 918e12},
    memory_bytes=95e9,
  ),
  Hardware(
    name='v6e',
    bytes_per_second=1.638e12,
    flops_per_second={'bfloat16': 918e12, 'int8': 1836e12},
    memory_bytes=32e9,
  ),
)

HARDWARE = {one.name: one for one in _HARDWARE}
"""One device of each by name; `Hardware.times` for several."""
