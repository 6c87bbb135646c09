"""Answers in the forms of OpenAI's interface: whole, or in chunks."""

from collections.abc import Sequence
import itertools
import time
from typing import Any
import uuid

from specdec.models.serve import asked as asked_lib
from specdec.models.serve import engine as engine_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import scores as scores_lib
from specdec.models.text import token_bytes as token_bytes_lib


class Form:
  """The form of the answer to one request of a client.

  Args:
    pair: for the texts of tokens and their scores.
    asked: what was asked.
    model: the name of the model.
  """

  def __init__(self, pair: pair_lib.Pair, asked: asked_lib.Asked, model: str):
    self._pair, self._asked = pair, asked
    kind = 'chatcmpl' if asked.is_chat else 'cmpl'
    self._head: dict[str, Any] = {'created': int(time.time()), 'model': model}
    self._head['id'] = f'{kind}-{uuid.uuid4().hex}'

  def _object(
    self,
    choices: Sequence[dict[str, Any]],
    ends: Sequence[engine_lib.Answer] = (),
    *,
    is_chunk: bool = True,
  ) -> dict[str, Any]:
    """An object with choices; with all ends, their tokens are counted."""
    kind = 'chat.completion' if self._asked.is_chat else 'text_completion'
    if is_chunk and self._asked.is_chat:
      kind = 'chat.completion.chunk'
    whole = self._head | {'object': kind, 'choices': choices}
    if not ends:
      return whole
    firsts = slice(
      None, None, self._asked.n
    )  # A prompt of several counts once.
    prompts = sum(len(request.ids) for request in self._asked.requests[firsts])
    new = sum(len(end.tokens) for end in ends)
    cached = sum(end.num_cached for end in ends[firsts])
    usage = {
      'prompt_tokens': prompts,
      'completion_tokens': new,
      'total_tokens': prompts + new,
      'prompt_tokens_details': {'cached_tokens': cached},
    }
    return whole | {'usage': usage}

  def _choice(
    self,
    index: int,
    said: token_bytes_lib.Said | None,
    end: engine_lib.Answer | None = None,
    **message: str,
  ) -> dict[str, Any]:
    """A choice that says something, or has ended, or both."""
    if said is not None:
      message['content'] = said.text
      if said.reasoning:
        message['reasoning_content'] = said.reasoning
    choice: dict[str, Any] = {'index': index, 'logprobs': None}
    choice['finish_reason'] = end and end.finish_reason
    if self._asked.is_chat:
      choice['delta'] = message
    else:
      choice['text'] = said.text if said else ''
    if end is not None:
      choice |= {'logprobs': self._logprobs(index, end)}
      choice |= {'specdec': end.evidence}
      if self._asked.return_token_ids:
        choice['token_ids'] = end.tokens
    return choice

  def _echo(self, index: int) -> token_bytes_lib.Said:
    text = self._asked.prompts[index] if self._asked.echo else ''
    return token_bytes_lib.Said(text)

  def whole(self, ends: Sequence[engine_lib.Answer]) -> dict[str, Any]:
    """The answer with all choices."""
    choices = []
    for index, end in enumerate(ends):
      said = engine_lib.joined([self._echo(index), end.said])
      choice = self._choice(index, said, end, role='assistant')
      if self._asked.is_chat:
        choice['message'] = choice.pop('delta')
      choices.append(choice)
    return self._object(choices, ends, is_chunk=False)

  def first(self) -> list[dict[str, Any]]:
    """The chunks before all others: who speaks in a chat, and the echo."""
    num_choices = len(self._asked.requests)
    return [
      self._object([self._choice(i, self._echo(i), role='assistant')])
      for i in range(
        num_choices if self._asked.is_chat or self._asked.echo else 0
      )
    ]

  def chunk(
    self, index: int, event: engine_lib.Piece | engine_lib.Answer
  ) -> dict[str, Any]:
    """A chunk of a choice: what was added, or its end with all `logprobs`."""
    if isinstance(event, engine_lib.Answer):
      return self._object([self._choice(index, None, event)])
    choice = self._choice(index, engine_lib.joined(event.said))
    pieces = [said.reasoning + said.text for said in event.said]
    choice['specdec'] = {'pieces': pieces, 'origins': event.origins}
    return self._object([choice])

  def usage_chunk(self, ends: Sequence[engine_lib.Answer]) -> dict[str, Any]:
    """The chunk after all others, if the client wants it."""
    return self._object([], ends)

  def _logprobs(self, index: int, end: engine_lib.Answer) -> Any:
    """The log-probabilities of the tokens of a choice, if they are wanted."""
    num_best = self._asked.logprobs
    if num_best is None:
      return None
    prompt = self._asked.requests[index].ids
    ids = prompt + end.tokens
    scores = [None, *scores_lib.score(self._pair.target, ids)]
    first = 0 if self._asked.echo else len(prompt)
    scores, ids = scores[first:], ids[first:]
    if self._asked.is_chat:
      return {
        'content': [self._of_chat(score, num_best) for score in scores if score]
      }
    texts = [self._pair.token_text(token) for token in ids]
    return {
      'tokens': texts,
      'token_logprobs': [score and score.log_prob for score in scores],
      'top_logprobs': [
        score and self._best_texts(score, num_best) for score in scores
      ],
      'text_offset': [0, *itertools.accumulate(map(len, texts[:-1]))],
    }

  def _best_texts(
    self, score: scores_lib.TokenScore, num_best: int
  ) -> dict[str, float]:
    """The log-probabilities of the token and of the best ones, by their text.

    Of several tokens with one text the likeliest counts.
    """
    pairs = (score.token, score.log_prob), *reversed(score.best[:num_best])
    return {self._pair.token_text(token): value for token, value in pairs}

  def _of_chat(self, score: scores_lib.TokenScore, num_best: int) -> Any:
    def described(token: int, log_prob: float) -> dict[str, Any]:
      text, data = self._pair.token_text(token), self._pair.token_bytes()[token]
      return {'token': text, 'logprob': log_prob, 'bytes': [*data]}

    best = [described(*pair) for pair in score.best[:num_best]]
    return described(score.token, score.log_prob) | {'top_logprobs': best}
