"""The options of a decode: what they are, and what is made of them."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import inspect
from typing import Any
from typing import TypedDict
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec import adjusters as adjusters_lib
from specdec import checks as checks_lib
from specdec import constraint as constraint_lib
from specdec import memory
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec import step as step_lib
from specdec import stop_strings
from specdec import watchers as watchers_lib
from specdec.draft import drafter as drafter_lib
from specdec.verify import accept

_Symbol = TypeVar('_Symbol')
_HEAD = 'Keyword Args:'


def documented(options: Any) -> Callable[[_Symbol], _Symbol]:
  """Has `help` show the options that a function or class takes as keywords."""

  def add(symbol: _Symbol) -> _Symbol:
    own, common = inspect.getdoc(symbol) or '', inspect.getdoc(options) or ''
    head = '\n' if _HEAD in own else f'\n\n{_HEAD}\n'
    symbol.__doc__ = own + head + common.partition(f'{_HEAD}\n')[2]
    return symbol

  return add


class CommonOptions(TypedDict, total=False):
  """Options of every decode, of ids and of texts; each may be left out.

  Keyword Args:
    sampling: how to choose tokens; greedy by default. Each value is one for all
      rows, or one per row.
    verify: `match`, `rejection`, `traversal`, `block` or a `Rule`, see
      `specdec.verify`.
    children: how the drafter chooses its candidates for the other rules than
      `match`, one of `specdec.sampling.CHILDREN`; None for its default.
    log_probs: whether to return the log-probabilities of the new tokens.
    adjusters: what else changes the logits by the text so far, each a
      `specdec.Adjuster`; they apply after the repetition penalty, in their
      order, and before a constraint.
    break_even: the time of a speculative step in plain ones, as scripts/tune.py
      measures it: decoding goes on plainly wherever speculation emits fewer
      tokens per step. None: that of the `models.Generator`; without it, always
      speculate.
  """

  sampling: sampling_lib.Sampling
  verify: str | accept.Rule
  children: str | None
  log_probs: bool
  adjusters: Sequence[adjusters_lib.Adjuster]
  break_even: float | None


@documented(CommonOptions)
class Options(CommonOptions, total=False):
  """Options of a decode of token ids; each may be left out.

  Keyword Args:
    eos_ids: tokens that end a row.
    stop: stop strings, see `specdec.stop_strings`; a table for B rows.
    constraint: which tokens may follow which, a `specdec.Constraint`.
  """

  eos_ids: Sequence[int]
  stop: stop_strings.StopTable | None
  constraint: constraint_lib.Constraint | None


def check_names(options: Any, known: Any) -> None:
  """Refuses options that are not among those of a `TypedDict`."""
  names = known.__optional_keys__
  for name in options:
    if name not in names:
      raise TypeError(
        f'unexpected keyword argument {name!r}; the options of a decode are'
        f' {", ".join(sorted(names))}'
      )


def _adjusters(
  params: sampling_lib.SamplingParams, options: Options, vocab_size: int
) -> tuple[adjusters_lib.Adjuster, ...]:
  """The adjusters of a request, in their order."""
  adjusters: list[adjusters_lib.Adjuster] = []
  if params.repetition_penalty is not None:
    adjusters.append(adjusters_lib.RepetitionPenalty(vocab_size))
  given = options.get('adjusters', ())
  if not isinstance(given, Sequence) or not all(
    isinstance(one, adjusters_lib.Adjuster) for one in given
  ):
    raise ValueError(
      f'adjusters must be a sequence of specdec.Adjuster, got {given!r}'
    )
  constraint = options.get('constraint')
  return (*adjusters, *given, *([] if constraint is None else [constraint]))


@dataclasses.dataclass(frozen=True)
class Prompts:
  """The prompts of a decode, checked, as arrays on the host."""

  tokens: np.ndarray  #: `[B, P]` int32, padded.
  length: np.ndarray  #: `[B]` int32.
  limit: np.ndarray  #: `[B]` int32, the new tokens per row, at most `room`.
  room: int  #: Room for new tokens.


def prepare(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  rng_key: jax.Array,
  prompts: Prompts,
  options: Options,
  *,
  takes_plain_steps: bool = False,
) -> tuple[step_lib.Request, step_lib.DecodeConfig]:
  """The checked request of a decode, and its configuration.

  `takes_plain_steps`: whether the caller takes plain steps between speculative
  ones. The drafter must then read what these add.

  Raises:
    TypeError: an option is not known.
    ValueError: an option cannot be used, or memory does not suffice.
  """
  check_names(options, Options)
  num_rows, vocab_size = len(prompts.tokens), target.spec.vocab_size
  stop, constraint = options.get('stop'), options.get('constraint')
  sampling = options.get('sampling', sampling_lib.Sampling())
  checks_lib.check_drafter(target, drafter)
  checks_lib.check_stop(stop, num_rows, vocab_size)
  checks_lib.check_constraint(constraint, num_rows, vocab_size)
  params = checks_lib.to_params(sampling, num_rows, vocab_size)
  threshold = checks_lib.to_break_even(options.get('break_even'))
  config = step_lib.DecodeConfig(
    max_new_tokens=checks_lib.padded_room(prompts.room),
    rule=checks_lib.to_rule(
      options.get('verify', 'match'), options.get('children'), drafter
    ),
    fallback=bool(drafter.stages and (threshold > 0 or takes_plain_steps)),
  )
  memory.check_fits(
    memory.decode_bytes(
      target, drafter, prompts.tokens.shape, config, constraint
    )
  )
  request = step_lib.Request(
    prompt=jnp.asarray(prompts.tokens),
    prompt_length=jnp.asarray(prompts.length),
    limit=jnp.asarray(prompts.limit),
    row_keys=checks_lib.row_keys(rng_key, num_rows),
    sampling=params,
    adjusters=_adjusters(params, options, vocab_size),
    watchers=watchers_lib.make_watchers(
      eos_ids=checks_lib.to_ids(
        'eos_ids', options.get('eos_ids', ()), vocab_size
      ),
      stop=stop,
      log_probs=options.get('log_probs', False),
    ),
    break_even=jnp.asarray(threshold),
  )
  return request, config
