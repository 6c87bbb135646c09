"""One thread that decodes the requests of many clients in shared slots.

Clients submit requests and are told what is added to their texts:

    clients     submit ->  queue  ->  slots  -> listeners, piece by piece
                                        |
                                   one thread

Every method has slots of its own, so that a request for plain decoding is
decoded plainly whatever the others ask for. A request that fails harms no
other, and one whose client is gone frees its slot.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import threading
import time
from typing import Any

from absl import logging
import jax

import specdec
from specdec import arguments as arguments_lib
from specdec import generation as generation_lib
from specdec import slots as slots_lib
from specdec.models.text import drafters
from specdec.models.text import generator as generator_lib
from specdec.models.text import text_decoding
from specdec.models.text import text_options
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import automaton as automaton_lib

PLAIN = 'plain'

# The host looks at the slots after steps that take about as long.
_LEAST_SECONDS, _MOST_SECONDS = 0.03, 0.1
_MOST_STEPS = 32


class ApiError(Exception):
  """An error that a client is told, in the terms of OpenAI."""

  def __init__(
    self,
    message: str,
    param: str | None = None,
    status: int = 400,
    code: str | None = None,
  ):
    super().__init__(message)
    self.param, self.status, self.code = param, status, code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A prompt with options of its own, which were checked."""

  ids: list[int]
  max_new_tokens: int
  method: str
  seed: int
  sampling: specdec.Sampling
  stops: tuple[str, ...] = ()
  eos_ids: Sequence[int] | None = None  #: None: the target's.
  automaton: automaton_lib.Automaton | None = None
  section: int = -1  #: Where the text begins, see `Pair.text_stream`.
  keeps: bool = True  #: Whether what a slot has read is not read again.


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tokens that were added to the text of a request."""

  said: list[token_bytes_lib.Said]  #: Text and reasoning of each token.
  origins: list[str]  #: The source of each token, a label.


@dataclasses.dataclass(frozen=True)
class Answer:
  """The end of a request."""

  said: token_bytes_lib.Said  #: The whole text and reasoning.
  tokens: list[int]  #: All new ids.
  finish_reason: str  #: `length` or `stop`.
  num_cached: int  #: Tokens of the prompt that were not read again.
  evidence: dict[str, Any]  #: How it was decoded, see `docs/serving.md`.


Event = Piece | Answer | Exception
"""The last event of a request is an `Answer` or an exception."""


def digest(tokens: Sequence[int]) -> str:
  """The SHA-256 of token ids, written as decimals between commas."""
  return hashlib.sha256(','.join(map(str, tokens)).encode()).hexdigest()


def joined(said: Iterable[token_bytes_lib.Said]) -> token_bytes_lib.Said:
  """Several parts of a text as one."""
  texts, reasoning = [*zip(*said, strict=True)] or ((), ())
  return token_bytes_lib.Said(''.join(texts), ''.join(reasoning))


class Ticket:
  """A request under way; `Engine.submit` makes it."""

  def __init__(
    self,
    request: Request,
    tell: Callable[[Event], None],
    stream: token_bytes_lib.TextStream,
  ):
    self.request, self.tell, self._stream = request, tell, stream
    self._said: list[token_bytes_lib.Said] = []
    self._tokens: list[int] = []
    self._origins: list[str] = []
    self.cancelled = False

  def grow(self, growth: specdec.Growth, labels: Sequence[str]) -> bool:
    """Tells what was added; whether a stop string ended the text."""
    before = len(self._tokens)
    for token, origin in zip(growth.tokens, growth.origins, strict=True):
      self._said.append(self._stream.feed([token]))
      self._tokens.append(token)
      self._origins.append(labels[origin])
      if self._stream.stopped:
        break
    if len(self._tokens) > before:
      if self._stream.stopped or growth.generation is not None:
        self._said[-1] = joined([self._said[-1], self._stream.flush()])
      self.tell(Piece(self._said[before:], self._origins[before:]))
    return self._stream.stopped

  def end(
    self, generation: generation_lib.Generation, num_cached: int
  ) -> Answer | ApiError:
    """The last event, when the text has ended."""
    if error := generation.errors[0]:
      return ApiError(error, status=500)
    stats = generation.stats
    evidence = {
      'method': self.request.method,
      'seed': self.request.seed,
      'forwards': stats.target_forwards,
      'accepted_histogram': list(stats.accepted_histogram or ()),
      'origins': {
        label: self._origins.count(label) for label in generation.labels
      },
      'digest': digest(self._tokens),
    }
    is_cut = generation.finish_reasons[0] == 'length'
    reason = 'length' if is_cut and not self._stream.stopped else 'stop'
    said = joined(self._said)
    return Answer(said, self._tokens, reason, num_cached, evidence)


class _Pool:
  """The slots of one method, and whose they are."""

  def __init__(self, slots: specdec.Slots, labels: Sequence[str]):
    self.slots, self._labels = slots, labels
    self.tickets: dict[int, Ticket] = {}
    self._num_steps, self._has_new = 1, False

  def begin(self, ticket: Ticket) -> None:
    """Gives a slot to a request; ValueError if it cannot be decoded."""
    request = ticket.request
    slot = self.slots.insert(
      request.ids,
      text_options.keys_of_seeds([request.seed], 1)[0],
      max_new_tokens=request.max_new_tokens,
      sampling=request.sampling,
      eos_ids=request.eos_ids,
      automaton=request.automaton,
      keeps=request.keeps,
    )
    self.tickets[slot], self._has_new = ticket, True

  def step(self) -> list[tuple[Ticket, Answer | ApiError]]:
    """Decodes for a moment; returns the requests that have ended."""
    for slot, ticket in [*self.tickets.items()]:
      if ticket.cancelled:
        del self.tickets[slot]
        self.slots.cancel(slot)
    if not self.tickets:
      return []
    # A new client sees its first token as early as possible.
    begun, num_steps = time.monotonic(), 1 if self._has_new else self._num_steps
    self._has_new, ended = False, []
    for slot, growth in self.slots.step(num_steps).items():
      ticket, generation = self.tickets[slot], growth.generation
      if ticket.grow(growth, self._labels) and generation is None:
        generation = self.slots.cancel(slot)
      if generation is not None:
        del self.tickets[slot]
        ended.append(
          (ticket, ticket.end(generation, self.slots.num_kept[slot]))
        )
    seconds = time.monotonic() - begun
    if seconds < _LEAST_SECONDS:
      self._num_steps = min(2 * num_steps, _MOST_STEPS)
    elif seconds > _MOST_SECONDS:
      self._num_steps = max(num_steps // 2, 1)
    return ended


class Engine:
  """Decodes the requests of many clients; see the top of the file.

  Args:
    generator: its drafter drafts for the method that the server has.
    method: the name of this method.
    batch_size: requests that are decoded at once, by each method.
    context: the most tokens of a prompt and its continuation; None: the
      context of the target, and at most 2,048.
    queue_size: the most requests that wait.
    options: of `specdec.Slots`, for all requests.

  Raises:
    ValueError: the target's context is shorter.
  """

  def __init__(
    self,
    generator: generator_lib.Generator,
    *,
    method: str,
    batch_size: int = 4,
    context: int | None = None,
    queue_size: int = 64,
    **options: Any,
  ):
    self.pair, self.method = generator.pair, method
    largest = self.pair.target.spec.max_positions
    self.context = context or min(largest, text_decoding.MAX_CONTEXT)
    arguments_lib.check_count('context', self.context, largest)
    self._store = generator.store
    self.most_choices = batch_size + queue_size
    self.most_eos_ids = slots_lib.room_for_eos_ids(self.pair.eos_ids)
    given: Any = options | {'eos_ids': self.pair.eos_ids}
    drafter, given = drafters.of_batch(
      self.pair, generator.drafter, given, batch_size
    )
    self._options = given | {'num_slots': batch_size, 'context': self.context}
    self._drafters = {PLAIN: specdec.PLAIN, method: drafter}
    self._pools: dict[str, _Pool] = {}
    self._waiting: list[Ticket] = []
    self._changed, self._stopping = threading.Condition(), False
    #: Figures since the start, by name.
    self.counts = collections.Counter(dict.fromkeys(_COUNTS, 0))
    #: Decodes until `stop`.
    self.thread = threading.Thread(target=self._run, daemon=True)
    self.thread.start()

  def submit(
    self,
    requests: Sequence[Request],
    listen: Callable[[int, Event], None],
  ) -> list[Ticket]:
    """Takes requests, all or none.

    The thread calls `listen` with the index of a request and what happens.

    Raises:
      ApiError: too many wait, or the server stops.
    """
    tickets = []
    for index, request in enumerate(requests):
      stream = self.pair.text_stream(request.stops, request.section)
      tell = functools.partial(listen, index)
      tickets.append(Ticket(request, tell, stream))
    with self._changed:
      if self._stopping:
        raise _stopped()
      under_way = len(self._waiting) + len(self._active())
      if under_way + len(tickets) > self.most_choices:
        self.counts['refused_requests'] += len(tickets)
        raise ApiError(
          f'{under_way} requests are under way, of at most {self.most_choices};'
          ' try again later',
          status=429,
          code='queue_full',
        )
      self._waiting += tickets
      self._changed.notify()
    return tickets

  def cancel(self, tickets: Sequence[Ticket]) -> None:
    """Ends requests whose client is gone."""
    with self._changed:
      for ticket in tickets:
        ticket.cancelled = True
      self._changed.notify()

  def warm_up(self, sampling: specdec.Sampling) -> None:
    """Compiles what most requests need; call it before the first of them.

    Raises:
      ValueError: the options of all requests cannot be used.
    """
    slots = self._pool(self.method).slots
    for decode in slots.advance, functools.partial(slots.step, 2):
      key = jax.random.key(0)
      slots.insert([0], key, max_new_tokens=2, sampling=sampling)
      decode()

  def stop(self) -> None:
    """Ends the thread and all requests; their listeners are told an error."""
    with self._changed:
      self._stopping = True
      self._changed.notify()

  def gauges(self) -> dict[str, int]:
    """Requests that wait and that are decoded, at this moment."""
    with self._changed:
      return {'waiting': len(self._waiting), 'running': len(self._active())}

  def _active(self) -> list[Ticket]:
    pools = [*self._pools.values()]
    return [ticket for pool in pools for ticket in [*pool.tickets.values()]]

  def _run(self) -> None:
    has_work = lambda: self._stopping or self._waiting or self._active()
    while True:
      with self._changed:
        self._changed.wait_for(has_work)
        if self._stopping:
          break
        self._waiting = [
          ticket for ticket in self._waiting if not ticket.cancelled
        ]
        waiting = [*self._waiting]
      for ticket in waiting:
        self._begin(ticket)
      for method, pool in [*self._pools.items()]:
        try:
          ended: Sequence[tuple[Ticket, Answer | Exception]] = pool.step()
        except Exception as error:
          logging.exception('decoding with %s failed', method)
          del self._pools[method]
          failed = ApiError(f'decoding failed: {error}', status=500)
          ended = [(ticket, failed) for ticket in pool.tickets.values()]
        for ticket, end in ended:
          self._end(ticket, end)
    for ticket in self._waiting + self._active():
      ticket.tell(_stopped())

  def _begin(self, ticket: Ticket) -> None:
    """Gives a slot to a request that waits, if one is free."""
    try:
      pool = self._pool(ticket.request.method)
      if not pool.slots.free:
        return
      if self._store is not None:
        pool.slots.change_drafters(self._store.refreshed)
      pool.begin(ticket)
    except Exception as error:
      self._end(ticket, error)
    with self._changed:
      self._waiting.remove(ticket)

  def _pool(self, method: str) -> _Pool:
    if method not in self._pools:
      drafter, options = self._drafters[method], dict(self._options)
      if not drafter.stages:
        options |= {'children': None, 'tree_sizes': {}, 'break_even': None}
      slots = specdec.Slots(self.pair.target, drafter=drafter, **options)
      self._pools[method] = _Pool(slots, ('target', *drafter.labels))
    return self._pools[method]

  def _end(self, ticket: Ticket, end: Answer | Exception) -> None:
    added = {'requests': 1, 'failed_requests': 1}
    if isinstance(end, Answer):
      if self._store is not None:
        self._store.add_decoded([end.tokens])
      num_tokens = len(end.tokens)
      added = {
        'requests': 1,
        'prompt_tokens': len(ticket.request.ids),
        'cached_tokens': end.num_cached,
        'new_tokens': num_tokens,
        'target_forwards': end.evidence['forwards'],
        'accepted_tokens': num_tokens - end.evidence['origins']['target'],
      }
    self.counts.update(added)
    ticket.tell(end)


def _stopped() -> ApiError:
  return ApiError('the server stops', status=503, code='stopped')


_COUNTS = (
  'requests',
  'refused_requests',
  'failed_requests',
  'prompt_tokens',
  'cached_tokens',
  'new_tokens',
  'target_forwards',
  'accepted_tokens',
)
