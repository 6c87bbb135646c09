"""The host boundary: lists of token ids in, lists out, bad input refused."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import numbers
from typing import Any
from typing import Required
from typing import TypedDict
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from specdec.decode import advance
from specdec.decode import advance_recorded
from specdec.decode import ALL_STEPS
from specdec.decode import result_of
from specdec.decode import start
from specdec.drafter import Drafter
from specdec.model import Model
from specdec.request import DecodeConfig
from specdec.request import Request
from specdec.sampling import Sampling
from specdec.statistics import summarize
from specdec.stop import StopTable
from specdec.tracing import Block
from specdec.tracing import blocks_of
from specdec.tracing import row_forwards
from specdec.verification.rejection import BEST
from specdec.verification.rejection import WITHOUT_REPLACEMENT
from specdec.verification.verdict import EOS
from specdec.verification.verdict import LIMIT
from specdec.verification.verdict import NOT_FINITE
from specdec.verification.verdict import RUNNING
from specdec.verification.verdict import STOP

_SMALLEST_PROMPT_BUCKET = 32
_NEW_TOKENS_BUCKET = 64

# Between two looks at whether somebody wants to stop.
_STEPS_BETWEEN_CHECKS = 8

_FINISH_REASONS = {
  RUNNING: 'cancelled',
  LIMIT: 'length',
  EOS: 'eos',
  STOP: 'stop',
  NOT_FINITE: 'error',
}


class Options(TypedDict, total=False):
  """Keyword arguments of `generate` and `Decoding`.

  Attributes:
    max_new_tokens: the limit, one for all or one per row; 0 compiles, decodes
      nothing. Needed.
    room_for_new_tokens: size of the buffers, at least `max_new_tokens`, which
      is the default. Calls with one room share a program, whatever the limit.
    drafter: guesses for the target; None, the default, is plain decoding.
    sampling: how to choose tokens; greedy by default.
    eos_ids: tokens that end a row; none by default.
    stop: stop strings, from `specdec.stop.build_stop_table`.
    verify: `match` (the default), `rejection` or `block`; see
      `specdec.verification`.
    children: how the drafter comes by its guesses if they are not to match, one
      of `specdec.verification.rejection.CHILDREN`. By default they are drawn
      without replacement where the topology is fixed and the drafter has a
      distribution, and the best ones elsewhere.
    log_probs: whether to return those of the new tokens; by default not.
    break_even: how many plain steps a speculative one takes on this machine, as
      scripts/tune.py measures it. Decoding then goes on plainly wherever
      speculation emits fewer tokens per step than that; the tokens are the
      same. None, the default: it speculates throughout.
  """

  max_new_tokens: Required[int | Sequence[int]]
  room_for_new_tokens: int | None
  drafter: Drafter | None
  sampling: Sampling
  eos_ids: Sequence[int]
  stop: StopTable | None
  verify: str
  children: str | None
  log_probs: bool
  break_even: float | None


@dataclasses.dataclass(frozen=True)
class Generation:
  """What was generated.

  Attributes:
    tokens: the new ids of each row; if an EOS or a stop string ended it, that
      is included.
    origins: of each of them, an index of `labels`.
    labels: who may have proposed a token: `target`, whose own it is, then the
      proposers of each stage, from the outermost in.
    log_probs: of each of them in the target's own distribution, before bias,
      penalty, temperature and filters; None if they were not asked for.
    finish_reasons: of each row `length` (the limit), `eos`, `stop` (a stop
      string), `cancelled`, or `error`.
    errors: of each row, what is wrong with it, or None.
    stats: the figures of `specdec.statistics.summarize`.
  """

  tokens: list[list[int]]
  origins: list[list[int]]
  labels: tuple[str, ...]
  log_probs: list[list[float]] | None
  finish_reasons: list[str]
  errors: list[str | None]
  stats: dict[str, Any]


def _check_names(options):
  unknown = set(options) - set(Options.__annotations__)
  if unknown:
    raise TypeError(
      f'unexpected arguments {sorted(unknown)}; there are'
      f' {sorted(Options.__annotations__)}'
    )
  if 'max_new_tokens' not in options:
    raise TypeError('max_new_tokens is needed')


def _check_drafter(target, drafter):
  ours = target.definition.vocab_size
  labels = ('target', 'plain', *drafter.labels)
  if len(set(labels)) < len(labels):
    raise ValueError(
      'every stage needs a name of its own, neither target nor plain, got'
      f' {drafter.labels}'
    )
  for stage in drafter.stages:
    theirs = stage.scorer.vocab_size
    if theirs not in (None, ours):
      raise ValueError(
        f'the target has a vocabulary of {ours} tokens, the {stage.name} of'
        f' {theirs}; choose one that was made with the tokenizer of the target'
      )


def _check_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
  """Token ids as a list."""
  array = np.asarray(list(ids)) if isinstance(ids, Iterable) else np.zeros(())
  if array.ndim != 1 or (array.size and array.dtype.kind not in 'iu'):
    raise ValueError(f'{name} must be a list of token ids, got {ids!r}')
  outside = array[(array < 0) | (array >= vocab_size)]
  if outside.size:
    raise ValueError(
      f'{name} has token {outside[0]}, outside the vocabulary of {vocab_size}'
    )
  return [int(token) for token in array]


def _check_prompts(prompts: Any, vocab_size: int) -> list[list[int]]:
  """The prompts as lists."""
  if not isinstance(prompts, Iterable):
    raise ValueError(f'prompts must be lists of token ids, got {prompts!r}')
  checked = []
  for row, prompt in enumerate(prompts):
    checked.append(_check_ids(f'prompt {row}', prompt, vocab_size))
    if not checked[row]:
      raise ValueError(
        f'prompt {row} is empty; give at least one token, e.g. the EOS'
      )
  if not checked:
    raise ValueError('prompts is empty; give at least one')
  return checked


def _check_limits(prompts, max_new_tokens, room, context) -> np.ndarray:
  """The limits as `[B]`."""
  limits = np.asarray(max_new_tokens)
  if limits.shape not in ((), (len(prompts),)) or limits.dtype.kind not in 'iu':
    raise ValueError(
      'max_new_tokens must be an integer, or one per row'
      f' ({len(prompts)}), got {max_new_tokens}'
    )
  limits = np.broadcast_to(limits, len(prompts))
  if limits.min() < 0:
    raise ValueError(f'max_new_tokens must be at least 0, got {max_new_tokens}')
  is_integer = isinstance(room, numbers.Integral)
  if room is not None and not (is_integer and limits.max() <= room <= context):
    raise ValueError(
      f'room_for_new_tokens must be an integer from max_new_tokens='
      f'{max_new_tokens} to the context of the target, {context} tokens; got'
      f' {room!r}'
    )
  for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
    if len(prompt) + limit > context:
      raise ValueError(
        f'prompt {row} of {len(prompt)} tokens and max_new_tokens={limit}'
        f' exceed the context of the target, {context} tokens'
      )
  return limits.astype(np.int32)


def _dense_bias(bias: Any, batch_size: int, vocab_size: int) -> np.ndarray:
  """A mapping, or one per row, or an array, as `[V]` or `[B, V]`."""
  if bias is None:
    return np.zeros(vocab_size, np.float32)
  if isinstance(bias, Mapping):
    dense = np.zeros(vocab_size, np.float32)
    tokens = _check_ids('logit_bias', bias, vocab_size)
    try:
      dense[tokens] = [float(value) for value in bias.values()]
    except (TypeError, ValueError) as error:
      raise ValueError(
        f'logit_bias must map tokens to numbers, got {bias}'
      ) from error
    return dense
  if isinstance(bias, Sequence) and any(
    one is None or isinstance(one, Mapping) for one in bias
  ):
    if len(bias) != batch_size:
      raise ValueError(
        f'logit_bias must be one mapping or one per row ({batch_size}), got'
        f' {len(bias)}'
      )
    return np.stack([_dense_bias(one, batch_size, vocab_size) for one in bias])
  shape = np.shape(bias)
  if shape not in ((vocab_size,), (batch_size, vocab_size)):
    raise ValueError(
      'logit_bias must be a mapping from token to number, or an array of shape'
      f' {(vocab_size,)} or {(batch_size, vocab_size)}, got shape {shape}'
    )
  return bias


def check_sampling(
  sampling: Sampling, batch_size: int, vocab_size: int
) -> Sampling:
  """As `decode` wants it: validated, one value per row, biases as arrays.

  Args:
    sampling: as users give it.
    batch_size: B.
    vocab_size: V.

  Raises:
    ValueError: a value is out of range or of another shape; says which.
  """
  if sampling.logit_bias is not None:
    sampling = sampling.replace(
      logit_bias=_dense_bias(sampling.logit_bias, batch_size, vocab_size)
    )
  names = ('temperature', 'repetition_penalty', 'top_k', 'top_p', 'min_p')
  for name in names:
    value = getattr(sampling, name)
    shape = () if value is None or isinstance(value, str) else np.shape(value)
    if shape not in ((), (batch_size,)):
      raise ValueError(
        f'{name} must be one number or one per row ({batch_size}), got an'
        f' array of shape {shape}'
      )
  sampling = sampling.validated()
  # One per row in any case: one program for both.
  per_row = {
    name: jnp.broadcast_to(getattr(sampling, name), batch_size)
    for name in names
    if getattr(sampling, name) is not None
  }
  return sampling.replace(**per_row)


def _check_break_even(break_even: Any) -> jax.Array | None:
  if break_even is None:
    return None
  is_number = isinstance(break_even, numbers.Real) and break_even is not True
  if not (is_number and 0 < break_even < np.inf):
    raise ValueError(
      'break_even must be a positive number, how many plain steps a speculative'
      f' one takes, or None; got {break_even!r}'
    )
  return jnp.asarray(break_even, jnp.float32)


def _check_stop(stop: StopTable, batch_size: int, vocab_size: int) -> None:
  rows, tokens = stop.start.shape[0], stop.next_state.shape[1]
  if (rows, tokens) != (batch_size, vocab_size):
    raise ValueError(
      f'stop was built for {rows} rows and {tokens} tokens, but there are'
      f' {batch_size} prompts and a vocabulary of {vocab_size}'
    )


def _check_rule(
  verify: str, children: str | None, drafter: Drafter | None
) -> str:
  """What `children` is to be."""
  topology, can_draw = None, False
  if drafter is not None:
    topology, can_draw = drafter.config.topology, drafter.scorer.can_draw
  is_chain = topology is not None and topology.branching == 1
  if verify == 'block' and drafter is not None and not is_chain:
    raise ValueError(
      'verify=block is for chains; choose a chain as the topology of the'
      ' drafter, or verify=rejection'
    )
  if children is None:
    can_draw &= topology is not None and topology.has_all_siblings
    return WITHOUT_REPLACEMENT if can_draw and verify != 'match' else BEST
  if children == BEST:
    return children
  if topology is None or not can_draw:
    raise ValueError(
      f'children={children} needs a drafter with a distribution to draw from'
      f' and a fixed topology; choose children={BEST} or a topology'
    )
  if children == WITHOUT_REPLACEMENT and not topology.has_all_siblings:
    raise ValueError(
      f'children={children} needs a topology in which every rank is there with'
      ' all ranks before it: the draws are tried in their order'
    )
  return children


def row_keys(rng_key: jax.Array, batch_size: int) -> jax.Array:
  """One key per row: `[B]` keys as given, or one key folded with the row."""
  dtype = getattr(rng_key, 'dtype', type(rng_key))
  if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    raise ValueError(
      'rng_key must be made by jax.random.key, whose keys are scalars, got'
      f' {dtype}'
    )
  if rng_key.shape == (batch_size,):
    return rng_key
  if rng_key.shape:
    raise ValueError(
      f'rng_key must be one key or one per row ({batch_size}), got'
      f' {rng_key.shape}'
    )
  rows = jnp.arange(batch_size)
  return jax.vmap(jax.random.fold_in, (None, 0))(rng_key, rows)


def _round_up(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple


def _prompt_bucket(length: int) -> int:
  return max(_SMALLEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def padded_shape(
  prompts: Sequence[Sequence[int]], room: int
) -> tuple[int, int]:
  """The slots of a decode: of its prompts, P, and of new tokens.

  Args:
    prompts: of a batch.
    room: for new tokens, see `Options`.
  """
  return (
    _prompt_bucket(max(map(len, prompts))),
    _round_up(max(room, 1), _NEW_TOKENS_BUCKET),
  )


def _pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  bucket = _prompt_bucket(int(lengths.max()))
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  return padded, lengths


class Decoding:
  """A decode that can be watched, and stopped, while it goes on.

      decoding = specdec.Decoding(target, key, prompts, max_new_tokens=64)
      for new_tokens in decoding:  # of each row, block by block
        ...
      generation = decoding.result()  # at any time

  Prompts are padded to powers of two and the room for new tokens to multiples
  of 64, so that few shapes are compiled and short prompts do not pay for the
  longest context.

  Args:
    target: the model whose output is kept exactly.
    rng_key: one key, which is folded with the row number, or `[B]` keys: a row
      with a given key has the same tokens in any batch.
    prompts: B lists of token ids, of any lengths, none empty.
    **options: see `Options`.

  Raises:
    TypeError: an argument is missing or not known.
    ValueError: an argument cannot be used; says which and why.
  """

  def __init__(
    self,
    target: Model,
    rng_key: jax.Array,
    prompts: Sequence[Sequence[int]],
    **options: Unpack[Options],
  ):
    _check_names(options)
    definition = target.definition
    drafter = options.get('drafter')
    eos_ids = options.get('eos_ids', ())
    stop = options.get('stop')
    verify = options.get('verify', 'match')
    prompts = _check_prompts(prompts, definition.vocab_size)
    batch_size = len(prompts)
    if drafter is not None:
      _check_drafter(target, drafter)
    if stop is not None:
      _check_stop(stop, batch_size, definition.vocab_size)
    room = options.get('room_for_new_tokens')
    limits = _check_limits(
      prompts, options['max_new_tokens'], room, definition.max_positions
    )
    padded, self._prompt_lengths = _pad(prompts)
    self._target, self._drafter = target, drafter
    self._config = DecodeConfig(
      max_new_tokens=_round_up(
        max(limits.max() if room is None else room, 1), _NEW_TOKENS_BUCKET
      ),
      eos_ids=tuple(_check_ids('eos_ids', eos_ids, definition.vocab_size)),
      verify=verify,
      children=_check_rule(verify, options.get('children'), drafter),
      log_probs=options.get('log_probs', False),
    )
    self._request = Request(
      prompt=jnp.asarray(padded),
      prompt_length=jnp.asarray(self._prompt_lengths),
      limit=jnp.asarray(limits),
      row_keys=row_keys(rng_key, batch_size),
      sampling=check_sampling(
        options.get('sampling', Sampling()), batch_size, definition.vocab_size
      ),
      stop=stop,
      break_even=_check_break_even(options.get('break_even')),
    )
    self._state = start(target, drafter, self._request, config=self._config)
    self._ends = self._prompt_lengths
    self._reasons = np.where(limits > 0, RUNNING, LIMIT)

  @property
  def done(self) -> bool:
    """Whether all rows are."""
    return bool(np.all(self._reasons != RUNNING))

  @property
  def finish_reasons(self) -> list[str | None]:
    """Of each row, see `Generation`; None while it goes on."""
    return [
      None if reason == RUNNING else _FINISH_REASONS[int(reason)]
      for reason in self._reasons
    ]

  def step(self, num_steps: int = 1) -> list[list[int]]:
    """Some target forwards of all rows that go on; their new tokens."""
    self._state = advance(
      self._target,
      self._drafter,
      self._request,
      self._state,
      np.int32(num_steps),
      config=self._config,
    )
    return self._new_tokens()

  def step_recorded(self) -> list[Block | None]:
    """One target forward of all rows that go on, and what happened in it.

    The tokens are those of `step`. Compiles a program of its own.

    Returns:
      Of each row its block; None if it was done before.
    """
    guard = self._state.guard
    before = row_forwards(self._state, self._drafter)
    self._state, record = advance_recorded(
      self._target,
      self._drafter,
      self._request,
      self._state,
      speculate=guard is None or bool(guard.speculating),
      config=self._config,
    )
    after = row_forwards(self._state, self._drafter)
    starts = self._ends
    return blocks_of(record, starts, self._new_tokens(), before, after)

  def record(self) -> list[list[Block]]:
    """To the end by `step_recorded`; the blocks of each row."""
    rows: list[list[Block]] = [[] for _ in self._ends]
    while not self.done:
      for blocks, block in zip(rows, self.step_recorded(), strict=True):
        if block is not None:
          blocks.append(block)
    return rows

  def _new_tokens(self) -> list[list[int]]:
    """Of each row, since the last look."""
    tokens, ends, self._reasons = jax.device_get(
      (self._state.tokens, self._state.length, self._state.reason)
    )
    spans = zip(tokens, self._ends, ends, strict=True)
    new = [row[begin:end].tolist() for row, begin, end in spans]
    self._ends = ends
    return new

  def run(self, should_stop: Callable[[], bool] | None = None) -> None:
    """To the end, or until somebody wants to stop; see `generate`."""
    if should_stop is None:
      self.step(ALL_STEPS)
    else:
      while not (self.done or should_stop()):
        self.step(_STEPS_BETWEEN_CHECKS)

  def __iter__(self) -> Iterator[list[list[int]]]:
    """The new tokens of each row, one step after the other, until all end."""
    while not self.done:
      yield self.step()

  def result(self) -> Generation:
    """All new tokens so far, and the statistics."""
    result = result_of(self._state)
    starts = self._prompt_lengths
    tokens, origins, log_probs, ends, reasons = jax.device_get(
      (
        result.tokens,
        result.origins,
        result.log_probs,
        result.length,
        result.reason,
      )
    )
    spans = [slice(*span) for span in zip(starts, ends, strict=True)]
    cut = lambda array: [array[row, span] for row, span in enumerate(spans)]
    lists = lambda array: [row.tolist() for row in cut(array)]
    drafter = self._drafter
    return Generation(
      tokens=lists(tokens),
      origins=lists(origins),
      labels=('target', *(drafter.labels if drafter is not None else ())),
      log_probs=None if log_probs is None else lists(log_probs),
      finish_reasons=[_FINISH_REASONS[int(reason)] for reason in reasons],
      errors=[
        f'row {row}: the target gave logits that are not finite for position'
        f' {end} (new token {end - begin})'
        if reason == NOT_FINITE
        else None
        for row, (begin, end, reason) in enumerate(
          zip(starts, ends, reasons, strict=True)
        )
      ],
      stats=summarize(
        result.counters,
        result.stage_counters,
        np.concatenate(cut(origins)),
        starts,
        ends - starts,
        target=self._target.definition,
        drafter=drafter,
        plain_steps=result.plain_steps,
      ),
    )


def generate(
  target: Model,
  rng_key: jax.Array,
  prompts: Sequence[Sequence[int]],
  *,
  should_stop: Callable[[], bool] | None = None,
  **options: Unpack[Options],
) -> Generation:
  """Continues each prompt; the drafter changes the speed, never the tokens.

  Args:
    target: see `Decoding`.
    rng_key: likewise.
    prompts: likewise.
    should_stop: asked now and then, from this thread; if it says yes, rows that
      are not done are cancelled, and have the tokens they have.
    **options: see `Options`.

  Returns:
    The new tokens and the statistics.

  Raises:
    ValueError: an argument cannot be used; says which and why.
  """
  decoding = Decoding(target, rng_key, prompts, **options)
  decoding.run(should_stop)
  return decoding.result()
