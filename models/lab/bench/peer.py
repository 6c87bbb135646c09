"""Arms of a benchmark, and the seam for other programs that decode.

A peer is one file with a subclass of `Peer`, and an entry of `arms.PEERS`.
"""

import abc
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from specdec import generation as generation_lib
from specdec import statistics as statistics_lib
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import timing
from specdec.models.text import settings as settings_lib

UNKNOWN = ('positions', 'reads', 'nodes_per_forward', 'relative_bandwidth')
"""Figures of `specdec.statistics` that need more than tokens and forwards."""


@dataclasses.dataclass(frozen=True)
class ArmSpec:
  """A method of decoding, with the options that differ from the common ones."""

  method: str  # One of `settings.METHODS`, or of a `Peer`.
  dtype: str  # Weights and cache have it; `gguf` for llama.cpp.
  options: tuple[tuple[str, str], ...] = ()  # Pairs of name and value.

  @property
  def peer(self) -> str | None:
    """The name of the peer that decodes; None if this library does."""
    is_own = self.method in settings_lib.METHODS
    return None if is_own else self.method.partition('-')[0]

  def __str__(self):
    listed = ','.join(f'{name}={value}' for name, value in self.options)
    return f'{self.method}{f"({listed})" if listed else ""}:{self.dtype}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkTask(task_lib.Task):
  """The task of all arms.

  Attributes:
    llama_cpp: the folder of `llama-server`; None: it is on the path.
    vllm: the Python of the environment that has vLLM.
  """

  llama_cpp: str | None = None
  vllm: str | None = None


@dataclasses.dataclass(frozen=True)
class ReadyArm:
  """An arm with its models loaded.

  Attributes:
    decode: decodes a batch of prompts.
    weight_bytes: of all weights and tables in memory; None for a peer, of which
      tokens, times and forwards are known alone.
  """

  decode: timing.Arm
  weight_bytes: int | None = None


class Peer(abc.ABC):
  """Another program that decodes the same weights.

  Attributes:
    methods: its ways of decoding, the plain one first, with their options. The
      name of a method is that of the peer, or begins with it and a dash.
    dtypes: those that it decodes in.
    batched: the methods that decode several rows at once.
    drafted: the methods that need a draft.
    lacks: the fields of a `Sampling` that it does not know.
  """

  methods: Mapping[str, tuple[str, ...]]
  dtypes: tuple[str, ...]
  batched: tuple[str, ...] = ()
  drafted: tuple[str, ...] = ()
  lacks: tuple[str, ...] = ('logit_bias',)

  def can(self, method: str, *, has_draft: bool, batch_size: int) -> bool:
    """Whether a method decodes so many rows, with a draft or without."""
    fits = batch_size == 1 or method in self.batched
    return fits and (has_draft or method not in self.drafted)

  @abc.abstractmethod
  def describe(self, task: BenchmarkTask) -> dict[str, Any]:
    """Versions, for the record of a result.

    Raises:
      ValueError: the program is not installed.
    """

  @abc.abstractmethod
  def load(
    self, found: checkpoint_lib.Checkpoint, given: str, dtype: str
  ) -> Any:
    """A model; `given` is the flag that named it.

    Raises:
      ValueError: it cannot be decoded.
    """

  @abc.abstractmethod
  def make_arm(
    self,
    spec: ArmSpec,
    task: BenchmarkTask,
    models: Mapping[str, Any],
    eos_ids: Sequence[int],
  ) -> timing.Arm:
    """Makes what decodes; its results are those of `as_generation`.

    `models` are the `target` and perhaps the `draft`, as loaded.

    Raises:
      ValueError: they cannot be decoded, or an option is bad.
    """


def _until_eos(
  row: Sequence[int], eos_ids: Sequence[int]
) -> tuple[list[int], str]:
  """The tokens up to the first EOS, and the finish reason."""
  for index, token in enumerate(row):
    if token in eos_ids:
      return [*row[: index + 1]], 'eos'
  return [*row], 'length'


def as_generation(
  rows: Sequence[Sequence[int]],
  eos_ids: Sequence[int],
  forwards: Mapping[str, int],
) -> generation_lib.Generation:
  """The result of a peer, cut after EOS, without the figures of `UNKNOWN`.

  `forwards` are those of `target` and, if there is a draft, of `draft`; all
  rows of a batch share them.
  """
  ended = [_until_eos(row, eos_ids) for row in rows]
  tokens = [row for row, _ in ended]
  stages = {name: n for name, n in forwards.items() if name != 'target'}
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
      # A row of a batch may end before the others.
      target_forwards=sum(min(len(row), forwards['target']) for row in tokens),
      stage_forwards=stages,
      positions={'target': 0},
      reads={'plain': nothing, 'target': nothing},
      costs={'target': {'per_forward': 0, 'per_slot': 0}},
    ),
  )
