"""The options of a decode, and the request that is made of them."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools
import inspect
import numbers
from typing import Any
from typing import TypedDict
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec import adjusters as adjusters_lib
from specdec import arguments as arguments_lib
from specdec import memory
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec import step as step_lib
from specdec import watchers as watchers_lib
from specdec.draft import drafter as drafter_lib
from specdec.text import constraint as constraint_lib
from specdec.text import stop_strings
from specdec.tree import topology as topology_lib
from specdec.verify import accept
from specdec.verify import rejection

_Symbol = TypeVar('_Symbol')
_HEAD = 'Keyword Args:'


def documented(options: Any) -> Callable[[_Symbol], _Symbol]:
  """Has `help` show the options that a function or class takes as keywords."""

  def add(symbol: _Symbol) -> _Symbol:
    text, common = inspect.getdoc(symbol) or '', inspect.getdoc(options) or ''
    head = '\n' if _HEAD in text else f'\n\n{_HEAD}\n'
    symbol.__doc__ = text + head + common.partition(f'{_HEAD}\n')[2]
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
      tokens per step. None: as the `specdec.Generator` has it (by its plan, or
      by the processor for look-ups alone); else, always speculate.
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
    stop: stop strings, see `specdec.text.stop_strings`; a table for B rows.
    constraint: which tokens may follow which, a `specdec.Constraint`.
  """

  eos_ids: Sequence[int]
  stop: stop_strings.StopTable | None
  constraint: constraint_lib.Constraint | None


def check_names(options: Any, options_type: Any) -> None:
  """Refuses options that a `TypedDict` does not have."""
  names = options_type.__optional_keys__
  for name in options:
    if name not in names:
      all_names = sorted({*names, 'max_new_tokens'})
      hint = f'the options of a decode are {", ".join(all_names)}'
      if name in vars(sampling_lib.Sampling()):
        hint = f'give sampling=specdec.Sampling({name}=...)'
      raise TypeError(f'unexpected keyword argument {name!r}; {hint}')


def check_drafter(
  target: model_lib.LanguageModel, drafter: drafter_lib.Drafter
) -> None:
  """Refuses stages that share a name or do not fit the target."""
  ours = target.spec.vocab_size
  labels = ('target', 'plain', *drafter.labels)
  if len(set(labels)) < len(labels):
    raise ValueError(
      'every stage needs a name of its own, neither target nor plain, got'
      f' {drafter.labels}'
    )
  for stage in drafter.stages:
    facts = stage.scorer.facts
    if facts.vocab_size not in (None, ours):
      raise ValueError(
        f'the target has a vocabulary of {ours} tokens, the {stage.name} of'
        f' {facts.vocab_size}; choose one that was made with the tokenizer of'
        ' the target'
      )
    missing = set(facts.hidden) - set(target.spec.hidden)
    if missing:
      raise ValueError(
        f'the {stage.name} reads the hidden states {facts.hidden} of the'
        f' target, but its cache keeps {target.spec.hidden}; load the target'
        ' with the head'
      )


def to_break_even(break_even: Any) -> np.float32:
  """As a float32; 0, for no fallback, if it is None."""
  if break_even is None:
    return np.float32(0)
  is_number = isinstance(break_even, numbers.Real) and break_even is not True
  if not (is_number and 0 < break_even < np.inf):
    raise ValueError(
      'break_even must be a positive number, the time of a speculative step in'
      f' plain ones, or None; got {break_even!r}'
    )
  return np.float32(break_even)


def check_stop(
  stop: stop_strings.StopTable | None, batch_size: int, vocab_size: int
) -> None:
  """Refuses a table that was built for other shapes."""
  if stop is None:
    return
  rows, tokens = stop.start.shape[0], stop.next_state.shape[1]
  if (rows, tokens) != (batch_size, vocab_size):
    raise ValueError(
      f'stop was built for {rows} rows and {tokens} tokens, but there are'
      f' {batch_size} prompts and a vocabulary of {vocab_size}'
    )


def check_constraint(constraint: Any, batch_size: int, vocab_size: int) -> None:
  """Refuses a constraint whose functions return arrays of the wrong shape.

  Raises:
    ValueError: they do, or it is not a `specdec.Constraint`.
  """
  if constraint is None:
    return
  if not isinstance(constraint, constraint_lib.Constraint):
    raise ValueError(
      f'constraint must be a specdec.Constraint or None, got {constraint!r}'
    )
  states = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
  nodes = jax.ShapeDtypeStruct((batch_size, 2), jnp.int32)
  for name, function, arguments, shape in (
    ('first_state', lambda: constraint.first_state(batch_size), (), states),
    ('next_state', constraint.next_state, (nodes, nodes), nodes),
    (
      'allowed',
      lambda state: constraint.allowed(state, vocab_size),
      (nodes,),
      jax.ShapeDtypeStruct((batch_size, 2, vocab_size), jnp.bool_),
    ),
  ):
    result = jax.eval_shape(function, *arguments)
    if (result.shape, result.dtype) != (shape.shape, shape.dtype):
      raise ValueError(
        f'constraint.{name} must return an array of {shape.shape} and type'
        f' {shape.dtype} for {batch_size} rows and a vocabulary of'
        f' {vocab_size}, but returns {result.shape}, {result.dtype}'
      )


RULES: dict[str, Callable[[str], accept.Rule]] = {
  'match': lambda children: accept.MatchRule(),
  'rejection': rejection.RejectionRule,
  'traversal': rejection.TraversalRule,
  'block': functools.partial(rejection.TraversalRule, needs_chain=True),
}
"""The rules of verification by name, made from how children are chosen."""


def to_rule(
  verify: str | accept.Rule, children: str | None, drafter: drafter_lib.Drafter
) -> accept.Rule:
  """The rule of verification.

  Args:
    verify: one of `RULES`, or a rule.
    children: one of `sampling.CHILDREN`. None: the children of a given rule;
      else drawn without replacement if rule, topology and scorer allow it, or
      the best.
    drafter: the drafter.

  Raises:
    ValueError: the arguments are not known or do not go together.
  """
  if isinstance(verify, str) and verify in RULES:
    make_rule = RULES[verify]
  elif isinstance(verify, accept.Rule) and isinstance(verify, Hashable):
    make_rule = lambda children: verify
  else:
    raise ValueError(
      f'verify must be one of {tuple(RULES)} or a hashable'
      f' specdec.verify.accept.Rule, got {verify!r}'
    )
  rule, choices = make_rule(sampling_lib.BEST), (None, *sampling_lib.CHILDREN)
  if children not in choices:
    raise ValueError(f'children must be one of {choices}, got {children!r}')
  if children not in (None, sampling_lib.BEST) and not rule.may_draw:
    raise ValueError(
      f'verify={verify} wants the best children, got children={children};'
      ' choose verify=rejection to draw them'
    )
  shape, can_draw, is_chain, in_order = drafter.shape, False, False, False
  if isinstance(shape, topology_lib.Topology):
    can_draw = drafter.stages[0].scorer.facts.can_draw
    is_chain, in_order = shape.branching == 1, shape.has_all_siblings
  if rule.needs_chain and drafter.stages and not is_chain:
    raise ValueError(
      f'verify={verify} is for chains; choose a chain as the topology of the'
      ' drafter, or verify=traversal'
    )
  if children is None and rule is verify:
    children = rule.children
  if children is None:
    draws = can_draw and in_order and rule.may_draw
    children = sampling_lib.WITHOUT_REPLACEMENT if draws else sampling_lib.BEST
  if children != sampling_lib.BEST and not can_draw:
    raise ValueError(
      f'children={children} needs a drafter with a distribution to draw from'
      f' and a fixed topology; choose children={sampling_lib.BEST} or a'
      ' topology'
    )
  if children == sampling_lib.WITHOUT_REPLACEMENT and not in_order:
    raise ValueError(
      f'children={children} needs a topology in which each node has all'
      ' siblings of lower rank: the draws are tried in their order'
    )
  rule = make_rule(children)
  if rule.children != children:
    raise ValueError(
      f'verify={verify} has children={rule.children}, got children={children};'
      ' leave children out'
    )
  return rule


def _adjusters(
  params: sampling_lib.SamplingParams, options: Options, vocab_size: int
) -> tuple[adjusters_lib.Adjuster, ...]:
  """The adjusters of a request, in their order."""
  adjusters: list[adjusters_lib.Adjuster] = []
  if params.repetition_penalty is not None:
    adjusters.append(adjusters_lib.RepetitionPenalty(vocab_size))
  given = options.get('adjusters', ())
  if not isinstance(given, Sequence) or not all(
    isinstance(adjuster, adjusters_lib.Adjuster) for adjuster in given
  ):
    raise ValueError(
      f'adjusters must be a sequence of specdec.Adjuster, got {given!r}'
    )
  constraint = options.get('constraint')
  return (*adjusters, *given, *([] if constraint is None else [constraint]))


def _watchers(
  options: Options, vocab_size: int
) -> tuple[watchers_lib.Watcher, ...]:
  """The watchers of a request, in their order."""
  eos_ids, stop = options.get('eos_ids', ()), options.get('stop')
  ids = arguments_lib.to_ids('eos_ids', eos_ids, vocab_size)
  watchers: list[watchers_lib.Watcher] = []
  if ids:
    watchers.append(watchers_lib.EndOfText(jnp.array([ids], jnp.int32)))
  if stop is not None:
    watchers.append(watchers_lib.StopStrings(stop))
  if options.get('log_probs', False):
    watchers.append(watchers_lib.LogProbs())
  return tuple(watchers)


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
  check_drafter(target, drafter)
  check_stop(stop, num_rows, vocab_size)
  check_constraint(constraint, num_rows, vocab_size)
  params = arguments_lib.to_params(sampling, num_rows, vocab_size)
  threshold = to_break_even(options.get('break_even'))
  config = step_lib.DecodeConfig(
    max_new_tokens=arguments_lib.padded_room(prompts.room),
    rule=to_rule(
      options.get('verify', 'match'), options.get('children'), drafter
    ),
    fallback=bool(drafter.stages and (threshold > 0 or takes_plain_steps)),
    has_break_even=bool(drafter.stages and threshold > 0),
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
    row_keys=arguments_lib.row_keys(rng_key, num_rows),
    sampling=params,
    adjusters=_adjusters(params, options, vocab_size),
    watchers=_watchers(options, vocab_size),
    break_even=jnp.asarray(threshold),
  )
  return request, config
