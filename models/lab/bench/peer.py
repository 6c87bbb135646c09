"""Arms of a benchmark: of this library, and servers of other programs."""

from collections.abc import Sequence
import dataclasses

from specdec import generation as generation_lib
from specdec import statistics as statistics_lib
from specdec.models.lab.bench import timing
from specdec.models.text import settings as settings_lib

UNKNOWN = ('positions', 'reads', 'nodes_per_forward', 'relative_bandwidth')
"""Figures of `specdec.statistics` that need more than tokens and forwards."""


@dataclasses.dataclass(frozen=True)
class ArmSpec:
  """A method of decoding, with the options that differ from the common ones."""

  # One of `settings.METHODS`, or the address of a server.
  method: str
  dtype: str = ''  # The dtype of weights and cache; '': a server
  options: tuple[tuple[str, str], ...] = ()  # Pairs of name and value.

  @property
  def is_peer(self) -> bool:
    """Whether a server decodes, and not this process."""
    return self.method not in settings_lib.METHODS

  def __str__(self):
    if self.is_peer:
      return self.method
    listed = ','.join(f'{name}={value}' for name, value in self.options)
    return f'{self.method}{f"({listed})" if listed else ""}:{self.dtype}'


@dataclasses.dataclass(frozen=True)
class ReadyArm:
  """An arm with its models loaded.

  Attributes:
    decode: decodes a batch of prompts.
    weight_bytes: of all weights and tables in memory; None for a peer, of which
      tokens, times and forwards are known alone.
    first_seconds: of a peer, until each prompt had its first token.
  """

  decode: timing.Arm
  weight_bytes: int | None = None
  first_seconds: Sequence[float] = ()


def _until_eos(
  row: Sequence[int], eos_ids: Sequence[int]
) -> tuple[list[int], str]:
  """The tokens up to the first EOS, and the finish reason."""
  for index, token in enumerate(row):
    if token in eos_ids:
      return [*row[: index + 1]], 'eos'
  return [*row], 'length'


def as_generation(
  rows: Sequence[Sequence[int]], eos_ids: Sequence[int], forwards: int
) -> generation_lib.Generation:
  """The result of a peer, cut after EOS, without the figures of `UNKNOWN`.

  `forwards` counts target forwards, for all rows together.
  """
  ended = [_until_eos(row, eos_ids) for row in rows]
  tokens = [row for row, _ in ended]
  nothing = {'forwards': 0, 'slots': 0}
  return generation_lib.Generation(
    tokens=tokens,
    origins=[],
    labels=('target',),
    log_probs=None,
    finish_reasons=[reason for _, reason in ended],
    errors=[None] * len(tokens),
    stats=statistics_lib.Statistics(
      new_tokens=sum(map(len, tokens)),
      target_forwards=max(forwards, 0),
      stage_forwards={},
      positions={'target': 0},
      reads={'plain': nothing, 'target': nothing},
      costs={'target': {'per_forward': 0, 'per_slot': 0}},
    ),
  )
