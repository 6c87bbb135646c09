"""Options of prompts that share the rows of `specdec.slots.Slots`.

All rows share one compiled program, so every prompt has the options that all
prompts have, each with values of its own.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import arguments as arguments_lib
from specdec import sampling as sampling_lib
from specdec import step as step_lib
from specdec import watchers as watchers_lib
from specdec.text import automaton as automaton_lib
from specdec.text import constraint as constraint_lib

# The room for EOS ids is a multiple of this, so that prompts may have others.
_EOS_BLOCK = 8


def _row_params(
  sampling: sampling_lib.Sampling, num_rows: int, vocab_size: int
) -> sampling_lib.SamplingParams:
  """The parameters, with a `logit_bias` per row if there is one."""
  params = arguments_lib.to_params(sampling, num_rows, vocab_size)
  bias = params.logit_bias
  if bias is not None and bias.ndim == 1:
    bias = jnp.broadcast_to(bias, (num_rows, vocab_size))
  return params.replace(logit_bias=bias)


def _padded_ids(
  eos_ids: Sequence[int], vocab_size: int, width: int | None = None
) -> np.ndarray:
  """A row of `EndOfText`, `[width]` int32; None: as wide as it needs."""
  ids = arguments_lib.to_ids('eos_ids', eos_ids, vocab_size)
  width = width or -(-max(len(ids), 1) // _EOS_BLOCK) * _EOS_BLOCK
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
    self._vocab_size, self._sampling = vocab_size, sampling
    _row_params(sampling, 1, vocab_size)  # Refuses values per row.
    self._params = _row_params(sampling, num_rows, vocab_size)
    self._ends = _padded_ids(eos_ids, vocab_size)
    self._row_ends = np.tile(self._ends, (num_rows, 1))
    self._sections = np.zeros(num_rows, np.int32)
    # All rows share these.
    self._adjusters, self._watchers = request.adjusters, request.watchers
    self._tables: constraint_lib.Tables | None = None

  def request_of_all(self, request: step_lib.Request) -> step_lib.Request:
    """The request with parameters and watchers for every row."""
    return request.replace(
      sampling=self._params, watchers=self._watchers_of_rows()
    )

  def _watchers_of_rows(self) -> tuple[watchers_lib.Watcher, ...]:
    ends = watchers_lib.EndOfText(jnp.array(self._row_ends))
    others = watchers_lib.in_sections(self._watchers, self._sections)
    return ends, *others

  def params_of(
    self, sampling: sampling_lib.Sampling | None
  ) -> sampling_lib.SamplingParams:
    """The parameters of a prompt; ValueError if they set other options."""
    sampling = self._sampling if sampling is None else sampling
    params = _row_params(sampling, 1, self._vocab_size)
    largest = self._params.max_top_k
    if params.max_top_k and (largest is None or params.max_top_k < largest):
      params = params.replace(max_top_k=largest)
    structure: Any = jax.tree.structure(params)
    if structure != jax.tree.structure(self._params):
      raise ValueError(
        f'sampling={sampling} sets other options than the sampling of all'
        f' prompts, {self._sampling}; give values there that change nothing,'
        ' such as top_p=1, and no larger top_k than there'
      )
    return params

  def assign(
    self,
    request: step_lib.Request,
    state: step_lib.DecodeState,
    row: int,
    eos_ids: Sequence[int] | None,
    automaton: automaton_lib.Automaton | None,
    section: int,
  ) -> tuple[step_lib.Request, step_lib.DecodeState]:
    """The request and the state when a row gets another prompt.

    `eos_ids` None: the common ones; `automaton` None: everything is allowed;
    the text begins in `section`.

    Raises:
      ValueError: an option cannot be used; nothing has changed then.
    """
    ends = self._ends
    if eos_ids is not None:
      ends = _padded_ids(eos_ids, self._vocab_size, len(ends))
    if automaton is not None and any(
      adjuster.excludes for adjuster in self._adjusters
    ):
      raise ValueError(
        'automaton: these slots have a constraint for all prompts; leave out'
        ' one of the two'
      )
    same = np.array_equal(ends, self._row_ends[row])
    if not same or section != self._sections[row]:
      self._row_ends[row], self._sections[row] = ends, section
      request = request.replace(watchers=self._watchers_of_rows())
    if automaton is None and self._tables is None:
      return request, state
    if self._tables is None:
      num_rows = len(self._row_ends)
      free = jnp.zeros(num_rows, jnp.int32)
      state = state.replace(adjusters=(*state.adjusters, free))
      self._tables = automaton_lib.stack([None] * num_rows, self._vocab_size)
    self._tables = automaton_lib.with_row(self._tables, row, automaton)
    adjusters = (*self._adjusters, self._tables)
    return request.replace(adjusters=adjusters), state
