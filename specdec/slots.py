"""A decode whose rows are slots: when one ends, another prompt takes its place.

For example, three prompts in two slots, by steps of the target:

    slot 0   prompt 0 ----------------|  prompt 2 -------|
    slot 1   prompt 1 ---------------------------|

A prompt is read into the caches of its slot alone, long ones in parts, between
the steps of the others. The tokens of a prompt are those of decoding it alone,
with match verification; with the other rules they have the same distribution.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import checks
from specdec import hosts
from specdec.draft.drafter import Drafter
from specdec.draft.drafter import PLAIN
from specdec.generation import Generation
from specdec.generation import generation_of
from specdec.loop import advance
from specdec.loop import ALL_STEPS
from specdec.loop import DecodeResult
from specdec.loop import insert
from specdec.loop import place_request
from specdec.loop import result_of
from specdec.loop import start
from specdec.memory import check_fits
from specdec.memory import decode_bytes
from specdec.model import LanguageModel
from specdec.sampling import Sampling
from specdec.sampling import SamplingParams
from specdec.step import DecodeConfig
from specdec.step import Request
from specdec.tree.topology import TreeShape
from specdec.verify.accept import Rule
from specdec.verify.accept import RUNNING
from specdec.verify.stop_strings import StopTable
from specdec.watchers import EndOfText
from specdec.watchers import make_watchers

# The room for EOS ids is a multiple of this, so that prompts may have others.
_EOS_BLOCK = 8


@dataclasses.dataclass
class _Slot:
  """A prompt in its slot."""

  request: Request  # Of one row.
  prompt_length: int
  num_read: int = 0  # Tokens of the prompt.

  @property
  def is_read(self) -> bool:
    return self.num_read == self.prompt_length


class Slots:
  """A batch whose rows come and go.

  For example::

      slots = specdec.Slots(target, num_slots=2, context=256)
      slots.insert(first_prompt, first_key, max_new_tokens=64)
      slots.insert(second_prompt, second_key, max_new_tokens=64)
      for slot, generation in slots.advance().items():  # the first to end
        slots.insert(third_prompt, third_key, max_new_tokens=64)

  Three programs serve prompts of all lengths: one that makes the buffers, one
  that reads a prompt and one that decodes, the last for each size of the tree.

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
    sampling: how to choose tokens, unless a prompt says otherwise.
    eos_ids: tokens that end a row, unless a prompt says otherwise.
    stop: stop strings, a table for B rows.
    verify: `match`, `rejection` or `block`, see `specdec.verify`.
    children: see `specdec.generate`.
    log_probs: whether to return the log-probabilities of the new tokens.
    break_even: see `specdec.generate`.
    reading: the most tokens of prompts that are read between two steps, while
      other prompts are under way.

  Raises:
    ValueError: an argument cannot be used; says which and why.
  """

  def __init__(
    self,
    target: LanguageModel,
    *,
    num_slots: int,
    context: int,
    drafter: Drafter = PLAIN,
    tree_sizes: Mapping[int, int] = types.MappingProxyType({}),
    sampling: Sampling = Sampling(),
    eos_ids: Sequence[int] = (),
    stop: StopTable | None = None,
    verify: str | Rule = 'match',
    children: str | None = None,
    log_probs: bool = False,
    break_even: float | None = None,
    reading: int = 512,
  ):
    spec = target.spec
    checks.check_count('num_slots', num_slots)
    checks.check_count('context', context, spec.max_positions)
    checks.check_count('reading', reading)
    checks.check_drafter(target, drafter)
    checks.check_stop(stop, num_slots, spec.vocab_size)
    threshold = checks.check_break_even(break_even)
    #: The most tokens of a prompt and its continuation.
    self.context = context
    self._target, self._drafter, self._reading = target, drafter, reading
    self._drafters = _check_sizes(tree_sizes, drafter)
    self._default = sampling
    params = self._params(sampling, num_slots)
    default = checks.check_ids('eos_ids', eos_ids, spec.vocab_size)
    width = -(-max(len(default), 1) // _EOS_BLOCK) * _EOS_BLOCK
    self._default_eos = default
    #: The ids of each slot, as `EndOfText` has them.
    self._eos_ids = np.full((num_slots, width), -1, np.int32)
    self._eos_ids[:, : len(default)] = default
    self._params(sampling, 1)  # Refuses values per row: prompts share them.
    # After plain steps the stages have text to read.
    rests = [one for one in self._drafters.values() if not one.stages]
    self._config = DecodeConfig(
      max_new_tokens=checks.padded_room(context),
      rule=checks.to_rule(verify, children, drafter),
      fallback=bool(drafter.stages and (threshold > 0 or rests)),
    )
    check_fits(decode_bytes(target, drafter, (num_slots, 0), self._config))
    request = Request(
      prompt=jnp.zeros((num_slots, 0), jnp.int32),
      prompt_length=jnp.ones(num_slots, jnp.int32),
      limit=jnp.zeros(num_slots, jnp.int32),
      row_keys=checks.row_keys(jax.random.key(0), num_slots),
      sampling=params,
      watchers=make_watchers(
        eos_ids=self._eos_ids,
        stop=stop,
        penalty_vocab_size=(
          0 if params.repetition_penalty is None else spec.vocab_size
        ),
        log_probs=log_probs,
      ),
      break_even=jnp.asarray(threshold),
    )
    self._request = place_request(target, request)
    self._state = start(target, drafter, self._request, config=self._config)
    self._slots: list[_Slot | None] = [None] * num_slots

  def _params(self, sampling: Sampling, num_rows: int) -> SamplingParams:
    vocab_size = self._target.spec.vocab_size
    params = checks.check_sampling(sampling, num_rows, vocab_size)
    bias = params.logit_bias
    if bias is not None and bias.ndim == 1:
      bias = jnp.broadcast_to(bias, (num_rows, vocab_size))
    return params.replace(logit_bias=bias)

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
    sampling: Sampling | None = None,
    eos_ids: Sequence[int] | None = None,
  ) -> int:
    """Gives a free slot to a prompt; it is read by `advance`.

    Args:
      prompt: token ids.
      rng_key: a key; the tokens of the prompt depend on no other.
      max_new_tokens: the limit.
      sampling: how to choose its tokens. It must set the options that the
        sampling of all prompts sets, and no others. None: as that.
      eos_ids: tokens that end it. None: those of all prompts.

    Returns:
      The slot.

    Raises:
      ValueError: no slot is free, or an argument cannot be used.
    """
    spec, row = self._target.spec, next(iter(self.free), None)
    if row is None:
      raise ValueError('no slot is free; call advance until one has ended')
    ids = checks.check_ids('the prompt', prompt, spec.vocab_size)
    if not ids:
      raise ValueError(
        'the prompt is empty; give at least one token, e.g. the EOS'
      )
    checks.check_count('max_new_tokens', max_new_tokens, least=0)
    if len(ids) + max_new_tokens > self.context:
      raise ValueError(
        f'the prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens}'
        f' exceed the context of {self.context} tokens'
      )
    params = self._params(self._default if sampling is None else sampling, 1)
    largest = self._request.sampling.max_top_k
    if params.max_top_k and (largest is None or params.max_top_k < largest):
      params = params.replace(max_top_k=largest)
    structure: Any = jax.tree.structure(params)
    if structure != jax.tree.structure(self._request.sampling):
      raise ValueError(
        f'sampling={sampling} sets other options than that of all prompts,'
        f' {self._default}; give values there that change nothing, such as'
        ' top_p=1, and no larger top_k than there'
      )
    checks.row_keys(rng_key, 1)  # Refuses what is no key.
    self._set_eos(row, self._default_eos if eos_ids is None else eos_ids)
    tokens = np.zeros((1, self._state.tokens.shape[1]), np.int32)
    tokens[0, : len(ids)] = ids
    request = Request(
      prompt=jnp.asarray(tokens),
      prompt_length=jnp.array([len(ids)], jnp.int32),
      limit=jnp.array([max_new_tokens], jnp.int32),
      row_keys=rng_key.reshape(1),
      sampling=params,
    )
    self._slots[row] = _Slot(request, len(ids))
    return row

  def _set_eos(self, row: int, eos_ids: Sequence[int]) -> None:
    """Changes the tokens that end a slot, which is free."""
    ids = checks.check_ids('eos_ids', eos_ids, self._target.spec.vocab_size)
    width = self._eos_ids.shape[1]
    if len(ids) > width:
      raise ValueError(
        f'eos_ids of a prompt has {len(ids)} tokens, but there is room for'
        f' {width}; give fewer, or more for all prompts'
      )
    padded = np.array([*ids, *[-1] * (width - len(ids))], np.int32)
    if np.array_equal(padded, self._eos_ids[row]):
      return
    self._eos_ids[row] = padded
    others = [
      one for one in self._request.watchers if not isinstance(one, EndOfText)
    ]
    own = EndOfText(jnp.array(self._eos_ids))
    self._request = self._request.replace(watchers=(own, *others))

  def _read(self, row: int, most: int) -> int:
    """Reads at most so many tokens of a prompt; returns how many."""
    slot = self._slots[row]
    assert slot is not None
    number = min(most, slot.prompt_length - slot.num_read)
    end = slot.num_read + number
    whole = end == slot.prompt_length
    self._request, self._state = insert(
      self._target,
      self._drafter,
      self._request,
      self._state,
      np.int32(row),
      slot.request.replace(
        prompt_length=np.array([end], np.int32),
        limit=slot.request.limit if whole else np.array([0], np.int32),
      ),
      np.int32(slot.num_read),
    )
    slot.num_read = end
    return number

  def _read_prompts(self, most: int) -> bool:
    """Reads what is new, at most so many tokens; whether that was all."""
    for row, slot in enumerate(self._slots):
      if slot is not None and not slot.is_read:
        if not most:
          return False
        most -= self._read(row, most)
        if not slot.is_read:
          return False
    return True

  def _drafter_for(self, num_active: int) -> Drafter:
    fitting = [size for size in self._drafters if size >= num_active]
    return self._drafters[min(fitting)] if fitting else self._drafter

  def _step(self, num_steps: int, num_ended: int) -> dict[int, Generation]:
    """Decodes until so many of the prompts that are read have ended."""
    rows = [
      row for row, slot in enumerate(self._slots) if slot and slot.is_read
    ]
    self._state = advance(
      self._target,
      self._drafter_for(len(rows)),
      self._request,
      self._state,
      np.int32(num_steps),
      np.int32(len(self._slots) - len(rows) + min(num_ended, len(rows))),
      config=self._config,
    )
    reasons = hosts.read(self._state.reason)
    rows = [row for row in rows if reasons[row] != RUNNING]
    if not rows:
      return {}
    result = hosts.read(result_of(self._state))
    return {row: self._take(result, row) for row in rows}

  def _take(self, result: DecodeResult, row: int) -> Generation:
    """The generation of a slot, which is free from now on."""
    slot, self._slots[row] = self._slots[row], None
    assert slot is not None
    own: Any = jax.tree.map(  # Totals are integers now.
      lambda array: array[row : row + 1] if array.ndim else array, result
    )
    # The forwards of the batch, for each of its rows.
    counters = own.counters.replace(steps=own.counters.target_forwards.sum())
    stages = tuple(
      stage.replace(forwards=stage.row_forwards.sum())
      for stage in own.stage_counters
    )
    return generation_of(
      own.replace(counters=counters, stage_counters=stages),
      np.array([slot.prompt_length], np.int32),
      watchers=self._request.watchers,
      target=self._target,
      drafter=self._drafter,
    )

  def advance(self, num_ended: int = 1) -> dict[int, Generation]:
    """Reads the new prompts, and decodes until some have ended.

    Args:
      num_ended: how many, at least; fewer if there are no more.

    Returns:
      The results of prompts that ended, by slot; these slots are free again.
      With match verification their tokens are those of decoding each alone. So
      are the statistics of plain decoding and of fixed topologies without
      `break_even` and `tree_sizes`; else the prompts of a batch decide together
      how much is drafted, and `plain_steps` counts the steps of all so far.
    """
    checks.check_count('num_ended', num_ended)
    ended: dict[int, Generation] = {}
    while len(ended) < num_ended and any(self._slots):
      wait = any(slot and slot.is_read for slot in self._slots)
      all_read = self._read_prompts(self._reading if wait else ALL_STEPS)
      ended |= self._step(ALL_STEPS if all_read else 1, num_ended - len(ended))
    return ended

  @property
  def num_steps(self) -> int:
    """Batched target forwards so far, those that read prompts apart."""
    return int(hosts.read(self._state.counters.steps))


def _check_sizes(
  tree_sizes: Mapping[int, int], drafter: Drafter
) -> dict[int, Drafter]:
  """The drafters by the number of prompts under way."""
  shape, drafters = drafter.shape, dict[int, Drafter]()
  for number, num_nodes in tree_sizes.items():
    checks.check_count('tree_sizes', number)
    checks.check_count('tree_sizes', num_nodes, shape.num_nodes)
    if num_nodes == 1:
      drafters[number] = PLAIN
    elif num_nodes == shape.num_nodes:
      drafters[number] = drafter
    elif isinstance(shape, TreeShape):
      smaller = dataclasses.replace(shape, num_nodes=num_nodes)
      drafters[number] = drafter.replace(shape=smaller)
    else:
      raise ValueError(
        f'tree_sizes={dict(tree_sizes)} has {num_nodes} nodes, but the drafter'
        f' fills a fixed topology of {shape.num_nodes}; give these, or 1'
      )
  return drafters
