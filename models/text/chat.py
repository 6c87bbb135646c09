"""A conversation that goes on from turn to turn; see `Generator.chat`."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

import specdec
from specdec.models.text import chat_template
from specdec.models.text import pair as pair_lib
from specdec.models.text import result as result_lib
from specdec.models.text import text_decoding
from specdec.models.text import token_bytes as token_bytes_lib

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
    begin: Callable[..., text_decoding.TextDecoding],
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
    """The most tokens of the answer."""
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
