"""Rotary position embeddings (RoFormer, Su et al. 2021, arXiv 2104.09864).

Pair `i` of a head's coordinates, `i` and `i + Dh / 2`, is turned by the angle
`position * frequency[i]`. Scaling makes the frequencies smaller, so that a
model reaches beyond the context that it was trained on. Only what depends on
the position alone is here: a cached key must stay right as the text grows.

Everything is float32, in the order of operations of transformers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
  """Position interpolation (Chen et al. 2023, arXiv 2306.15595).

  Attributes:
    factor: divides every frequency.
  """

  factor: float
  rope_type = 'linear'
  attention_factor = 1.0

  def __post_init__(self):
    _check_positive(self)

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    """The frequencies `[Dh / 2]`, scaled."""
    del theta
    return frequencies / np.float32(self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
  """Llama 3.1's: slow pairs are divided, fast ones are not (arXiv 2407.21783).

  Attributes:
    factor: divides the frequencies of wavelengths beyond the original context
      over `low_freq_factor`.
    low_freq_factor: see there.
    high_freq_factor: wavelengths below the original context over this are left
      alone; in between it is gradual.
    original_max_position_embeddings: the context trained on, in tokens.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int
  rope_type = 'llama3'
  attention_factor = 1.0

  def __post_init__(self):
    _check_positive(self)
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        f'low_freq_factor={self.low_freq_factor} must be below'
        f' high_freq_factor={self.high_freq_factor}'
      )

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    """The frequencies `[Dh / 2]`, scaled."""
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
class YarnScaling:
  """YaRN (Peng et al. 2023, arXiv 2309.00071, sections 3.2 to 3.4).

  Attributes:
    factor: divides the frequencies of pairs that turn less than `beta_slow`
      times within the original context.
    original_max_position_embeddings: the context trained on, in tokens.
    beta_fast: pairs that turn more often than this are left alone.
    beta_slow: see `factor`.
    attention_factor: multiplies queries and keys; None: 0.1 ln(factor) + 1.
    truncate: whether the bounds of the pairs in between are whole numbers.
  """

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  truncate: bool = True
  rope_type = 'yarn'

  def __post_init__(self):
    # Written out, so that equal scalings are equal records.
    if self.attention_factor is None:
      grown = 0.1 * math.log(max(self.factor, 1.0)) + 1.0
      object.__setattr__(self, 'attention_factor', grown)
    _check_positive(self)

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    """The frequencies `[Dh / 2]`, scaled."""
    pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
      wavelength = self.original_max_position_embeddings / times
      return pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    first, last = map(pair_that_turns, (self.beta_fast, self.beta_slow))
    if self.truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
      last += 0.001
    ramp = (np.arange(pairs, dtype=np.float32) - first) / (last - first)
    kept = 1 - np.clip(ramp, 0, 1)
    slow = frequencies / np.float32(self.factor)
    return (slow * (1 - kept) + frequencies * kept).astype(np.float32)


Scaling = LinearScaling | Llama3Scaling | YarnScaling
SCALINGS: dict[str, type[Scaling]] = {
  one.rope_type: one for one in (LinearScaling, Llama3Scaling, YarnScaling)
}
"""By `rope_type`, with the fields of transformers' `rope_parameters`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """How positions turn the heads.

  Attributes:
    theta: the base of the frequencies, above 1.
    scaling: of the frequencies, or None.
  """

  theta: float = 10000.0
  scaling: Scaling | None = None

  def __post_init__(self):
    if not (isinstance(self.theta, (int, float)) and self.theta > 1):
      raise ValueError(f'rope_theta must be above 1, got {self.theta!r}')

  def frequencies(self, head_width: int) -> np.ndarray:
    """Radians per position of each pair, `[Dh / 2]` float32."""
    powers = np.arange(0, head_width, 2, dtype=np.float32) / head_width
    plain = np.float32(1) / np.float32(self.theta) ** powers
    if self.scaling is None:
      return plain
    return self.scaling.scale(plain, self.theta)

  def rotation(
    self, positions: jax.Array, head_width: int
  ) -> tuple[jax.Array, jax.Array]:
    """What `rotate` turns heads with.

    Args:
      positions: `[B, L]` int32; beyond the context is fine.
      head_width: Dh, even.

    Returns:
      Cosines and sines `[B, 1, L, Dh / 2]` float32.
    """
    frequencies = jnp.asarray(self.frequencies(head_width))
    angles = positions[:, None, :, None].astype(jnp.float32)
    angles = angles * frequencies[None, None, None]
    factor = 1.0
    if self.scaling is not None and self.scaling.attention_factor is not None:
      factor = self.scaling.attention_factor
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def rotate(
  heads: jax.Array, rotation: tuple[jax.Array, jax.Array]
) -> jax.Array:
  """Queries or keys `[B, H, L, Dh]` float32, turned by their positions."""
  cos, sin = rotation
  first, second = jnp.split(heads, 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def _check_positive(scaling: Scaling) -> None:
  for name, value in dataclasses.asdict(scaling).items():
    is_number = isinstance(value, (int, float))
    if not (is_number and (value > 0 or isinstance(value, bool))):
      raise ValueError(f'{name} must be a positive number, got {value!r}')
