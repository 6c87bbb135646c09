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
import itertools
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


@dataclasses.dataclass
class _Text:
  """The text of a slot, which stays when its prompt has ended.

  A prompt that begins like it need not be read there from its beginning.
  """

  tokens: list[int] = dataclasses.field(default_factory=list)
  marked: int = 0  # Tokens at which recurrent states are marked.
  used: int = 0  # The number of its last reading; the smallest is the oldest.

  def kept(self, prompt: Sequence[int], is_recurrent: bool) -> int:
    """How many tokens of a prompt need not be read; see `cache.usable`."""
    pairs = zip(self.tokens, prompt, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    # The caches lack the last token, and the prompt needs one to go on from.
    cached = max(len(self.tokens) - 1, 0)
    kept = min(sum(1 for _ in same), cached, max(len(prompt) - 1, 0))
    if is_recurrent and kept < cached:
      return self.marked if self.marked <= kept else 0
    return kept


@dataclasses.dataclass(frozen=True)
class Growth:
  """The tokens that some steps added to a text."""

  tokens: list[int]  #: The new ids.
  origins: list[int]  #: Their sources, see `Generation`.
  #: The result, if the text has ended.
  generation: generation_lib.Generation | None = None


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
  """The parameters of one row on the host."""
  params = arguments_lib.to_params(sampling, 1, vocab_size)
  return jax.tree.map(np.asarray, params)


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
        [
          nothing if value is None else value.reshape(nothing.shape)
          for value in given[1:]
        ]
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
    # The parameters and the names of the adjusters of the last request.
    self._joined, self._names = self._default, list[Any]()
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

  def assign(
    self,
    row: int,
    sampling: sampling_lib.Sampling | None,
    eos_ids: Sequence[int] | None,
    automaton: automaton_lib.Automaton | None,
    section: int,
  ) -> None:
    """Gives a row the options of another prompt, see `Slots.insert`.

    Raises:
      ValueError: an option cannot be used; nothing has changed then.
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
    self._params[row], self._row_ends[row] = params, ends
    self._automata[row], self._sections[row] = automaton, section
    if not any(self._automata):
      self._tables = None
    elif self._tables is None:
      self._tables = automaton_lib.stack(self._automata, self._vocab_size)
    else:
      self._tables = automaton_lib.with_row(
        self._tables, row, self._automata, self._vocab_size
      )

  def free(self, row: int) -> None:
    """Drops the options of a prompt that has ended; they cost nothing then."""
    self._params[row], self._automata[row] = self._default, None

  def of_row(self, row: int) -> sampling_lib.SamplingParams:
    """The parameters of a row in the last request of `of_all`."""
    take = lambda array: jnp.asarray(array[row : row + 1])
    return jax.tree.map(take, self._joined)

  def of_all(
    self, request: step_lib.Request, state: step_lib.DecodeState | None = None
  ) -> tuple[step_lib.Request, tuple[Any, ...]]:
    """The request with the options of every row, and its adjusters' states.

    `state` has the states of the adjusters of the last request.
    """
    params = _joined(self._params, self._default, self._vocab_size)
    self._joined = params
    adjusters: dict[Any, adjusters_lib.Adjuster] = {}
    if params.repetition_penalty is not None:
      adjusters['penalty'] = adjusters_lib.RepetitionPenalty(self._vocab_size)
    adjusters |= enumerate(self._adjusters)
    if self._tables is not None:
      adjusters['tables'] = self._tables
    ends = watchers_lib.EndOfText(jnp.array(self._row_ends))
    others = watchers_lib.in_sections(self._watchers, self._sections)
    request = request.replace(
      sampling=jax.tree.map(jnp.asarray, params),
      adjusters=tuple(adjusters.values()),
      watchers=(ends, *others),
    )
    names, self._names = self._names, [*adjusters]
    if state is None:
      return request, ()
    states = dict(zip(names, state.adjusters, strict=True))
    texts = carried_lib.Texts(state.tokens, state.length, 0)
    for name, adjuster in adjusters.items():
      if name not in states:
        states[name] = adjuster.start(texts)
    return request, tuple(states[name] for name in adjusters)


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
  options that prompts under way set. With `top_p=1` in the `sampling` of all
  prompts the programs have top-p from the start; a prompt with another value
  needs no others.

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
    self._options = _RowOptions(
      request,
      options.get('sampling', sampling_lib.Sampling()),
      eos_ids,
      target.spec.vocab_size,
    )
    request, _ = self._options.of_all(request)
    self._target, self._config, self._reading = target, config, reading
    self._drafter, self._drafters = drafter, drafters
    self._request = loop.place_request(target, request)
    self._state = loop.start(target, drafter, self._request, config=config)
    # A row that is decoded alone, with its request and its state, which is
    # newer than the one in `_state`.
    self._alone: tuple[int, step_lib.Request, step_lib.DecodeState] | None = (
      None
    )
    self._slots: list[_Slot | None] = [None] * num_slots
    self._texts = [_Text() for _ in range(num_slots)]
    self._num_readings = 0
    #: By slot, the tokens of its last prompt that were not read again.
    self.num_kept: list[int] = [0] * num_slots

  def change_drafters(
    self, change: Callable[[drafter_lib.Drafter], drafter_lib.Drafter]
  ) -> None:
    """Decodes from now on with changed drafters, of the same stages.

    Drafters of other shapes compile other programs.
    """
    self._drafter = change(self._drafter)
    self._drafters = {
      most: change(drafter) for most, drafter in self._drafters.items()
    }

  @property
  def free(self) -> list[int]:
    """The slots that have no prompt."""
    return [row for row, slot in enumerate(self._slots) if slot is None]

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
    if not self.free:
      raise ValueError('no slot is free; call advance until one has ended')
    vocab_size = self._target.spec.vocab_size
    ids = arguments_lib.to_prompt('the prompt', prompt, vocab_size)
    arguments_lib.check_count('max_new_tokens', max_new_tokens, least=0)
    if len(ids) + max_new_tokens > self.context:
      raise ValueError(
        f'the prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens}'
        f' exceed the context of {self.context} tokens'
      )
    arguments_lib.row_keys(rng_key, 1)  # Refuses whatever is not a key.
    row, kept = self._best(ids if keeps else [])
    self._options.assign(row, sampling, eos_ids, automaton, section)
    self._together()
    request, states = self._options.of_all(self._request, self._state)
    self._request = loop.place_request(self._target, request)
    self._state = self._state.replace(adjusters=states)
    tokens, lengths = arguments_lib.pad([ids], self._state.tokens.shape[1])
    of_row = step_lib.Request(
      prompt=jnp.asarray(tokens),
      prompt_length=jnp.asarray(lengths),
      limit=jnp.array([max_new_tokens], jnp.int32),
      row_keys=rng_key.reshape(1),
      sampling=self._options.of_row(row),
    )
    self._slots[row] = _Slot(of_row, ids, kept)
    self.num_kept[row] = kept
    return row

  def _best(self, prompt: Sequence[int]) -> tuple[int, int]:
    """The free slot for a prompt, and how much of the prompt it has read.

    It is the slot that has most of the prompt, if that is most of what it has.
    Otherwise it is the slot that was not used for the longest time, so that a
    text which others may go on from stays.
    """
    is_recurrent = bool(self._state.target.cache.recurrent)
    kept = {
      row: self._texts[row].kept(prompt, is_recurrent) for row in self.free
    }
    most = max(kept, key=lambda row: kept[row])
    if not 2 * kept[most] >= len(self._texts[most].tokens) > 0:
      most = min(kept, key=lambda row: self._texts[row].used)
    return most, kept[most]

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
    rows, growths = self._go_on(num_steps, 1, apart=True), dict[int, Growth]()
    if not rows:
      return growths
    state = self._state if self._alone is None else self._alone[-1]
    tokens, origins, ends, reasons = hosts.read(
      (state.tokens, state.origins, state.length, state.reason)
    )
    done = []
    for row in rows:
      slot, index = self._slots[row], row if self._alone is None else 0
      assert slot is not None
      new = slice(len(slot.ids) + slot.num_seen, ends[index])
      slot.num_seen = int(ends[index]) - len(slot.ids)
      growths[row] = Growth(
        tokens[index, new].tolist(), origins[index, new].tolist()
      )
      if reasons[index] != accept.RUNNING:
        done.append(row)
    for row, generation in self._end(done).items():
      growths[row] = dataclasses.replace(growths[row], generation=generation)
    return growths

  def cancel(self, slot: int) -> generation_lib.Generation | None:
    """Ends a prompt; the result so far, or None if it is not read yet.

    Raises:
      ValueError: the slot has no prompt.
    """
    prompt = self._slots[slot] if slot in range(len(self._slots)) else None
    if prompt is None:
      raise ValueError(f'slot {slot!r} has no prompt to cancel')
    if not prompt.is_read:
      self._slots[slot] = None
      self._options.free(slot)
      return None
    generation = self._end([slot])[slot]
    self._state = loop.end_row(self._target, self._state, np.int32(slot))
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
    ended = dict[int, generation_lib.Generation]()
    while len(ended) < num_ended and any(self._slots):
      rows = self._go_on(loop.ALL_STEPS, num_ended - len(ended))
      reasons = hosts.read(self._state.reason)
      done = [row for row in rows if reasons[row] != accept.RUNNING]
      ended |= self._end(done)
    return ended

  @property
  def num_steps(self) -> int:
    """Batched target forwards so far, those that read prompts apart."""
    self._together()
    return int(hosts.read(self._state.counters.steps))

  def _together(self) -> None:
    """Puts the row that is decoded alone back among the others."""
    if self._alone is not None:
      row, _, state = self._alone
      self._state = loop.put_row(self._state, np.int32(row), state)
      self._alone = None

  def _read_prompts(self, most: int) -> bool:
    """Reads at most `most` tokens of new prompts; whether all are read."""
    for row, slot in enumerate(self._slots):
      if slot is not None and not slot.is_read:
        if not most:
          return False
        new, kept = slot.read(most)
        # Prompts that came since may have brought other options.
        new = new.replace(sampling=self._options.of_row(row))
        self._request, self._state = loop.insert(
          self._target,
          self._drafter,
          self._request,
          self._state,
          np.int32(row),
          new,
          kept,
        )
        most -= slot.num_read - int(kept)
        self._num_readings += 1
        self._texts[row] = _Text(
          slot.ids[: slot.num_read], slot.num_read - 1, self._num_readings
        )
        if not slot.is_read:
          return False
    return True

  def _go_on(
    self, num_steps: int, num_ended: int, *, apart: bool = False
  ) -> list[int]:
    """Reads new prompts, then decodes until `num_ended` of the read ones end.

    `apart`: whether a lone row may be decoded by a program for one row.

    Returns:
      The slots of the prompts that are read.
    """
    wait = any(slot and slot.is_read for slot in self._slots)
    all_read = self._read_prompts(self._reading if wait else loop.ALL_STEPS)
    pairs = enumerate(self._slots)
    rows = [row for row, slot in pairs if slot and slot.is_read]
    if not (
      apart
      and len(rows) == sum(map(bool, self._slots)) == 1 < len(self._slots)
      and len(self._state.length.devices()) == 1
      and self._options.are_apart
    ):
      self._together()
    elif self._alone is None:
      row = np.int32(rows[0])
      request, state = loop.take_row(self._request, self._state, row)
      self._alone = rows[0], request, state
    request, state = self._request, self._state
    if self._alone is not None:
      _, request, state = self._alone
    state = loop.advance(
      self._target,
      self._drafters[min(n for n in self._drafters if n >= len(rows))],
      request,
      state,
      np.int32(num_steps if all_read else 1),
      np.int32(len(state.length) - len(rows) + min(num_ended, len(rows))),
      config=self._config,
    )
    if self._alone is None:
      self._state = state
    else:
      self._alone = rows[0], request, state
    return rows

  def _end(self, rows: Sequence[int]) -> dict[int, generation_lib.Generation]:
    """The results of slots, which are free from now on."""
    if not rows:
      return {}  # Without reading the result.
    self._together()
    result, ended = hosts.read(loop.result_of(self._state)), {}
    for row in rows:
      slot, self._slots[row] = self._slots[row], None
      assert slot is not None
      self._options.free(row)
      generation = generation_lib.generation_of(
        _row_of(result, row),
        np.array([len(slot.ids)], np.int32),
        request=self._request,
        target=self._target,
        drafter=self._drafter,
      )
      # The caches may have values that are not finite.
      failed = generation.errors[0] is not None
      tokens = [*slot.ids, *generation.tokens[0]]
      self._texts[row].tokens = [] if failed else tokens
      ended[row] = generation
    return ended


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
