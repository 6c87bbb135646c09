"""Decodes whose text can be shown while it grows, and conversations."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import time

import specdec
from specdec import tracing
from specdec.models import waiting
from specdec.models.text import chat_template
from specdec.models.text import pair as pair_lib
from specdec.models.text import result as result_lib
from specdec.models.text import text_options
from specdec.models.text import text_store
from specdec.models.text import token_bytes as token_bytes_lib


class TextDecoding:
  """A decode whose text can be shown while it grows; see `Generator.stream`.

  Iterating yields the new text of each row after every target forward: whole
  characters, and nothing that may turn out to be part of a stop string. Joined
  it is the text of `result`. `said` yields what a model says before its answer,
  too.
  """

  def __init__(
    self,
    pair: pair_lib.Pair,
    decoding: specdec.Decoding,
    request: text_options.Request,
    store: text_store.TextStore | None = None,
  ):
    self._pair, self._decoding, self._store = pair, decoding, store
    self._begin(request)

  def _begin(self, request: text_options.Request) -> None:
    self._request = request
    rows = zip(request.prompts, request.ids, strict=True)
    #: The text of each prompt.
    self.prompts: list[str] = [
      prompt_text(self._pair, prompt, ids) for prompt, ids in rows
    ]
    self._streams: list[token_bytes_lib.TextStream] | None = None
    self._stored = self._store is None

  def extend(
    self,
    prompts: Sequence[chat_template.Prompt],
    *,
    max_new_tokens: int | Sequence[int],
  ) -> None:
    """Goes on from other prompts, see `specdec.Decoding.extend`."""
    ids = self._pair.ids_of(prompts)
    sections = text_options.first_sections(
      self._pair, prompts, self._request.constrained
    )
    self._decoding.extend(ids, max_new_tokens=max_new_tokens, sections=sections)
    self._begin(
      dataclasses.replace(
        self._request,
        prompts=prompts,
        ids=self._decoding.prompts,
        sections=sections,
      )
    )

  @property
  def num_read(self) -> list[int]:
    """How many prompt tokens of each row `extend` had to read."""
    rows = zip(self._request.ids, self._decoding.num_kept, strict=True)
    return [len(ids) - kept for ids, kept in rows]

  @property
  def done(self) -> bool:
    """Whether all rows have ended."""
    return self._decoding.done

  def compile(self) -> None:
    """Compiles everything that decoding needs, and decodes nothing."""
    self._decoding.step(0)

  def run(self, should_stop: Callable[[], bool] | None = None) -> None:
    """Decodes to the end; see `specdec.Decoding.run`.

    The new text is in `result`, and not in what iterating yields later.
    """
    self._decoding.run(should_stop)
    self._keep()

  def _keep(self) -> None:
    """Adds the new texts to the store, once they have ended."""
    if self.done and not self._stored:
      assert self._store is not None
      self._stored = True
      self._store.add_decoded(self._decoding.result().tokens)

  def __iter__(self) -> Iterator[list[str]]:
    """Yields the new text of each row, step by step, until all have ended."""
    for rows in self.said():
      yield [said.text for said in rows]

  def said(self) -> Iterator[list[token_bytes_lib.Said]]:
    """Yields the new text and reasoning of each row, like iterating."""
    # Kept, so that iterating can be resumed, also within a character.
    if self._streams is None:
      self._streams = list(
        map(self._pair.text_stream, self._request.stops, self._request.sections)
      )
    for new in self._decoding:
      reasons = self._decoding.finish_reasons
      rows = zip(self._streams, new, reasons, strict=True)
      yield [
        stream.feed(ids) if reason is None else stream.finish(ids)
        for stream, ids, reason in rows
      ]
    self._keep()

  def trace(self) -> list[specdec.Trace]:
    """Decodes to the end like `run`; a trace of every row.

    `specdec.tracing` draws it. It is slower than `run`, because every step
    returns to the host.
    """
    traces, result = tracing.record(self._decoding), self.result()
    return [
      dataclasses.replace(
        trace,
        prompt=prompt,
        pieces=tuple(pieces),
        texts={token: self._pair.token_text(token) for token in trace.texts},
      )
      for trace, prompt, pieces in zip(
        traces, result.prompts, result.pieces, strict=True
      )
    ]

  def result(self) -> result_lib.TextGeneration:
    """Everything that was generated so far."""
    return text_generation(
      self._pair,
      self.prompts,
      self._request.ids,
      self._request.stops,
      self._request.sections,
      self._decoding.result(),
    )


def timed(
  begin: Callable[[], TextDecoding], name: str = 'decode'
) -> result_lib.TextGeneration:
  """The result of a decode that is compiled before the clock starts.

  Args:
    begin: makes the decode, such as a call of `Generator.stream`; called twice.
    name: of the decode, for the lines on stderr that say what takes long.

  Returns:
    A generation whose statistics also have `seconds` of decoding (with the
    prompt, without compilation), `tokens_per_second` over all rows, and
    `compile_seconds`.
  """
  start = time.perf_counter()
  with waiting.announced(f'{name}: compiling and reading the prompt'):
    begin().compile()
  with waiting.announced(f'{name}: decoding'):
    compiled = time.perf_counter()
    decoding = begin()
    decoding.run()
    seconds = time.perf_counter() - compiled
  result = decoding.result()
  stats = dataclasses.replace(
    result.stats,
    seconds=seconds,
    tokens_per_second=result.stats.new_tokens / seconds,
    compile_seconds=compiled - start,
  )
  return dataclasses.replace(result, stats=stats)


def text_generation(
  pair: pair_lib.Pair,
  prompts: Sequence[str],
  ids: Sequence[Sequence[int]],
  stops: Sequence[Sequence[str]],
  sections: Sequence[int],
  generation: specdec.Generation,
) -> result_lib.TextGeneration:
  """The texts of a generation; all arguments have an entry per row."""
  said = [*map(pair.said, generation.tokens, stops, sections)]
  pieces = map(pair.pieces, generation.tokens, sections)
  lengths = [len(row.reasoning) + len(row.text) for row in said]
  return result_lib.TextGeneration(
    prompts=list(prompts),
    text=[row.text for row in said],
    reasoning=[row.reasoning for row in said],
    prompt_tokens=[list(row) for row in ids],
    pieces=list(map(_cut, pieces, lengths)),
    **vars(generation),
  )


def prompt_text(
  pair: pair_lib.Pair, prompt: chat_template.Prompt, ids: Sequence[int]
) -> str:
  """The text of a prompt, which may be given as ids or as a conversation."""
  return prompt if isinstance(prompt, str) else pair.decode(list(ids))


def _cut(pieces: Sequence[str], length: int) -> list[str]:
  """The pieces up to the given length of text."""
  cut = []
  for piece in pieces:
    cut.append(piece[:length])
    length -= len(cut[-1])
  return cut


MAX_CONTEXT = 2048
"""The most tokens of a conversation by default."""


class ContextFull(ValueError):
  """A conversation does not fit into its context."""


class Chat:
  """The answer to the last of some messages, and then to what follows.

  For example::

      chat = lm.chat([{'role': 'user', 'content': 'Name a prime.'}])
      for new in chat:  # the new text, after every target forward
        print(new, end='', flush=True)
      chat.reply('And the next one?')
      print(chat.run().text[0])

  The template of the tokenizer puts all messages into words in every turn. The
  caches of target and drafter keep what these have in common with what was read
  and decoded. Most templates only append. Where one changes earlier turns, for
  example by leaving out their reasoning, and where the tokenizer cuts an answer
  into other tokens than were decoded, the text is read again from there on.
  """

  def __init__(
    self,
    begin: Callable[..., TextDecoding],
    pair: pair_lib.Pair,
    messages: Sequence[chat_template.Message],
    *,
    context: int,
    max_new_tokens: int,
  ):
    self._pair, self._context = pair, context
    self._max_new_tokens = max_new_tokens
    limit = self._limit(messages)
    #: The messages so far, without the answer to the last.
    self.messages = list(messages)
    self._decoding = begin([self.messages], max_new_tokens=limit)

  def _limit(self, messages: Sequence[chat_template.Message]) -> int:
    size = len(chat_template.conversation_ids(self._pair.tokenizer, messages))
    if size >= self._context:
      raise ContextFull(
        f'the conversation has {size} tokens, and its context has room for'
        f' {self._context}; begin another one, or with a larger context (the'
        f' target has {self._pair.target.spec.max_positions})'
      )
    return min(self._max_new_tokens, self._context - size)

  def reply(self, text: str) -> 'Chat':
    """Goes on: the answer so far, then a user's message; returns itself.

    It raises the errors of `restart`.
    """
    result, question = self.result(), {'role': 'user', 'content': text}
    answer = chat_template.answer(result.text[0], result.reasoning[0])
    return self.restart([*self.messages, answer, question])

  def restart(self, messages: Sequence[chat_template.Message]) -> 'Chat':
    """Answers the last message of any conversation; returns itself.

    What it has in common with the conversation so far is not read again.

    Raises:
      ContextFull: the messages do not fit into the context. After any error
        nothing has changed.
      ValueError: see `Generator.chat`.
    """
    self._decoding.extend([messages], max_new_tokens=self._limit(messages))
    self.messages = list(messages)
    return self

  @property
  def num_read(self) -> int:
    """How many of the prompt's tokens were read for this answer."""
    return self._decoding.num_read[0]

  def __iter__(self) -> Iterator[str]:
    """Yields the new text of the answer, step by step, until it ends."""
    for said in self.said():
      yield said.text

  def said(self) -> Iterator[token_bytes_lib.Said]:
    """Yields the new text and the new reasoning, like iterating."""
    for (said,) in self._decoding.said():
      yield said

  def run(
    self, should_stop: Callable[[], bool] | None = None
  ) -> result_lib.TextGeneration:
    """Decodes the answer to its end; see `Generator.generate`."""
    self._decoding.run(should_stop)
    return self.result()

  def trace(self) -> specdec.Trace:
    """Decodes the answer to its end; see `TextDecoding.trace`."""
    return self._decoding.trace()[0]

  def result(self) -> result_lib.TextGeneration:
    """The answer so far; a batch of one row."""
    return self._decoding.result()
