"""Options of prompts that share the rows of `specdec.slots.Slots`.

All rows share one compiled program. So it has every option that the prompts
under way have, and what a prompt does not set has a value that changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import adjusters as adjusters_lib
from specdec import arguments as arguments_lib
from specdec import carried as carried_lib
from specdec import sampling as sampling_lib
from specdec import step as step_lib
from specdec import watchers as watchers_lib
from specdec.text import automaton as automaton_lib
from specdec.text import constraint as constraint_lib

# No smaller bound of `top_k`, so that few programs are compiled.
_LEAST_TOP_K = 64

# The room for EOS ids is a multiple of this, so that prompts may have others.
_EOS_BLOCK = 8


def _row_params(
  sampling: sampling_lib.Sampling, vocab_size: int
) -> sampling_lib.SamplingParams:
  """The parameters of one row on the host; a `logit_bias` is `[1, V]`."""
  params = arguments_lib.to_params(sampling, 1, vocab_size)
  params = jax.tree.map(np.asarray, params)
  bias = params.logit_bias
  return (
    params if bias is None else params.replace(logit_bias=bias.reshape(1, -1))
  )


def _joined(
  rows: Sequence[sampling_lib.SamplingParams],
  default: sampling_lib.SamplingParams,
  vocab_size: int,
) -> sampling_lib.SamplingParams:
  """The parameters of all rows, with what any of them or the default sets.

  Rows that do not set it have a value that changes nothing.
  """
  neutral = {
    'temperature': np.zeros(1, np.float32),
    'logit_bias': np.zeros((1, vocab_size), np.float32),
    'repetition_penalty': np.ones(1, np.float32),
    'top_k': np.array([arguments_lib.ALL_TOKENS], np.int32),
    'top_p': np.ones(1, np.float32),
    'min_p': np.zeros(1, np.float32),
  }
  found: dict[str, Any] = {}
  everyone = default, *rows
  for name, nothing in neutral.items():
    given = [getattr(params, name) for params in everyone]
    if any(value is not None for value in given):
      own = [nothing if value is None else value for value in given[1:]]
      found[name] = np.concatenate(own)
  if 'top_k' in found:
    bounds = [params.max_top_k for params in everyone if params.max_top_k]
    found['max_top_k'] = max(_LEAST_TOP_K, *bounds)
    found['some_keep_all'] = any(one.top_k is None for one in everyone)
  return sampling_lib.SamplingParams(**found)


def room_for_eos_ids(eos_ids: Sequence[int]) -> int:
  """How many end tokens a prompt may have, where others have these."""
  return -(-max(len(eos_ids), 1) // _EOS_BLOCK) * _EOS_BLOCK


def _padded_ids(
  eos_ids: Sequence[int], vocab_size: int, width: int | None = None
) -> np.ndarray:
  """A row of `EndOfText`, `[width]` int32; None: as wide as it needs."""
  ids = arguments_lib.to_ids('eos_ids', eos_ids, vocab_size)
  width = width or room_for_eos_ids(ids)
  if len(ids) > width:
    raise ValueError(
      f'eos_ids of a prompt has {len(ids)} tokens, but there is room for'
      f' {width}; give fewer, or more for all prompts'
    )
  return np.array([*ids, *[-1] * (width - len(ids))], np.int32)


class SlotOptions:
  """The options of each row, on the host.

  Args:
    request: of all rows, without end tokens.
    sampling: of prompts that have none of their own.
    eos_ids: of prompts that have none of their own.
    vocab_size: V.

  Raises:
    ValueError: an option cannot be used.
  """

  def __init__(
    self,
    request: step_lib.Request,
    sampling: sampling_lib.Sampling,
    eos_ids: Sequence[int],
    vocab_size: int,
  ):
    num_rows = len(request.prompt)
    self._vocab_size = vocab_size
    self._default = _row_params(sampling, vocab_size)
    self._params = [self._default] * num_rows
    self._joined = self._default  # The parameters of the last request.
    self._automata: list[automaton_lib.Automaton | None] = [None] * num_rows
    self._tables: constraint_lib.Tables | None = None
    self._ends = _padded_ids(eos_ids, vocab_size)
    self._row_ends = np.tile(self._ends, (num_rows, 1))
    self._sections = np.zeros(num_rows, np.int32)
    # All rows share these; others come and go with the prompts that need them.
    has_penalty = self._default.repetition_penalty is not None
    self._adjusters = request.adjusters[has_penalty:]
    self._watchers = request.watchers

  @property
  def are_apart(self) -> bool:
    """Whether everything in a request has an axis of rows."""
    return not self._adjusters and all(
      isinstance(one, watchers_lib.LogProbs) for one in self._watchers
    )

  def check(
    self,
    sampling: sampling_lib.Sampling | None,
    eos_ids: Sequence[int] | None,
    automaton: automaton_lib.Automaton | None,
  ) -> tuple[sampling_lib.SamplingParams, np.ndarray]:
    """The parameters of a prompt and the tokens that end it.

    Raises:
      ValueError: an option cannot be used.
    """
    params, ends = self._default, self._ends
    if sampling is not None:
      params = _row_params(sampling, self._vocab_size)
    if eos_ids is not None:
      ends = _padded_ids(eos_ids, self._vocab_size, len(ends))
    if automaton is not None and any(
      adjuster.excludes for adjuster in self._adjusters
    ):
      raise ValueError(
        'automaton: these slots have a constraint for all prompts; leave out'
        ' one of the two'
      )
    return params, ends

  def assign(
    self,
    row: int,
    checked: tuple[sampling_lib.SamplingParams, np.ndarray],
    automaton: automaton_lib.Automaton | None,
    section: int,
  ) -> None:
    """Gives a row the options of another prompt.

    `checked` was returned by `check`; the text begins in `section`.
    """
    self._params[row], self._row_ends[row] = checked
    self._automata[row], self._sections[row] = automaton, section
    if not any(self._automata):
      self._tables = None
    elif self._tables is None:
      self._tables = automaton_lib.stack(self._automata, self._vocab_size)
    else:
      self._tables = automaton_lib.with_row(self._tables, row, automaton)

  def free(self, row: int) -> None:
    """The prompt of the row has ended; its options cost nothing from now on."""
    self._params[row], self._automata[row] = self._default, None

  def of_row(self, row: int) -> sampling_lib.SamplingParams:
    """The parameters of a row in the last request of `of_all`."""
    take = lambda array: jnp.asarray(array[row : row + 1])
    return jax.tree.map(take, self._joined)

  def of_all(self, request: step_lib.Request) -> step_lib.Request:
    """The request with the options of every row."""
    params = _joined(self._params, self._default, self._vocab_size)
    self._joined = params
    adjusters: list[adjusters_lib.Adjuster] = [*self._adjusters]
    if params.repetition_penalty is not None:
      adjusters.insert(0, adjusters_lib.RepetitionPenalty(self._vocab_size))
    if self._tables is not None:
      adjusters.append(self._tables)
    ends = watchers_lib.EndOfText(jnp.array(self._row_ends))
    others = watchers_lib.in_sections(self._watchers, self._sections)
    return request.replace(
      sampling=jax.tree.map(jnp.asarray, params),
      adjusters=tuple(adjusters),
      watchers=(ends, *others),
    )

  def of_all_with_states(
    self, request: step_lib.Request, state: step_lib.DecodeState
  ) -> tuple[step_lib.Request, step_lib.DecodeState]:
    """`of_all`, and the state with those of its adjusters.

    `state` has the states of the adjusters of the `request` of before.
    """
    known = dict(zip(self._names(request), state.adjusters, strict=True))
    request = self.of_all(request)
    texts = carried_lib.Texts(state.tokens, state.length, 0)
    states = tuple(
      known[name] if name in known else one.start(texts)
      for name, one in zip(self._names(request), request.adjusters, strict=True)
    )
    return request, state.replace(adjusters=states)

  def _names(self, request: step_lib.Request) -> list[Any]:
    """Names that tell the adjusters of a request apart, in their order."""
    names: list[Any] = [*range(len(self._adjusters))]
    if request.sampling.repetition_penalty is not None:
      names.insert(0, 'penalty')
    return [*names, 'tables'][: len(request.adjusters)]
