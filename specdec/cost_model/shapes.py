"""The sizes of a model, as far as the cost of a forward depends on them.

A model is a list of matrices. Their sizes give the parameters and the
operations, their sides the activations; norms, biases and learned positions are
left out (below 1 % of any model here).
"""

from collections.abc import Iterable
import dataclasses
import functools
import math

Matrix = tuple[int, int]
"""Inputs and outputs."""


def num_weights(matrices: Iterable[Matrix]) -> int:
  """Elements of the matrices."""
  return sum(inputs * outputs for inputs, outputs in matrices)


def num_activations(matrices: Iterable[Matrix]) -> int:
  """Inputs and outputs of the matrices."""
  return sum(inputs + outputs for inputs, outputs in matrices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
  """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

  The cache holds one compressed vector per token and layer for all heads, and
  the part of the keys that is rotated.

  Attributes:
    query_rank: width of the compressed query.
    kv_rank: width of the compressed keys and values.
    rope_width: of the rotated part of a key, shared by all heads.
    nope_width: of the other part, per head.
    value_width: per head.
  """

  query_rank: int
  kv_rank: int
  rope_width: int
  nope_width: int
  value_width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """A mixture of experts in place of the MLP.

  Attributes:
    count: E, experts to choose from.
    per_token: k, that a token is routed to.
    width: hidden width of one.
    shared: experts of the same width that every token uses besides.
    dense_layers: layers that have an ordinary MLP instead.
    routing: for every layer with experts, the chance of each expert to be among
      the k of a token, as counted; together k. None: all alike.
    correlation: between two tokens of a row, of whether they use an expert: 0
      if they choose independently, 1 if they all use the same ones.

  Raises:
    ValueError: k is not from 1 to E, or the chances or the correlation are not
      as they should be.
  """

  count: int
  per_token: int
  width: int
  shared: int = 0
  dense_layers: int = 0
  routing: tuple[tuple[float, ...], ...] | None = None
  correlation: float = 0.0

  def __post_init__(self):
    if not 1 <= self.per_token <= self.count:
      raise ValueError(
        f'per_token={self.per_token} must be from 1 to the number of experts,'
        f' {self.count}'
      )
    if not 0 <= self.correlation <= 1:
      raise ValueError(
        f'correlation must be from 0 to 1, got {self.correlation}'
      )
    for layer, chances in enumerate(self.routing or ()):
      is_good = len(chances) == self.count and math.isclose(
        sum(chances), self.per_token, rel_tol=1e-3
      )
      if not is_good or not all(0 <= one <= 1 + 1e-9 for one in chances):
        raise ValueError(
          f'routing of layer {layer} must be {self.count} chances from 0 to 1'
          f' that add up to {self.per_token}, got {chances}'
        )

  def _untouched(self, chance: float, num_tokens: float) -> float:
    """The chance that none of n tokens of a row needs an expert."""
    if chance >= 1:
      return 0.0
    if self.correlation in (0, 1):
      return (1 - chance) ** (num_tokens if self.correlation == 0 else 1)
    # a + b of the beta distribution, and its b.
    size = 1 / self.correlation - 1
    misses = (1 - chance) * size
    return math.exp(
      math.lgamma(misses + num_tokens)
      - math.lgamma(misses)
      - math.lgamma(size + num_tokens)
      + math.lgamma(size)
    )

  def expected_distinct(
    self, num_tokens: float, *, batch_size: float = 1
  ) -> float:
    """How many experts of a layer a forward is expected to need, the mean.

    Independent tokens miss an expert of chance p with (1 - p)^(B L): the
    expectation is the sum of 1 - (1 - p)^(B L). With p = k / E throughout that
    is E (1 - (1 - k / E)^(B L)), the most that any routing needs.

    Tokens of one row choose alike (Mixtral, arXiv 2401.04088, section 5,
    "temporal locality"). With `correlation` r, a row has a chance of its own,
    drawn from the beta distribution of mean p that has it (the beta-binomial
    distribution): L tokens miss the expert with the product over i < L of
    (b + i) / (a + b + i), where a + b = 1 / r - 1 and b = (1 - p) (a + b).

    Args:
      num_tokens: L, of each row; may be a mean.
      batch_size: B.
    """
    uniform = ((self.per_token / self.count,) * self.count,)
    layers = self.routing or uniform
    return sum(
      1.0 - self._untouched(chance, num_tokens) ** batch_size
      for chances in layers
      for chance in chances
    ) / len(layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
  """A decoder-only transformer.

  Attributes:
    name: for tables.
    num_layers: of any kind.
    width: of the residual stream.
    num_heads: of the queries.
    num_kv_heads: of keys and values.
    head_width: of each.
    mlp_width: hidden width of the ordinary MLP; any where no layer has one.
    vocab_size: V.
    gated: whether the MLPs have three matrices (SwiGLU) instead of two.
    tied: whether the head is the embedding.
    experts: None for a dense model.
    latent: None for ordinary (grouped) heads.
    weight_bytes: per weight.
    cache_bytes: per element of the KV cache.
    activation_bytes: per element between two products.
    dtype: of the products, a key of `Hardware.flops_per_second`; float16 counts
      as bfloat16.

  Raises:
    ValueError: the query heads cannot be shared out among the KV heads, or the
      routing is not that of every layer with experts.
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
  experts: Experts | None = None
  latent: LatentAttention | None = None
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
    routing = self.experts.routing if self.experts else None
    if routing is not None and len(routing) != self.expert_layers:
      raise ValueError(
        f'routing must be that of {self.expert_layers} layers with experts, got'
        f' {len(routing)}'
      )

  @property
  def expert_layers(self) -> int:
    """Layers with experts."""
    return self.num_layers - self.experts.dense_layers if self.experts else 0

  def _mlp(self, hidden: int) -> list[Matrix]:
    into = 2 if self.gated else 1
    return [(self.width, hidden)] * into + [(hidden, self.width)]

  def _attention(self) -> list[Matrix]:
    if self.latent is None:
      queries = self.num_heads * self.head_width
      keys = self.num_kv_heads * self.head_width
      return [
        (self.width, queries),
        (self.width, keys),
        (self.width, keys),
        (queries, self.width),
      ]
    latent, heads = self.latent, self.num_heads
    return [
      (self.width, latent.query_rank),
      (latent.query_rank, heads * (latent.nope_width + latent.rope_width)),
      (self.width, latent.kv_rank + latent.rope_width),
      (latent.kv_rank, heads * (latent.nope_width + latent.value_width)),
      (heads * latent.value_width, self.width),
    ]

  @property
  def expert(self) -> list[Matrix]:
    """The matrices of one expert; none in a dense model."""
    return self._mlp(self.experts.width) if self.experts else []

  @functools.cached_property
  def always_used(self) -> list[Matrix]:
    """The matrices that every token is multiplied with, the head included."""
    dense_layers = self.num_layers - self.expert_layers
    matrices = self._attention() * self.num_layers
    matrices += self._mlp(self.mlp_width) * dense_layers
    if self.experts is not None:
      in_layer = [(self.width, self.experts.count)]
      in_layer += self.expert * self.experts.shared
      matrices += in_layer * self.expert_layers
    return [*matrices, (self.width, self.vocab_size)]

  @functools.cached_property
  def used_per_token(self) -> list[Matrix]:
    """The matrices that one token is multiplied with."""
    chosen = self.experts.per_token if self.experts else 0
    return self.always_used + self.expert * (chosen * self.expert_layers)

  @property
  def embedding_parameters(self) -> int:
    """Of a table that is only looked up; 0 where it is the head, too."""
    return 0 if self.tied else self.vocab_size * self.width

  @property
  def parameters(self) -> int:
    """All weights."""
    experts = self.experts.count if self.experts else 0
    return (
      self.embedding_parameters
      + self.shared_parameters
      + self.routed_parameters * experts
    )

  @functools.cached_property
  def shared_parameters(self) -> int:
    """Weights that every token is multiplied with."""
    return num_weights(self.always_used)

  @functools.cached_property
  def active_parameters(self) -> int:
    """Weights that one token is multiplied with; no table of embeddings."""
    return num_weights(self.used_per_token)

  @functools.cached_property
  def activations_per_token(self) -> int:
    """Elements that a token's products read and write besides the weights."""
    return num_activations(self.used_per_token)

  @property
  def routed_parameters(self) -> int:
    """Weights of one expert in every layer that has experts."""
    return num_weights(self.expert) * self.expert_layers

  @property
  def kv_width(self) -> int:
    """Elements that the cache holds per token and layer, keys and values."""
    if self.latent is not None:
      return self.latent.kv_rank + self.latent.rope_width
    return 2 * self.num_kv_heads * self.head_width

  @property
  def kv_bytes_per_token(self) -> float:
    """Of the cache, all layers."""
    return self.num_layers * self.kv_width * self.cache_bytes

  @property
  def flops_per_pair(self) -> int:
    """Of a query and a cache slot in one layer, for its score and its value.

    Latent attention works on the compressed vectors, its second key and value
    products drawn into the queries and the results.
    """
    if self.latent is not None:
      both = 2 * self.latent.kv_rank + self.latent.rope_width
    else:
      both = 2 * self.head_width
    return 2 * self.num_heads * both

  def dense_twin(self) -> 'ModelShape':
    """The dense model of the same active size, routers apart.

    Raises:
      ValueError: the model is dense.
    """
    experts = self.experts
    if experts is None:
      raise ValueError(f'{self.name} has no experts, so it is its own twin')
    used = experts.width * (experts.per_token + experts.shared)
    # One width in all layers, those with an ordinary MLP included.
    hidden = used * self.expert_layers + self.mlp_width * experts.dense_layers
    return dataclasses.replace(
      self,
      name=f'dense twin of {self.name}',
      experts=None,
      mlp_width=round(hidden / self.num_layers),
    )
