"""Sizes of a model for the cost model, from its config."""

from models.lab import cost_model
from models.nn import adapter


def model_shape(config: adapter.Config, *, name: str) -> cost_model.ModelShape:
  """The sizes of a model with 16-bit weights and caches, named in tables."""
  return cost_model.ModelShape(
    name=name,
    num_layers=config.num_layers,
    width=config.width,
    num_heads=config.num_heads,
    num_kv_heads=config.num_kv_heads,
    head_width=config.head_width,
    mlp_width=config.inner_width or 4 * config.width,
    vocab_size=config.vocab_size,
    gated=config.gated,
    tied=config.tie_embeddings,
    num_experts=config.num_experts,
    experts_per_token=config.experts_per_token,
  )
