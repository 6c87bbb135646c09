"""A mixture of experts beside a dense model of the same active size.

Weights are random, and text is nearly all noise: at a high temperature tokens
are chosen by the noise of their positions, which target and draft share, so a
table that knows nothing is a draft that costs nothing. What differs between the
two models is the cost of verification alone.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.llama import Llama
from models.llama import LlamaConfig
from models.mixtral import Mixtral
from models.mixtral import MixtralConfig
from models.sweep.measuring import Subject
from models.table import table_model
import specdec
from specdec import topology
from specdec.cost_model import Experts
from specdec.cost_model import ModelShape
from specdec.drafter import Drafter
from specdec.masks import causal_mask
from specdec.model import Model

_VOCAB_SIZE = 1024
_TEXT = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
  """Sizes of the mixture; its twin's MLP is as wide as k experts.

  Attributes:
    width: of the residual stream, a multiple of 64.
    num_layers: with experts, all of them.
    num_experts: E.
    experts_per_token: k.
    expert_width: of one.
    dtype: of the matrices.
    temperature: of the sampling; the higher, the more drafted tokens are
      accepted.
    num_positions: the longest context.
  """

  width: int = 768
  num_layers: int = 4
  num_experts: int = 8
  experts_per_token: int = 2
  expert_width: int = 2048
  dtype: str = 'bfloat16'
  temperature: float = 4.0
  num_positions: int = 1024

  def __post_init__(self):
    if self.width % 64 or self.width < 64:
      raise ValueError(
        f'--mixture: the width must be a multiple of 64, got {self.width}'
      )

  def _config(self) -> dict[str, Any]:
    return {
      'vocab_size': _VOCAB_SIZE,
      'num_positions': self.num_positions,
      'width': self.width,
      'num_layers': self.num_layers,
      'num_heads': self.width // 64,
      'num_kv_heads': self.width // 64,
      'head_width': 64,
    }

  def mixture(self) -> Mixtral:
    """A random one."""
    config = MixtralConfig(
      **self._config(),
      inner_width=self.expert_width,
      num_experts=self.num_experts,
      experts_per_token=self.experts_per_token,
    )
    return Mixtral(config, dtype=jnp.dtype(self.dtype), rngs=nnx.Rngs(0))

  def twin(self) -> Llama:
    """A random dense one."""
    config = LlamaConfig(
      **self._config(),
      inner_width=self.experts_per_token * self.expert_width,
    )
    return Llama(config, dtype=jnp.dtype(self.dtype), rngs=nnx.Rngs(0))

  def shape(self) -> ModelShape:
    """Of the mixture; `dense_twin()` is that of the other."""
    size = jnp.dtype(self.dtype).itemsize
    return ModelShape(
      name='mixture',
      num_layers=self.num_layers,
      width=self.width,
      num_heads=self.width // 64,
      num_kv_heads=self.width // 64,
      head_width=64,
      mlp_width=0,
      vocab_size=_VOCAB_SIZE,
      experts=Experts(
        count=self.num_experts,
        per_token=self.experts_per_token,
        width=self.expert_width,
      ),
      weight_bytes=size,
      cache_bytes=size,
      dtype=self.dtype,
    )


def mixture_of(sizes: Sequence[int], dtype: str) -> Mixture:
  """A mixture of the sizes of `--mixture`.

  Raises:
    ValueError: there are not five positive sizes that fit each other.
  """
  if len(sizes) != 5 or min(sizes) < 1 or sizes[3] > sizes[2]:
    raise ValueError(
      f'--mixture={",".join(map(str, sizes))}: expected width, layers, experts,'
      ' experts per token (no more than there are) and width of an expert'
    )
  names = ('width', 'num_layers', 'num_experts', 'experts_per_token')
  return Mixture(
    **dict(zip((*names, 'expert_width'), sizes, strict=True)), dtype=dtype
  )


def subject(
  name: str, target: Model, shape: ModelShape, temperature: float
) -> Subject:
  """A model with a draft that costs nothing."""
  text = np.random.default_rng(0).integers(0, _VOCAB_SIZE, _TEXT)
  return Subject(
    name=name,
    target=target,
    shape=shape,
    draft=None,
    draft_model=None,
    draft_name=None,
    text=text.astype(np.int32),
    sampling=specdec.Sampling(temperature=temperature),
  )


def free_draft(sizes: Mixture) -> Model:
  """All tokens are alike to it."""
  return table_model(
    jnp.zeros((_VOCAB_SIZE, _VOCAB_SIZE)), max_positions=sizes.num_positions
  )


def free_chain(sizes: Mixture, num_draft_tokens: int) -> Drafter:
  """Of the draft that costs nothing."""
  return Drafter(
    specdec.LanguageModelScorer(free_draft(sizes)),
    specdec.TreeConfig(topology=topology.chain(num_draft_tokens)),
  )


def chosen_experts(module: Mixtral, texts: np.ndarray) -> np.ndarray:
  """Where the tokens of texts go, `[layers, B, T, k]` int32.

  Args:
    module: the mixture.
    texts: `[B, T]` int32.
  """
  batch_size, length = texts.shape
  positions = np.broadcast_to(np.arange(length)[None], texts.shape)
  mask = causal_mask(jnp.zeros(batch_size, jnp.int32), length, length)
  graph, variables = nnx.split(module)

  @jax.jit
  def run(variables, texts):
    merged = nnx.merge(graph, variables)
    _, _, routings = merged.with_routing(texts, jnp.asarray(positions), mask)
    return jnp.stack([one.experts for one in routings])

  return np.asarray(run(variables, jnp.asarray(texts)))


def chances(chosen: np.ndarray, num_experts: int) -> tuple:
  """As `specdec.cost_model.Experts.routing`, from `chosen_experts`."""
  tokens = chosen[0, ..., 0].size
  return tuple(
    tuple(
      (np.bincount(layer.reshape(-1), minlength=num_experts) / tokens).tolist()
    )
    for layer in chosen
  )


def correlation(chosen: np.ndarray, num_experts: int, num_tokens: int) -> float:
  """As `specdec.cost_model.Experts.correlation`, from `chosen_experts`.

  Of all pairs of tokens that stand in a forward over neighbours: as many at a
  distance of 1 as there are such pairs among them, and so on.

  Args:
    chosen: of `chosen_experts`, of at least `num_tokens` tokens.
    num_experts: E.
    num_tokens: N, of the forward.

  Raises:
    ValueError: the texts are shorter than N tokens.
  """
  if chosen.shape[2] < num_tokens:
    raise ValueError(
      f'experts of {num_tokens} neighbours cannot be counted in texts of'
      f' {chosen.shape[2]} tokens; verify fewer, or decode more'
      ' (--max_new_tokens)'
    )
  used = np.any(chosen[..., None] == np.arange(num_experts), axis=-2)
  chance = used.mean(axis=(1, 2))
  variance = np.sum(chance * (1 - chance))
  if num_tokens < 2 or variance == 0:
    return 0.0
  pairs, both = 0.0, 0.0
  for distance in range(1, num_tokens):
    together = used[:, :, :-distance] & used[:, :, distance:]
    number = num_tokens - distance
    pairs += number
    both += number * together.mean(axis=(1, 2))
  covariance = np.sum(both / pairs - chance**2)
  # A row of few tokens can look as if it avoided what it has used, and its
  # ends weigh less than its middle.
  return float(np.clip(covariance / variance, 0.0, 1.0))


def distinct_experts(chosen: np.ndarray, num_tokens: int, rows: int) -> float:
  """The mean over layers and places of a text of how many a forward reads.

  Args:
    chosen: of `chosen_experts`.
    num_tokens: neighbours, N of each row.
    rows: B of a forward; those of `chosen` are taken so many at a time.
  """
  _, batch_size, length, _ = chosen.shape
  counts = []
  for first in range(0, batch_size - rows + 1, rows):
    for at in range(0, length - num_tokens + 1, num_tokens):
      window = chosen[:, first : first + rows, at : at + num_tokens]
      counts += [len(np.unique(layer)) for layer in window]
  return float(np.mean(counts))


def experts_row(
  chosen: np.ndarray, experts: Experts, *, num_nodes: int, batch_size: int
) -> dict[str, float]:
  """Distinct experts of a layer that a forward reads, counted and by formula.

  Args:
    chosen: of `chosen_experts`, of at least B rows.
    experts: with routing and correlation as counted.
    num_nodes: N, neighbours of each row.
    batch_size: B.

  Returns:
    `counted`, by `formula`, and by that for `independent` tokens.
  """
  independent = dataclasses.replace(experts, correlation=0.0)
  expected = lambda one: one.expected_distinct(num_nodes, batch_size=batch_size)
  return {
    'counted': distinct_experts(chosen, num_nodes, batch_size),
    'formula': expected(experts),
    'independent': expected(independent),
  }
