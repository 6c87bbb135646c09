"""Sizes of a decoder-only transformer that determine the cost of a forward.

Only matrices are counted. Norms, biases and learned positions are left out;
they are below 1 % of every preset.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
  """Sizes of a decoder-only transformer, dense or a mixture of experts.

  Attributes:
    name: shown in tables.
    num_layers: number of transformer blocks.
    width: of the residual stream.
    num_heads: number of query heads.
    num_kv_heads: number of key and value heads.
    head_width: of one query, key or value head.
    mlp_width: hidden width of the MLP, or of one expert.
    vocab_size: V.
    gated: whether an MLP has three matrices (SwiGLU) instead of two.
    tied: whether the output head is the token embedding.
    num_experts: E, per layer; 1 for a dense model, which has no router.
    experts_per_token: k, the number of experts of a token.
    weight_bytes: bytes per weight.
    cache_bytes: bytes per element of the KV cache.
    activation_bytes: bytes per element of an activation.
    dtype: of the matrix products, a key of `Hardware.flops_per_second`; float16
      counts as bfloat16.

  Raises:
    ValueError: the numbers of heads or of experts do not fit together.
  """

  name: str
  num_layers: int
  width: int
  num_heads: int
  num_kv_heads: int
  head_width: int
  mlp_width: int
  vocab_size: int
  gated: bool = True
  tied: bool = False
  num_experts: int = 1
  experts_per_token: int = 1
  weight_bytes: float = 2.0
  cache_bytes: float = 2.0
  activation_bytes: float = 2.0
  dtype: str = 'bfloat16'

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} must be a multiple of'
        f' num_kv_heads={self.num_kv_heads}'
      )
    if not 1 <= self.experts_per_token <= self.num_experts:
      raise ValueError(
        f'experts_per_token={self.experts_per_token} must be between 1 and'
        f' num_experts={self.num_experts}'
      )

  @property
  def shared_parameters(self) -> int:
    """Weights that every token is multiplied with, the head included."""
    heads = self.num_heads + self.num_kv_heads
    attention = 2 * self.width * heads * self.head_width
    router = self.width * self.num_experts if self.num_experts > 1 else 0
    in_layers = self.num_layers * (attention + router)
    return in_layers + self.width * self.vocab_size

  @property
  def expert_parameters(self) -> int:
    """Weights of one expert (or of the MLP) of every layer."""
    matrices = 3 if self.gated else 2
    return self.num_layers * matrices * self.width * self.mlp_width

  @property
  def active_parameters(self) -> int:
    """Weights that one token is multiplied with; no embedding table."""
    experts = self.experts_per_token * self.expert_parameters
    return self.shared_parameters + experts

  @property
  def parameters(self) -> int:
    """All weights."""
    embedding = 0 if self.tied else self.vocab_size * self.width
    experts = self.num_experts * self.expert_parameters
    return embedding + self.shared_parameters + experts

  @property
  def activations_per_token(self) -> int:
    """Elements of the inputs and outputs of all products of one token."""
    heads = self.num_heads + self.num_kv_heads
    attention = 4 * self.width + 2 * heads * self.head_width
    router = self.width + self.num_experts if self.num_experts > 1 else 0
    expert = (3 if self.gated else 2) * (self.width + self.mlp_width)
    in_layer = attention + router + self.experts_per_token * expert
    return self.num_layers * in_layer + self.width + self.vocab_size

  @property
  def kv_bytes_per_token(self) -> float:
    """Bytes of keys and values that one token has in the cache."""
    in_layer = 2 * self.num_kv_heads * self.head_width
    return self.num_layers * in_layer * self.cache_bytes

  def expected_experts(self, num_tokens: float) -> float:
    """Expected number of different experts of a layer that n tokens use.

    n, `num_tokens`, is that of all rows and may be a mean. For a router that
    chooses uniformly and independently: E (1 - (1 - k / E)^n), an upper bound,
    because a trained router prefers some experts and chooses alike for
    neighbouring tokens (Mixtral, arXiv 2401.04088, section 5).
    """
    share = self.experts_per_token / self.num_experts
    return self.num_experts * (1 - (1 - share) ** num_tokens)

  def dense_baseline(self) -> 'ModelShape':
    """The dense model with as many active parameters, except for routers."""
    return dataclasses.replace(
      self,
      name=f'dense baseline of {self.name}',
      mlp_width=self.experts_per_token * self.mlp_width,
      num_experts=1,
      experts_per_token=1,
    )
