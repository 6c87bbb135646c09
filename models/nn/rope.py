"""Rotary position embeddings (RoFormer, Su et al. 2021, arXiv 2104.09864).

The pair of head coordinates `i` and `i + Dh / 2` is rotated by the angle
`position * frequency[i]`. Scaling lowers the frequencies, which extends the
context of a trained model. Only scalings that depend on nothing but the
position are supported, because cached keys must stay valid as the text grows.

All values are float32, in the order of operations of transformers.
"""

import dataclasses
import math
from typing import Any
from typing import ClassVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
  """A scaling of frequencies; every field is a positive number."""

  rope_type: ClassVar[str]
  attention_factor = 1.0  # Factor of queries and keys.

  def __post_init__(self) -> None:
    for name, value in vars(self).items():
      is_number = isinstance(value, (int, float))
      if not (is_number and (value > 0 or isinstance(value, bool))):
        raise ValueError(f'{name} must be a positive number, got {value!r}')

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    """The frequencies `[Dh / 2]` of a base, scaled."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(Scaling):
  """Position interpolation (Chen et al. 2023, arXiv 2306.15595)."""

  factor: float  # Divisor of every frequency.
  rope_type = 'linear'

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    del theta
    return frequencies / np.float32(self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Scaling):
  """Llama 3.1 scaling: divides the low frequencies only (arXiv 2407.21783).

  Attributes:
    factor: divisor of the frequencies whose wavelength exceeds the original
      context divided by `low_freq_factor`.
    low_freq_factor: see `factor`.
    high_freq_factor: wavelengths below the original context divided by this
      are not scaled; in between the transition is gradual.
    original_max_position_embeddings: context of the training, in tokens.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int
  rope_type = 'llama3'

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        f'low_freq_factor={self.low_freq_factor} must be below'
        f' high_freq_factor={self.high_freq_factor}'
      )

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    del theta
    context = self.original_max_position_embeddings
    low, high = self.low_freq_factor, self.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / frequencies
    slow = frequencies / np.float32(self.factor)
    smooth = (np.float32(context) / wavelengths - low) / (high - low)
    between = (1 - smooth) * slow + smooth * frequencies
    return np.where(
      wavelengths > context / low,
      slow,
      np.where(wavelengths < context / high, frequencies, between),
    ).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(Scaling):
  """YaRN (Peng et al. 2023, arXiv 2309.00071, sections 3.2 to 3.4).

  Attributes:
    factor: divisor of the frequencies of pairs that make fewer than `beta_slow`
      turns within the original context.
    original_max_position_embeddings: context of the training, in tokens.
    beta_fast: pairs that make more turns than this are not scaled.
    beta_slow: see `factor`.
    attention_factor: factor of queries and keys; None: 0.1 ln(factor) + 1.
    truncate: whether the transition starts and ends at whole pairs.
  """

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: Any = None
  truncate: bool = True
  rope_type = 'yarn'

  def __post_init__(self) -> None:
    # The default is filled in here, so that equal scalings are equal records.
    if self.attention_factor is None:
      default = 0.1 * math.log(max(self.factor, 1.0)) + 1.0
      object.__setattr__(self, 'attention_factor', default)
    super().__post_init__()

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    pairs = len(frequencies)

    def pair_with_turns(turns: float) -> float:
      wavelength = self.original_max_position_embeddings / turns
      return pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    first, last = map(pair_with_turns, (self.beta_fast, self.beta_slow))
    if self.truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
      last += 0.001
    ramp = (np.arange(pairs, dtype=np.float32) - first) / (last - first)
    kept = 1 - np.clip(ramp, 0, 1)
    slow = frequencies / np.float32(self.factor)
    return (slow * (1 - kept) + frequencies * kept).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling(Scaling):
  """LongRoPE (arXiv 2402.13753) of texts within the context of the training.

  A longer text divides the frequencies of all its positions by other factors,
  so that cached keys would change. Models therefore have this context.

  Attributes:
    short_factor: divisor of the frequency of each pair.
    long_factor: the divisors for longer texts, which are kept and not used.
    original_max_position_embeddings: context of the training, in tokens.
    attention_factor: factor of queries and keys.
  """

  short_factor: tuple[float, ...]
  long_factor: tuple[float, ...]
  original_max_position_embeddings: int
  attention_factor: float = 1.0
  rope_type = 'longrope'

  def __post_init__(self) -> None:
    for name in ('short_factor', 'long_factor'):
      if not all(factor > 0 for factor in getattr(self, name)):
        raise ValueError(f'{name} must have positive numbers only')

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    del theta
    if len(self.short_factor) != len(frequencies):
      raise ValueError(
        f'short_factor has {len(self.short_factor)} numbers for'
        f' {len(frequencies)} pairs of coordinates'
      )
    return frequencies / np.asarray(self.short_factor, np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalScaling(Scaling):
  """Rotates the fastest pairs only, and by the frequencies of all (Gemma 4).

  Attributes:
    partial_rotary_factor: the part of the pairs that is rotated.
    factor: divisor of every frequency.
  """

  partial_rotary_factor: float = 1.0
  factor: float = 1.0
  rope_type = 'proportional'

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    del theta
    pairs = len(frequencies)
    rotated = np.arange(pairs) < int(self.partial_rotary_factor * pairs)
    return np.where(rotated, frequencies / np.float32(self.factor), 0)


_KINDS: tuple[type[Scaling], ...] = (
  LinearScaling,
  Llama3Scaling,
  YarnScaling,
  LongRopeScaling,
  ProportionalScaling,
)
SCALINGS = {kind.rope_type: kind for kind in _KINDS}
"""Scalings by `rope_type`; fields as in transformers' `rope_parameters`."""


class Rotation(NamedTuple):
  """The rotation of heads, computed for some positions.

  Attributes:
    cos: `[B, 1, L, P]` float32.
    sin: the same.
    query_scale: `[B, L]` float32, factors of queries, or None.
  """

  cos: jax.Array
  sin: jax.Array
  query_scale: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotation of heads by their positions."""

  theta: float = 10000.0  # Base of the frequencies, above 1.
  scaling: Scaling | None = None
  fraction: float = 1.0  # The part of each head that is rotated.
  # Queries grow by this times the logarithm of how many contexts of the
  # training lie before them (Ministral 3).
  query_growth: float = 0.0

  def __post_init__(self) -> None:
    if not 0 < self.fraction <= 1:
      raise ValueError(
        f'partial_rotary_factor must be in (0, 1], got {self.fraction!r}'
      )
    if not (isinstance(self.theta, (int, float)) and self.theta > 1):
      raise ValueError(f'rope_theta must be above 1, got {self.theta!r}')
    if self.query_growth and not isinstance(self.scaling, YarnScaling):
      raise ValueError(
        f'llama_4_scaling_beta={self.query_growth!r} needs rope_type=yarn'
      )

  def frequencies(self, head_width: int) -> np.ndarray:
    """Radians per position of each pair, `[P]` float32; P = Dh / 2 if whole."""
    width = int(self.fraction * head_width)
    powers = np.arange(0, width, 2, dtype=np.float32) / width
    plain = np.float32(1) / np.float32(self.theta) ** powers
    if self.scaling is None:
      return plain
    return self.scaling.scale(plain, self.theta)

  def rotation(self, positions: jax.Array, head_width: int) -> Rotation:
    """Cosines and sines of positions, for `rotate`.

    Args:
      positions: `[B, L]` int32; positions beyond the context are allowed.
      head_width: Dh, even.
    """
    frequencies = jnp.asarray(self.frequencies(head_width))
    angles = positions[:, None, :, None].astype(jnp.float32)
    angles = angles * frequencies[None, None, None]
    factor = 1.0 if self.scaling is None else self.scaling.attention_factor
    scale = None
    if self.query_growth and isinstance(self.scaling, YarnScaling):
      context = self.scaling.original_max_position_embeddings
      before = jnp.maximum(positions, 0) // context
      scale = 1 + self.query_growth * jnp.log1p(before.astype(jnp.float32))
    return Rotation(factor * jnp.cos(angles), factor * jnp.sin(angles), scale)


def rotate(heads: jax.Array, rotation: Rotation | None) -> jax.Array:
  """Queries or keys `[B, H, L, Dh]` float32, rotated by their positions.

  None rotates nothing, as in some layers of SmolLM3 (arXiv 2501.18795).
  """
  if rotation is None:
    return heads
  cos, sin = rotation[:2]
  pairs = cos.shape[-1]
  first, second, rest = jnp.split(heads, (pairs, 2 * pairs), axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
  )


def order_of_rows(length: int, num_heads: int | None) -> np.ndarray:
  """`[length]`, where each stored row of queries or keys goes.

  With a number of heads, stored rows are in the order of programs that rotate
  neighbours `2 i` and `2 i + 1` together, such as llama.cpp for Llama.
  """
  order = np.arange(length)
  if num_heads is None:
    return order
  return order.reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)
