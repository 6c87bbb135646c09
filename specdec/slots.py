"""A decode whose rows are slots: when one ends, another prompt takes its place.

Three prompts in two slots, by steps of the target:

    slot 0   prompt 0 ----------------|  prompt 2 -------|
    slot 1   prompt 1 ---------------------------|

A prompt is read into the caches of its slot alone, long ones in parts, between
the steps of the others. With match verification a prompt gets the same tokens
as when it is decoded alone; with the other rules the same distribution. What a
prompt has in common with the last text of its slot is not read again.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import types
from typing import Any
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from specdec import adjusters as adjusters_lib
from specdec import arguments as arguments_lib
from specdec import carried as carried_lib
from specdec import decode_options
from specdec import generation as generation_lib
from specdec import hosts
from specdec import loop
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec import slot_texts
from specdec import step as step_lib
from specdec import watchers as watchers_lib
from specdec.draft import drafter as drafter_lib
from specdec.text import automaton as automaton_lib
from specdec.text import constraint as constraint_lib
from specdec.tree import topology as topology_lib
from specdec.verify import accept

# No smaller bound of `top_k`, so that few programs are compiled.
_LEAST_TOP_K = 64

# The room for EOS ids is a multiple of this, so that prompts may have others.
_EOS_BLOCK = 8


@dataclasses.dataclass
class _Slot:
  """A prompt in its slot."""

  request: step_lib.Request  # It has one row.
  ids: list[int]  # The prompt.
  num_read: int  # Tokens of the prompt.
  num_seen: int = 0  # New tokens that `step` has returned.

  @property
  def is_read(self) -> bool:
    return self.num_read == len(self.ids)

  def read(self, most: int) -> tuple[step_lib.Request, np.int32]:
    """Adds at most `most` tokens; returns `new` and `kept` of `loop.insert`."""
    kept, length = self.num_read, len(self.ids)
    self.num_read = min(kept + most, length)
    request = self.request.replace(
      prompt_length=np.array([self.num_read], np.int32),
      limit=self.request.limit if self.is_read else np.array([0], np.int32),
    )
    return request, np.int32(kept)


@dataclasses.dataclass(frozen=True)
class Growth:
  """The tokens that some steps added to a text."""

  tokens: list[int]  #: The new ids.
  origins: list[int]  #: Their sources, see `Generation`.
  #: The result, if the text has ended.
  generation: generation_lib.Generation | None = None


def _checked_prompt(
  prompt: Any, limit: Any, context: int, vocab_size: int
) -> list[int]:
  """The ids of a prompt that fits into a slot with its new tokens."""
  ids = arguments_lib.to_prompt('the prompt', prompt, vocab_size)
  arguments_lib.check_count('max_new_tokens', limit, least=0)
  if len(ids) + limit > context:
    raise ValueError(
      f'the prompt of {len(ids)} tokens and max_new_tokens={limit} exceed the'
      f' context of {context} tokens'
    )
  return ids


def _row_of(result: Any, row: int) -> Any:
  """The `DecodeResult` of a row, from one that was read."""
  cut = jax.tree.map(  # Totals are integers now.
    lambda array: array[row : row + 1] if array.ndim else array, result
  )
  # The forwards of the batch, for each of its rows.
  counters = cut.counters.replace(steps=cut.counters.target_forwards.sum())
  stages = tuple(
    stage.replace(forwards=stage.row_forwards.sum())
    for stage in cut.stage_counters
  )
  return cut.replace(counters=counters, stage_counters=stages)


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
  values: dict[str, Any] = {}
  everyone = default, *rows
  for name, nothing in neutral.items():
    given = [getattr(params, name) for params in everyone]
    if any(value is not None for value in given):
      values[name] = np.concatenate(
        [nothing if value is None else value for value in given[1:]]
      )
  if 'top_k' in values:
    bounds = [params.max_top_k for params in everyone if params.max_top_k]
    values['max_top_k'] = max(_LEAST_TOP_K, *bounds)
    values['some_keep_all'] = any(params.top_k is None for params in everyone)
  return sampling_lib.SamplingParams(**values)


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


class _RowOptions:
  """The options of each row, on the host.

  All rows share one compiled program. So it has every option that the prompts
  under way have, and what a prompt does not set has a value that changes
  nothing.

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
    kinds = {*map(type, self._watchers)}
    return not self._adjusters and kinds <= {watchers_lib.LogProbs}

  def check(
    self,
    sampling: sampling_lib.Sampling | None,
    eos_ids: Sequence[int] | None,
    automaton: automaton_lib.Automaton | None,
  ) -> tuple[sampling_lib.SamplingParams, np.ndarray]:
    """The parameters of a prompt, and the tokens that end it.

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
    """Drops the options of a prompt that has ended; they cost nothing then."""
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
    """`of_all`, and the state with the states of the adjusters of `of_all`.

    `state` has the states of the adjusters of the given request.
    """
    before = dict(zip(self._names(request), state.adjusters, strict=True))
    request = self.of_all(request)
    texts = carried_lib.Texts(state.tokens, state.length, 0)
    names = self._names(request)
    states = tuple(
      before[name] if name in before else adjuster.start(texts)
      for name, adjuster in zip(names, request.adjusters, strict=True)
    )
    return request, state.replace(adjusters=states)

  def _names(self, request: step_lib.Request) -> list[Any]:
    """Names that tell the adjusters of a request apart, in their order."""
    names: list[Any] = [*range(len(self._adjusters))]
    if request.sampling.repetition_penalty is not None:
      names.insert(0, 'penalty')
    return [*names, 'tables'][: len(request.adjusters)]


@dataclasses.dataclass
class _Rows:
  """The rows of a batch, and the prompts in them."""

  target: model_lib.LanguageModel
  drafter: drafter_lib.Drafter
  drafters: dict[float, drafter_lib.Drafter]  # See `_drafters_by_prompts`.
  config: step_lib.DecodeConfig
  options: _RowOptions
  reading: int
  request: step_lib.Request
  state: step_lib.DecodeState
  slots: list[_Slot | None]
  texts: slot_texts.SlotTexts
  #: A row that is decoded alone, with its request and its state, which is newer
  #: than the one in `state`.
  alone: tuple[int, step_lib.Request, step_lib.DecodeState] | None = None

  def together(self) -> None:
    """Puts the row that is decoded alone back among the others."""
    if self.alone is not None:
      row, _, state = self.alone
      self.state = loop.put_row(self.state, np.int32(row), state)
      self.alone = None

  def is_alone(self, rows: Sequence[int]) -> bool:
    """Whether a row may be decoded without the others, which all have ended."""
    is_one = len(rows) == sum(map(bool, self.slots)) == 1 < len(self.slots)
    num_devices = len(self.state.length.devices())
    return is_one and num_devices == 1 and self.options.are_apart

  def read_prompts(self, most: int) -> bool:
    """Reads at most `most` tokens of new prompts; whether all are read."""
    for row, slot in enumerate(self.slots):
      if slot is not None and not slot.is_read:
        if not most:
          return False
        new, kept = slot.read(most)
        # Prompts that came since may have brought other options.
        new = new.replace(sampling=self.options.of_row(row))
        self.request, self.state = loop.insert(
          self.target,
          self.drafter,
          self.request,
          self.state,
          np.int32(row),
          new,
          kept,
        )
        most -= slot.num_read - int(kept)
        self.texts.read(row, slot.ids[: slot.num_read])
        if not slot.is_read:
          return False
    return True

  def go_on(
    self, num_steps: int, num_ended: int, *, saves: bool = False
  ) -> list[int]:
    """Reads new prompts, then decodes until `num_ended` of the read ones end.

    `saves`: a row that is alone is decoded by a program of its own.

    Returns:
      The slots of the prompts that are read.
    """
    wait = any(slot and slot.is_read for slot in self.slots)
    all_read = self.read_prompts(self.reading if wait else loop.ALL_STEPS)
    pairs = enumerate(self.slots)
    rows = [row for row, slot in pairs if slot and slot.is_read]
    request, state, row = self.request, self.state, None
    if saves and self.is_alone(rows):
      (row,) = rows
      taken = self.alone or (row, *loop.take_row(request, state, np.int32(row)))
      _, request, state = taken
    else:
      self.together()
      state = self.state
    state = loop.advance(
      self.target,
      self.drafters[min(n for n in self.drafters if n >= len(rows))],
      request,
      state,
      np.int32(num_steps if all_read else 1),
      np.int32(len(state.length) - len(rows) + min(num_ended, len(rows))),
      config=self.config,
    )
    if row is None:
      self.state = state
    else:
      self.alone = row, request, state
    return rows

  def end(self, rows: Sequence[int]) -> dict[int, generation_lib.Generation]:
    """The results of slots, which are free from now on."""
    if not rows:
      return {}  # Without reading the result.
    self.together()
    result, ended = hosts.read(loop.result_of(self.state)), {}
    for row in rows:
      slot, self.slots[row] = self.slots[row], None
      assert slot is not None
      self.options.free(row)
      generation = generation_lib.generation_of(
        _row_of(result, row),
        np.array([len(slot.ids)], np.int32),
        request=self.request,
        target=self.target,
        drafter=self.drafter,
      )
      # The caches may have values that are not finite.
      failed = generation.errors[0] is not None
      tokens = [*slot.ids, *generation.tokens[0]]
      self.texts.end(row, [] if failed else tokens)
      ended[row] = generation
    return ended

  def grown(self, rows: Sequence[int]) -> dict[int, Growth]:
    """The growth of some prompts since the last look, by slot."""
    growths = dict[int, Growth]()
    if not rows:
      return growths
    state = self.state if self.alone is None else self.alone[-1]
    tokens, origins, ends, reasons = hosts.read(
      (state.tokens, state.origins, state.length, state.reason)
    )
    done = []
    for row in rows:
      slot, index = self.slots[row], row if self.alone is None else 0
      assert slot is not None
      new = slice(len(slot.ids) + slot.num_seen, ends[index])
      slot.num_seen = int(ends[index]) - len(slot.ids)
      added = tokens[index, new].tolist(), origins[index, new].tolist()
      growths[row] = Growth(*added)
      if reasons[index] != accept.RUNNING:
        done.append(row)
    ended = self.end(done)
    for row, generation in ended.items():
      growths[row] = dataclasses.replace(growths[row], generation=generation)
    return growths


@decode_options.documented(decode_options.Options)
class Slots:
  """A batch whose rows come and go.

  For example::

      slots = specdec.Slots(target, num_slots=2, context=256)
      slots.insert(first_prompt, first_key, max_new_tokens=64)
      slots.insert(second_prompt, second_key, max_new_tokens=64)
      for slot, generation in slots.advance().items():  # the first to end
        slots.insert(third_prompt, third_key, max_new_tokens=64)

  Three programs serve prompts of all lengths: one that makes the buffers, one
  that reads a prompt and one that decodes, the last for each size of the tree;
  `step` has another that decodes a prompt alone. All but the first have the
  options that prompts under way set. Where `sampling` of all prompts has a
  value that changes nothing, such as `top_p=1`, prompts that have another need
  no other programs.

  Args:
    target: the model whose output is kept exactly.
    num_slots: B, prompts that are decoded at once.
    context: the most tokens of a prompt and its continuation; the size of the
      buffers.
    drafter: drafts for the target, as for `specdec.generate`.
    tree_sizes: the nodes of the tree by the number of prompts under way, as
      `{2: 64, 8: 16}`: 64 with one or two, 16 with three to eight, and as the
      drafter says with more. 1 is plain decoding. More prompts at once want
      smaller trees. Empty: as the drafter says.
    reading: the most tokens of prompts that are read between two steps, while
      other prompts are under way.

  Raises:
    ValueError: an argument cannot be used; gives the reason.
  """

  def __init__(
    self,
    target: model_lib.LanguageModel,
    *,
    num_slots: int,
    context: int,
    drafter: drafter_lib.Drafter = drafter_lib.PLAIN,
    tree_sizes: Mapping[int, int] = types.MappingProxyType({}),
    reading: int = 512,
    **options: Unpack[decode_options.Options],
  ):
    arguments_lib.check_count('num_slots', num_slots)
    arguments_lib.check_count('context', context, target.spec.max_positions)
    arguments_lib.check_count('reading', reading)
    #: The most tokens of a prompt and its continuation.
    self.context = context
    drafters = _drafters_by_prompts(tree_sizes, drafter)
    eos_ids = options.pop('eos_ids', ())
    nothing = np.zeros((num_slots, 0), np.int32)
    ones = np.ones(num_slots, np.int32)
    request, config = decode_options.prepare(
      target,
      drafter,
      jax.random.key(0),
      decode_options.Prompts(nothing, ones, 0 * ones, context),
      options,
      takes_plain_steps=any(not other.stages for other in drafters.values()),
    )
    row_options = _RowOptions(
      request,
      options.get('sampling', sampling_lib.Sampling()),
      eos_ids,
      target.spec.vocab_size,
    )
    request = loop.place_request(target, row_options.of_all(request))
    state = loop.start(target, drafter, request, config=config)
    has_states = bool(state.target.cache.recurrent)
    self._rows = _Rows(
      target=target,
      drafter=drafter,
      drafters=drafters,
      config=config,
      options=row_options,
      reading=reading,
      request=request,
      state=state,
      slots=[None] * num_slots,
      texts=slot_texts.SlotTexts(num_slots, has_states),
    )
    #: By slot, the tokens of its last prompt that were not read again.
    self.num_kept: list[int] = [0] * num_slots

  def change_drafters(
    self, change: Callable[[drafter_lib.Drafter], drafter_lib.Drafter]
  ) -> None:
    """Decodes from now on with changed drafters, of the same stages.

    Drafters of other shapes compile other programs.
    """
    rows = self._rows
    rows.drafter = change(rows.drafter)
    rows.drafters = {n: change(one) for n, one in rows.drafters.items()}

  @property
  def free(self) -> list[int]:
    """The slots that have no prompt."""
    return [row for row, slot in enumerate(self._rows.slots) if slot is None]

  def insert(
    self,
    prompt: Sequence[int],
    rng_key: jax.Array,
    *,
    max_new_tokens: int,
    sampling: sampling_lib.Sampling | None = None,
    eos_ids: Sequence[int] | None = None,
    automaton: automaton_lib.Automaton | None = None,
    section: int = 0,
    keeps: bool = True,
  ) -> int:
    """Gives a free slot to a prompt; it is read by `advance`.

    Args:
      prompt: token ids.
      rng_key: a key; the tokens of the prompt depend on no other.
      max_new_tokens: the limit.
      sampling: how to choose its tokens. None: as all prompts.
      eos_ids: tokens that end it. None: the common ones.
      automaton: what may follow what; without a `constraint` of all prompts.
      section: in which its text begins, see `stop_strings.StopTable`.
      keeps: whether what its slot has read already is kept, and not read again.

    Returns:
      The slot.

    Raises:
      ValueError: no slot is free, or an argument cannot be used.
    """
    rows, vocab_size = self._rows, self._rows.target.spec.vocab_size
    if not self.free:
      raise ValueError('no slot is free; call advance until one has ended')
    ids = _checked_prompt(prompt, max_new_tokens, self.context, vocab_size)
    checked = rows.options.check(sampling, eos_ids, automaton)
    arguments_lib.row_keys(rng_key, 1)  # Refuses whatever is not a key.
    row, kept = rows.texts.best(self.free, ids if keeps else [])
    rows.options.assign(row, checked, automaton, section)
    rows.together()
    request, rows.state = rows.options.of_all_with_states(
      rows.request, rows.state
    )
    rows.request = loop.place_request(rows.target, request)
    tokens, lengths = arguments_lib.pad([ids], rows.state.tokens.shape[1])
    of_row = step_lib.Request(
      prompt=jnp.asarray(tokens),
      prompt_length=jnp.asarray(lengths),
      limit=jnp.array([max_new_tokens], jnp.int32),
      row_keys=rng_key.reshape(1),
      sampling=rows.options.of_row(row),
    )
    rows.slots[row] = _Slot(of_row, ids, kept)
    self.num_kept[row] = kept
    return row

  def step(self, num_steps: int = 1) -> dict[int, Growth]:
    """Reads new prompts, and decodes for some steps, or until a prompt ends.

    A prompt that is alone is decoded by a program for one row, unless all
    prompts have a constraint or stop strings, or there are several devices.

    Args:
      num_steps: the most steps; the host waits for the device once for them.

    Returns:
      By slot, what was added; the slots of prompts that ended are free again.
    """
    arguments_lib.check_count('num_steps', num_steps)
    rows = self._rows.go_on(num_steps, num_ended=1, saves=True)
    return self._rows.grown(rows)

  def cancel(self, slot: int) -> generation_lib.Generation | None:
    """Ends a prompt; the result so far, or None if it is not read yet.

    Raises:
      ValueError: the slot has no prompt.
    """
    rows = self._rows
    prompt = rows.slots[slot] if slot in range(len(rows.slots)) else None
    if prompt is None:
      raise ValueError(f'slot {slot!r} has no prompt to cancel')
    if not prompt.is_read:
      rows.slots[slot] = None
      rows.options.free(slot)
      return None
    generation = rows.end([slot])[slot]
    rows.state = loop.end_row(rows.target, rows.state, np.int32(slot))
    return generation

  def advance(self, num_ended: int = 1) -> dict[int, generation_lib.Generation]:
    """Reads the new prompts, and decodes until some have ended.

    Args:
      num_ended: how many, at least; fewer if there are no more.

    Returns:
      The results of prompts that ended, by slot; these slots are free again.
      With match verification each prompt gets the same tokens as when it is
      decoded alone. It gets the same statistics, too, with plain decoding and
      with fixed topologies without `break_even` and `tree_sizes`. Else all
      prompts decide together how much is drafted, and `plain_steps` counts the
      steps of all prompts so far.
    """
    arguments_lib.check_count('num_ended', num_ended)
    rows, ended = self._rows, dict[int, generation_lib.Generation]()
    while len(ended) < num_ended and any(rows.slots):
      read = rows.go_on(loop.ALL_STEPS, num_ended - len(ended))
      reasons = hosts.read(rows.state.reason)
      ended |= rows.end([row for row in read if reasons[row] != accept.RUNNING])
    return ended

  @property
  def num_steps(self) -> int:
    """Batched target forwards so far, those that read prompts apart."""
    self._rows.together()
    return int(hosts.read(self._rows.state.counters.steps))


def _drafters_by_prompts(
  tree_sizes: Mapping[int, int], drafter: drafter_lib.Drafter
) -> dict[float, drafter_lib.Drafter]:
  """The drafters by the most prompts under way that have them."""
  shape, drafters = drafter.shape, {np.inf: drafter}
  for num_prompts, num_nodes in tree_sizes.items():
    arguments_lib.check_count('tree_sizes', num_prompts)
    arguments_lib.check_count('tree_sizes', num_nodes, shape.num_nodes)
    if num_nodes == 1:
      drafters[num_prompts] = drafter_lib.PLAIN
    elif num_nodes == shape.num_nodes:
      drafters[num_prompts] = drafter
    elif isinstance(shape, topology_lib.TreeShape):
      smaller = dataclasses.replace(shape, num_nodes=num_nodes)
      drafters[num_prompts] = drafter.replace(shape=smaller)
    else:
      raise ValueError(
        f'tree_sizes={dict(tree_sizes)} has {num_nodes} nodes, but the drafter'
        f' fills a fixed topology of {shape.num_nodes}; give these, or 1'
      )
  return drafters
