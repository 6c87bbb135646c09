"""What a machine can do at best."""

from collections.abc import Mapping
import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """Limits of one machine.

  Attributes:
    name: for tables.
    bytes_per_second: of main memory.
    flops_per_second: of matrix products, dense, by dtype; two per
      multiplication and addition.
    memory_bytes: of main memory, or None if that does not matter.
    layer_seconds: that each layer of a forward takes besides, whatever its
      size: launches of kernels. 0 in presets, no data sheet gives it.
  """

  name: str
  bytes_per_second: float
  flops_per_second: Mapping[str, float]
  memory_bytes: float | None = None
  layer_seconds: float = 0.0

  def peak(self, dtype: str) -> float:
    """FLOP per second.

    Raises:
      ValueError: nothing is known about the dtype.
    """
    if dtype not in self.flops_per_second:
      raise ValueError(
        f'dtype={dtype!r}: {self.name} has figures for'
        f' {", ".join(sorted(self.flops_per_second))}'
      )
    return self.flops_per_second[dtype]

  def ridge(self, dtype: str) -> float:
    """FLOP per byte from which on arithmetic is the limit, not memory."""
    return self.peak(dtype) / self.bytes_per_second

  def times(self, devices: int) -> 'Hardware':
    """So many of it, each model split evenly; what they say is not counted.

    Raises:
      ValueError: there is not at least one.
    """
    if devices < 1:
      raise ValueError(f'devices must be at least 1, got {devices}')
    if devices == 1:
      return self
    return dataclasses.replace(
      self,
      name=f'{devices} x {self.name}',
      bytes_per_second=devices * self.bytes_per_second,
      flops_per_second={
        dtype: devices * rate for dtype, rate in self.flops_per_second.items()
      },
      memory_bytes=self.memory_bytes and devices * self.memory_bytes,
    )
