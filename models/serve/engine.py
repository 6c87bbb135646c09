"""One thread that decodes the requests of many clients in shared slots.

Clients submit requests and are told what is added to their texts:

    clients     submit ->  queue  ->  slots  -> listeners, piece by piece
                                        |
                                   one thread

Every method has slots of its own, so that a request for plain decoding is
decoded plainly whatever the others ask for. A request that fails harms no
other, and one whose client is gone frees its slot.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import hashlib
import queue
import threading
import time
from typing import Any

from absl import logging

import specdec
from specdec import generation as generation_lib
from specdec import slot_options
from specdec.models.text import drafters
from specdec.models.text import generator as generator_lib
from specdec.models.text import text_options
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import automaton as automaton_lib

PLAIN = 'plain'

# The host looks at the slots after steps that take about as long.
_LEAST_SECONDS, _MOST_SECONDS = 0.03, 0.1
_MOST_STEPS = 32


class QueueFull(Exception):
  """Too many requests wait, and no other is taken."""


class Failed(Exception):
  """Decoding failed, and it is not the client's fault."""


class Stopped(Exception):
  """The server stops."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A prompt with options of its own, all of which were checked."""

  ids: list[int]
  max_new_tokens: int
  method: str
  seed: int
  sampling: specdec.Sampling
  stops: tuple[str, ...] = ()
  eos_ids: Sequence[int] | None = None  #: None: those of the target.
  automaton: automaton_lib.Automaton | None = None
  section: int = -1  #: In which the text begins, see `Pair.text_stream`.
  keeps: bool = True  #: Whether what a slot has read is not read again.


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tokens that were added to the text of a request."""

  said: list[token_bytes_lib.Said]  #: Text and reasoning of each token.
  origins: list[str]  #: The source of each token, a label.

  @property
  def text(self) -> str:
    """The added text."""
    return ''.join(said.text for said in self.said)

  @property
  def reasoning(self) -> str:
    """The added reasoning."""
    return ''.join(said.reasoning for said in self.said)


@dataclasses.dataclass(frozen=True)
class Answer:
  """The end of a request."""

  tokens: list[int]  #: All new ids.
  finish_reason: str  #: `length`, `eos` or `stop`.
  num_cached: int  #: Tokens of the prompt that were not read again.
  evidence: dict[str, Any]  #: How it was decoded, see `docs/serving.md`.


Event = Piece | Answer | Exception
"""The last event of a request is an `Answer` or an exception."""


def digest(tokens: Sequence[int]) -> str:
  """The SHA-256 of token ids, written as decimals between commas."""
  return hashlib.sha256(','.join(map(str, tokens)).encode()).hexdigest()


class Ticket:
  """A request under way; `Engine.submit` makes it."""

  def __init__(
    self,
    request: Request,
    listen: Callable[[Event], None],
    stream: token_bytes_lib.TextStream,
  ):
    self.request, self._listen, self._stream = request, listen, stream
    self.tokens: list[int] = []
    self.origins: list[str] = []
    self.cancelled = False
    self.begun = time.monotonic()

  def tell(self, event: Event) -> None:
    """Tells the client, who may have gone."""
    try:
      self._listen(event)
    except RuntimeError:  # The loop of events is closed.
      self.cancelled = True

  def grow(self, growth: specdec.Growth, labels: Sequence[str]) -> bool:
    """Takes in what was added; whether a stop string ended the text."""
    said, before = [], len(self.tokens)
    for token, origin in zip(growth.tokens, growth.origins, strict=True):
      said.append(self._stream.feed([token]))
      self.tokens.append(token)
      self.origins.append(labels[origin])
      if self._stream.stopped:
        break
    if said and (self._stream.stopped or growth.generation is not None):
      last, rest = said[-1], self._stream.flush()
      said[-1] = token_bytes_lib.Said(
        last.text + rest.text, last.reasoning + rest.reasoning
      )
    if said:
      self.tell(Piece(said, self.origins[before:]))
    return self._stream.stopped

  def answer(
    self, generation: generation_lib.Generation, num_cached: int
  ) -> Answer:
    """The answer, when the text has ended."""
    request, stats = self.request, generation.stats
    stopped = self._stream.stopped
    counts = {label: self.origins.count(label) for label in generation.labels}
    evidence = {
      'method': request.method,
      'seed': request.seed,
      'forwards': stats.target_forwards,
      'accepted_histogram': list(stats.accepted_histogram or ()),
      'origins': counts,
      'digest': digest(self.tokens),
    }
    reason = 'stop' if stopped else generation.finish_reasons[0]
    return Answer(self.tokens, reason, num_cached, evidence)


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

  def drop_cancelled(self) -> None:
    """Frees the slots of clients that are gone."""
    gone = [slot for slot, ticket in self.tickets.items() if ticket.cancelled]
    for slot in gone:
      del self.tickets[slot]
      self.slots.cancel(slot)

  def step(self) -> list[tuple[Ticket, Answer | Exception]]:
    """Goes on for a moment; the requests that have ended."""
    # A new client sees its first token as early as possible.
    begun, num_steps = time.monotonic(), 1 if self._has_new else self._num_steps
    self._has_new = False
    ended: list[tuple[Ticket, Answer | Exception]] = []
    for slot, growth in self.slots.step(num_steps).items():
      ticket, generation = self.tickets[slot], growth.generation
      if ticket.grow(growth, self._labels) and generation is None:
        generation = self.slots.cancel(slot)
      if generation is not None:
        del self.tickets[slot]
        error = generation.errors[0]
        answer = ticket.answer(generation, self.slots.num_kept[slot])
        ended.append((ticket, Failed(error) if error else answer))
    seconds = time.monotonic() - begun
    if seconds < _LEAST_SECONDS:
      self._num_steps = min(2 * num_steps, _MOST_STEPS)
    elif seconds > _MOST_SECONDS:
      self._num_steps = max(num_steps // 2, 1)
    return ended


class Engine:
  """Decodes the requests of many clients; see the top of the file.

  Args:
    generator: its drafter is that of the method of its own.
    method: the name of this method.
    batch_size: requests that are decoded at once, by each method.
    context: the most tokens of a prompt and its continuation.
    queue_size: the most requests that wait.
    options: those of `specdec.Slots` for all requests.
  """

  def __init__(
    self,
    generator: generator_lib.Generator,
    *,
    method: str,
    batch_size: int,
    context: int,
    queue_size: int,
    **options: Any,
  ):
    self.pair, self.method, self.context = generator.pair, method, context
    self._store = generator.store
    self.most_choices = batch_size + queue_size
    self.most_eos_ids = slot_options.room_for_eos_ids(self.pair.eos_ids)
    self._queue_size = queue_size
    drafter, break_even = drafters.chosen(generator.drafter, self.pair, None)
    if options.get('break_even') is None:
      options['break_even'] = break_even
    self._options = options | {
      'num_slots': batch_size,
      'context': context,
      'eos_ids': self.pair.eos_ids,
    }
    self._drafters = {PLAIN: specdec.PLAIN, method: drafter}
    self._pools: dict[str, _Pool] = {}
    self._waiting: list[Ticket] = []
    self._changed, self._stopping = threading.Condition(), False
    #: Figures since the start, by name.
    self.counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def submit(
    self,
    requests: Sequence[Request],
    listeners: Sequence[Callable[[Event], None]],
  ) -> list[Ticket]:
    """Takes requests, all or none; the listeners are called by the thread.

    Raises:
      QueueFull: too many wait.
      Stopped: the server stops.
    """
    streams = [
      self.pair.text_stream(request.stops, request.section)
      for request in requests
    ]
    tickets = [*map(Ticket, requests, listeners, streams)]
    with self._changed:
      if self._stopping:
        raise Stopped('the server stops')
      under_way = len(self._waiting) + len(self._active())
      if under_way + len(tickets) > self.most_choices:
        self.counts['refused_requests'] += len(tickets)
        raise QueueFull(
          f'{len(self._waiting)} requests wait already, at most'
          f' {self._queue_size} can; try again later'
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
    """Compiles what requests need, by decoding two tokens.

    Raises:
      ValueError: the options of all requests cannot be used.
    """
    ended: queue.Queue[Event] = queue.Queue()
    request = Request(
      ids=[0], max_new_tokens=2, method=self.method, seed=0, sampling=sampling
    )
    self.submit([request], [ended.put])
    while not isinstance(event := ended.get(), Answer):
      if isinstance(event, Exception):
        raise event

  def stop(self) -> None:
    """Ends all requests; their listeners get `Stopped`."""
    with self._changed:
      self._stopping = True
      self._changed.notify()

  def join(self) -> None:
    """Waits until the thread has ended."""
    self._thread.join()

  def gauges(self) -> dict[str, int]:
    """Requests that wait and that are decoded, at this moment."""
    with self._changed:
      found = len(self._waiting), len(self._active())
    return dict(zip(('waiting', 'running'), found, strict=True))

  def _active(self) -> list[Ticket]:
    pools = [*self._pools.values()]
    return [ticket for pool in pools for ticket in [*pool.tickets.values()]]

  def _run(self) -> None:
    has_work = lambda: self._stopping or self._waiting or self._active()
    while True:
      with self._changed:
        self._changed.wait_for(has_work)
        if self._stopping:
          everyone = self._waiting + self._active()
          self._waiting, self._pools = [], {}
          break
        waiting = [one for one in self._waiting if not one.cancelled]
        self._waiting = waiting
      for method, pool in [*self._pools.items()]:
        self._guarded(method, pool.drop_cancelled)
      for ticket in waiting:
        self._begin(ticket)
      for method, pool in [*self._pools.items()]:
        if pool.tickets:
          for ticket, end in self._guarded(method, pool.step) or ():
            self._end(ticket, end)
    for ticket in everyone:
      ticket.tell(Stopped('the server stops'))

  def _guarded(self, method: str, function: Callable[[], Any]) -> Any:
    """Calls a method of a pool; if it fails, its requests do, and no others."""
    try:
      return function()
    except Exception as error:
      logging.exception('decoding with %s failed', method)
      end = Failed(f'decoding failed: {error}')
      for ticket in self._pools.pop(method).tickets.values():
        self._end(ticket, end)

  def _begin(self, ticket: Ticket) -> None:
    """Gives a slot to a request that waits, if one is free."""
    method = ticket.request.method
    try:
      pool = self._pools.get(method)
      if pool is None:
        pool = self._pools[method] = self._new_pool(method)
      if not pool.slots.free:
        return
      if self._store is not None:
        pool.slots.change_drafters(self._store.refreshed)
      pool.begin(ticket)
    except Exception as error:
      self._end(ticket, error)
    with self._changed:
      self._waiting.remove(ticket)

  def _new_pool(self, method: str) -> _Pool:
    drafter, options = self._drafters[method], dict(self._options)
    if not drafter.stages:
      options |= {'children': None, 'tree_sizes': {}, 'break_even': None}
    slots = specdec.Slots(self.pair.target, drafter=drafter, **options)
    return _Pool(slots, ('target', *drafter.labels))

  def _end(self, ticket: Ticket, end: Answer | Exception) -> None:
    counts = self.counts
    counts['requests'] += 1
    if isinstance(end, Answer):
      if self._store is not None:
        self._store.add([end.tokens])
      counts['prompt_tokens'] += len(ticket.request.ids)
      counts['cached_tokens'] += end.num_cached
      counts['new_tokens'] += len(end.tokens)
      counts['target_forwards'] += end.evidence['forwards']
      accepted = len(end.tokens) - end.evidence['origins']['target']
      counts['accepted_tokens'] += accepted
      counts['request_seconds'] += time.monotonic() - ticket.begun
    else:
      counts['failed_requests'] += 1
    ticket.tell(end)


_COUNTS = (
  'requests',
  'refused_requests',
  'failed_requests',
  'prompt_tokens',
  'cached_tokens',
  'new_tokens',
  'target_forwards',
  'accepted_tokens',
  'request_seconds',
)
