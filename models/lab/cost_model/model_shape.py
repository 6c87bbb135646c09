"""Sizes of a model for the cost model, from its config."""

from models.lab.cost_model import ModelShape
from models.nn.adapter import Config
from models.nn.gpt2 import GPT2Config
from models.nn.mixtral import MixtralConfig


def model_shape(config: Config, *, name: str) -> ModelShape:
  """The sizes of a model with 16-bit weights and caches, named in tables."""
  heads, is_gpt2 = config.num_heads, isinstance(config, GPT2Config)
  experts, per_token = 1, 1
  if isinstance(config, MixtralConfig):
    experts, per_token = config.num_experts, config.experts_per_token
  return ModelShape(
    name=name,
    num_layers=config.num_layers,
    width=config.width,
    num_heads=heads,
    num_kv_heads=heads if is_gpt2 else config.num_kv_heads,
    head_width=config.width // heads if is_gpt2 else config.head_width,
    mlp_width=config.inner_width or 4 * config.width,
    vocab_size=config.vocab_size,
    gated=not is_gpt2,
    tied=config.tie_embeddings,
    num_experts=experts,
    experts_per_token=per_token,
  )
