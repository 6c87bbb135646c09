"""Answers in the forms of OpenAI's interface: whole, or in chunks."""

from collections.abc import Sequence
from typing import Any

from specdec.models.serve import asked as asked_lib
from specdec.models.serve import engine as engine_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import scores as scores_lib
from specdec.models.text import token_bytes as token_bytes_lib

_REASONS = {'eos': 'stop'}
# The role of whoever answers.
_ROLE = 'assistant'
_NOTHING = token_bytes_lib.Said('')


def _said(said: token_bytes_lib.Said) -> dict[str, str]:
  """The fields of a message: the text, and before it the reasoning, if any."""
  reasoning = {'reasoning_content': said.reasoning} if said.reasoning else {}
  return reasoning | {'content': said.text}


class Form:
  """The form of the answer to one request of a client.

  Args:
    pair: for the texts of tokens and their scores.
    asked: what was asked.
    model: the name of the model.
    name: tells this answer from all others.
    created: the time, in seconds since 1970.
  """

  def __init__(
    self,
    pair: pair_lib.Pair,
    asked: asked_lib.Asked,
    *,
    model: str,
    name: str,
    created: int,
  ):
    self._pair, self._asked = pair, asked
    kind = 'chatcmpl' if asked.is_chat else 'cmpl'
    self._head = {'id': f'{kind}-{name}', 'created': created, 'model': model}

  def _object(self, is_chunk: bool, **fields: Any) -> dict[str, Any]:
    kind = 'text_completion'
    if self._asked.is_chat:
      kind = 'chat.completion.chunk' if is_chunk else 'chat.completion'
    return self._head | {'object': kind} | fields

  def _usage(self, ends: Sequence[engine_lib.Answer]) -> dict[str, Any]:
    """The tokens of all choices; a prompt of several counts once."""
    firsts = slice(None, None, self._asked.n)
    prompts = sum(len(one.ids) for one in self._asked.requests[firsts])
    new = sum(len(end.tokens) for end in ends)
    cached = sum(end.num_cached for end in ends[firsts])
    return {
      'prompt_tokens': prompts,
      'completion_tokens': new,
      'total_tokens': prompts + new,
      'prompt_tokens_details': {'cached_tokens': cached},
    }

  def _end(self, end: engine_lib.Answer | None) -> dict[str, Any]:
    """The fields of a choice that has ended, or goes on."""
    if end is None:
      return {'finish_reason': None}
    reason = _REASONS.get(end.finish_reason, end.finish_reason)
    fields: dict[str, Any] = {'finish_reason': reason}
    fields['specdec'] = end.evidence
    if self._asked.return_token_ids:
      fields['token_ids'] = end.tokens
    return fields

  def whole(
    self,
    said: Sequence[token_bytes_lib.Said],
    ends: Sequence[engine_lib.Answer],
  ) -> dict[str, Any]:
    """The answer with all choices."""
    choices = []
    for index, (answer, end) in enumerate(zip(said, ends, strict=True)):
      choice = {'index': index, 'logprobs': self._logprobs(index, end)}
      if self._asked.is_chat:
        choice['message'] = {'role': _ROLE} | _said(answer)
      else:
        prompt = self._asked.prompts[index] if self._asked.echo else ''
        choice['text'] = prompt + answer.text
      choices.append(choice | self._end(end))
    return self._object(False, choices=choices, usage=self._usage(ends))

  def _chunk(
    self,
    index: int,
    said: token_bytes_lib.Said,
    end: engine_lib.Answer | None,
    **delta: Any,
  ) -> dict[str, Any]:
    choice: dict[str, Any] = {'index': index, 'logprobs': None}
    if self._asked.is_chat:
      choice['delta'] = delta | (_said(said) if end is None else {})
    else:
      choice['text'] = said.text
    return self._object(True, choices=[choice | self._end(end)])

  def first(self) -> list[dict[str, Any]]:
    """The chunks before all others: who speaks in a chat."""
    if not self._asked.is_chat:
      return []
    number = len(self._asked.requests)
    return [self._chunk(i, _NOTHING, None, role=_ROLE) for i in range(number)]

  def chunk(
    self, index: int, event: engine_lib.Piece | engine_lib.Answer
  ) -> dict[str, Any]:
    """A chunk of a choice: what was added, or its end."""
    if isinstance(event, engine_lib.Answer):
      return self._chunk(index, _NOTHING, event)
    said = token_bytes_lib.Said(event.text, event.reasoning)
    chunk = self._chunk(index, said, None)
    chunk['choices'][0]['specdec'] = {
      'pieces': [said.reasoning + said.text for said in event.said],
      'origins': event.origins,
    }
    return chunk

  def usage_chunk(self, ends: Sequence[engine_lib.Answer]) -> dict[str, Any]:
    """The chunk after all others, if the client wants it."""
    return self._object(True, choices=[], usage=self._usage(ends))

  def _logprobs(self, index: int, end: engine_lib.Answer) -> Any:
    """The log-probabilities of the tokens of a choice, if they are wanted."""
    number = self._asked.logprobs
    if number is None:
      return None
    prompt = self._asked.requests[index].ids
    scores: list[scores_lib.TokenScore | None] = [
      *scores_lib.score(self._pair.target, prompt + end.tokens)
    ]
    first = 0 if self._asked.echo else len(prompt)
    scores, ids = [None, *scores][first:], (prompt + end.tokens)[first:]
    if self._asked.is_chat:
      return {'content': [self._of_chat(one, number) for one in scores if one]}
    texts = [self._pair.token_text(token) for token in ids]
    # The end of each text is where the next begins.
    offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
    return {
      'tokens': texts,
      'token_logprobs': [one and one.log_prob for one in scores],
      'top_logprobs': [one and self._best_texts(one, number) for one in scores],
      'text_offset': offsets,
    }

  def _best_texts(
    self, score: scores_lib.TokenScore, number: int
  ) -> dict[str, float]:
    """The log-probabilities of the best tokens and of the token itself."""
    pairs = [*score.best[:number], (score.token, score.log_prob)]
    found: dict[str, float] = {}
    for token, log_prob in pairs:
      found.setdefault(self._pair.token_text(token), log_prob)
    return found

  def _of_chat(self, score: scores_lib.TokenScore, number: int) -> Any:
    def described(token: int, log_prob: float) -> dict[str, Any]:
      text = self._pair.token_text(token)
      own = [*self._pair.token_bytes()[token : token + 1]] or [b'']
      return {'token': text, 'logprob': log_prob, 'bytes': [*own[0]]}

    best = [described(*pair) for pair in score.best[:number]]
    return described(score.token, score.log_prob) | {'top_logprobs': best}
