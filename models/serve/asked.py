"""Requests of clients, read from the JSON of OpenAI's interface.

Every parameter has its effect or is refused by its name.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import random
from typing import Any
from typing import Literal

import specdec
from specdec import arguments as arguments_lib
from specdec.models.serve import engine as engine_lib
from specdec.models.text import chat_template
from specdec.models.text import constraints as constraints_lib
from specdec.models.text import scores as scores_lib
from specdec.models.text import text_options
from specdec.text import text_files

_MOST_STOPS = 16

# The types of parameters, see `text_files.check_types`. A literal is the only
# value of a parameter that is not wanted here, and that clients send.
_COMMON: dict[str, Any] = {
  'model': str,
  'max_tokens': int,
  'temperature': float,
  'top_p': float,
  'top_k': int,
  'min_p': float,
  'repetition_penalty': float,
  'frequency_penalty': Literal[0],
  'presence_penalty': Literal[0],
  'logit_bias': dict[str, float],
  'seed': int,
  'stop': str | list[str],
  'stop_token_ids': list[int],
  'n': int,
  'best_of': Literal[1],
  'regex': str,
  'response_format': dict[str, Any],
  'method': str,
  'cache_prompt': bool,
  'stream': bool,
  'stream_options': dict[str, bool],
  'return_token_ids': bool,
  'user': str,
}
_OF_CHAT: dict[str, Any] = {
  'messages': list[dict[str, Any]],
  'max_completion_tokens': int,
  'logprobs': bool,
  'top_logprobs': int,
  'tool_choice': Literal['none', 'auto'],
  'store': Literal[False],
}
_OF_TEXT: dict[str, Any] = {
  'prompt': str | list[int] | list[str] | list[list[int]],
  'logprobs': int,
  'echo': bool,
  'suffix': Literal[''],
}
_OF_MESSAGE: dict[str, Any] = {
  'role': str,
  'content': str | list[dict[str, Any]],
  'name': str,
  'reasoning_content': str,
}
_OF_PART: dict[str, Any] = {'type': Literal['text'], 'text': str}

# Options of sampling that are set together, with values that change nothing.
_FILTERS: dict[str, Any] = {'top_k': None, 'top_p': 1.0, 'min_p': 0.0}
_ADJUSTMENTS: dict[str, Any] = {'logit_bias': {}, 'repetition_penalty': 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """The requests of a client: `n` choices for each prompt, in this order."""

  requests: list[engine_lib.Request]
  prompts: list[str]  #: The text of each request's prompt.
  n: int
  is_chat: bool
  stream: bool
  include_usage: bool
  echo: bool
  logprobs: int | None  #: The alternatives to each token; None: no figures.
  return_token_ids: bool


@contextlib.contextmanager
def _named(param: str) -> Iterator[None]:
  """Errors within are told to the client with the name of the parameter."""
  try:
    yield
  except (ValueError, RecursionError) as error:
    raise engine_lib.ApiError(str(error), param) from error


def _typed(
  body: Mapping[str, Any], kinds: Mapping[str, Any], place: str = ''
) -> dict[str, Any]:
  """The values that are not null; refuses other names and types."""
  given = {name: value for name, value in body.items() if value is not None}
  for name in given:
    with _named(f'{place}{name!s:.60}'):
      if name not in kinds:
        names = ', '.join(kinds)
        raise ValueError(f'{place}{name!s:.60} is not known; known: {names}')
      text_files.check_types(given, {name: kinds[name]}, place)
  return given


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
  """Messages as templates take them, with the text of contents in parts."""
  messages = []
  for index, message in enumerate(given):
    place = f'messages[{index}].'
    message = _typed(message, _OF_MESSAGE, place)
    if isinstance(parts := message.get('content'), list):
      parts = [_typed(part, _OF_PART, f'{place}content.') for part in parts]
      message['content'] = ''.join(part.get('text', '') for part in parts)
    messages.append(message)
  return messages


def _schema(response_format: Mapping[str, Any] | None) -> Any:
  """The JSON schema of a `response_format`, if it has one."""
  match response_format:
    case None | {'type': 'text'}:
      return None
    case {'type': 'json_object'}:
      return {'type': 'object'}
    case {'type': 'json_schema', 'json_schema': {'schema': dict(schema)}}:
      return schema
  raise ValueError(
    'response_format must have the type text, json_object, or json_schema and'
    ' then json_schema: {"schema": an object}, got'
    f' {response_format!r:.80}'
  )


def _logprobs(given: Mapping[str, Any], is_chat: bool) -> int | None:
  """The alternatives to each token; None if no figures are wanted."""
  if not is_chat:
    name, count = 'logprobs', given.get('logprobs')
  else:
    name, count = 'top_logprobs', given.get('top_logprobs', 0)
    if not given.get('logprobs'):
      if count:
        raise engine_lib.ApiError('top_logprobs needs logprobs: true', name)
      count = None
  if count is not None:
    with _named(name):
      most = scores_lib.MOST_ALTERNATIVES
      arguments_lib.check_count(name, count, most, least=0)
  return count


def _sampled(
  given: Mapping[str, Any], default: specdec.Sampling, vocab_size: int
) -> specdec.Sampling:
  """How to choose tokens, in one of few forms that share programs.

  What changes nothing is left out, or else everything of its kind is set.
  """
  values = dict(vars(default))
  values |= {name: given[name] for name in values if name in given}
  if values['top_k'] in (0, -1):  # All tokens, as elsewhere.
    values['top_k'] = None
  if bias := given.get('logit_bias'):
    with _named('logit_bias'):
      if not all(name.isdecimal() for name in bias):
        raise ValueError('logit_bias must map ids of tokens to numbers')
      values['logit_bias'] = {int(name): bias[name] for name in bias}
  for name, value in values.items():
    with _named(name):
      sampling = specdec.Sampling(**{name: value})
      arguments_lib.to_params(sampling, 1, vocab_size)
  if not values['temperature']:  # Filters keep the best token.
    values |= dict.fromkeys(_FILTERS)
  for group in (_FILTERS, _ADJUSTMENTS):
    chosen = {
      name: nothing if values[name] is None else values[name]
      for name, nothing in group.items()
    }
    values |= dict.fromkeys(group) if chosen == group else chosen
  return specdec.Sampling(**values)


class Reader:
  """Reads the requests of clients.

  Args:
    engine: what decodes them.
    model: the name of the model.
    max_new_tokens: of requests that do not say, as far as the context allows.
    sampling: of requests that do not say.
    seed: of requests that do not say; None: a random one each.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    *,
    model: str,
    max_new_tokens: int = 128,
    sampling: specdec.Sampling = specdec.Sampling(),
    seed: int | None = None,
  ):
    self.engine, self.model, self.sampling = engine, model, sampling
    self.max_new_tokens, self.seed = max_new_tokens, seed

  def read(self, body: Mapping[str, Any], *, is_chat: bool) -> Asked:
    """The requests of the body of a request.

    Raises:
      ApiError: a parameter cannot be used.
    """
    given = _typed(body, _COMMON | (_OF_CHAT if is_chat else _OF_TEXT))
    if given.get('model', self.model) != self.model:
      raise engine_lib.ApiError(
        f'model {given["model"]!r:.80} is not served here, {self.model!r} is',
        'model',
        404,
        'model_not_found',
      )
    prompt_name = 'messages' if is_chat else 'prompt'
    with _named(prompt_name):
      if prompt_name not in given:
        raise ValueError(f'{prompt_name} is needed')
      prompts, section = self._prompts(given, is_chat)
    stream_options = _typed(
      given.get('stream_options', {}),
      {'include_usage': bool},
      'stream_options.',
    )
    with _named('n'):
      n, most = given.get('n', 1), self.engine.most_choices // len(prompts)
      arguments_lib.check_count('n', n, max(most, 1))
    options = self._options(given)
    seed = options.pop('seed')
    if options['automaton'] is not None:
      section = -1  # A text with a constraint is all answer.
    requests = [
      engine_lib.Request(
        ids=ids,
        max_new_tokens=self._limit(len(ids), given, prompt_name),
        seed=(seed + i) % 2**32,
        section=section,
        **options,
      )
      for _, ids in prompts
      for i in range(n)
    ]
    return Asked(
      requests=requests,
      prompts=[text for text, _ in prompts for _ in range(n)],
      n=n,
      is_chat=is_chat,
      stream=given.get('stream', False),
      include_usage=stream_options.get('include_usage', False),
      echo=given.get('echo', False),
      logprobs=_logprobs(given, is_chat),
      return_token_ids=given.get('return_token_ids', False),
    )

  def _prompts(
    self, given: Mapping[str, Any], is_chat: bool
  ) -> tuple[list[tuple[str, list[int]]], int]:
    """The text and the ids of each prompt, and the section of the answers."""
    pair = self.engine.pair
    if is_chat:
      messages = _messages(given['messages'])
      ids = chat_template.conversation_ids(pair.tokenizer, messages)
      return [('', ids)], pair.section_after(messages)
    prompts = given['prompt']
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
      prompts = [prompts]
    most, vocab_size = self.engine.most_choices, pair.target.spec.vocab_size
    if not 0 < len(prompts) <= most:
      raise ValueError(f'prompt must have 1 to {most} prompts')
    texts = []
    for prompt in prompts:
      (ids,) = pair.ids_of([prompt])
      ids = arguments_lib.to_prompt('prompt', ids, vocab_size)
      texts.append(
        (prompt if isinstance(prompt, str) else pair.decode(ids), ids)
      )
    return texts, -1

  def _limit(
    self, num_tokens: int, given: Mapping[str, Any], prompt: str
  ) -> int:
    """The most new tokens after a prompt."""
    context = self.engine.context
    room = context - num_tokens
    name = 'max_tokens'
    if 'max_completion_tokens' in given:
      name = 'max_completion_tokens'
    limit = given.get(name, min(self.max_new_tokens, room))
    with _named(name):
      if given.get('max_tokens', limit) != limit:
        raise ValueError(f'{name} and max_tokens contradict each other')
      arguments_lib.check_count(name, limit, least=min(room, 0))
    if room < 1 or limit > room:
      raise engine_lib.ApiError(
        f'{prompt} of {num_tokens} tokens and {name}={limit} exceed the context'
        f' of {context} tokens',
        prompt if room < 1 else name,
        code='context_length_exceeded',
      )
    return limit

  def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of every request."""
    pair, default = self.engine.pair, self.engine.method
    vocab_size = pair.target.spec.vocab_size
    methods = {
      default: default,
      engine_lib.PLAIN: engine_lib.PLAIN,
      'auto': default,
    }
    method, seed = given.get('method', default), given.get('seed', self.seed)
    if seed is None:
      seed = random.getrandbits(32)
    with _named('method'):
      if method not in methods:
        raise ValueError(f'method must be one of {[*methods]}, got {method!r}')
    with _named('seed'):
      if not -(2**31) <= seed < 2**32:
        raise ValueError(f'seed must be an integer of 32 bits, got {seed}')
    with _named('stop'):
      stops = text_options.stops_of_rows(given.get('stop', ()), 1)[0]
      if len(stops) > _MOST_STOPS:
        raise ValueError(f'stop has more than {_MOST_STOPS} strings')
    eos_ids = [*pair.eos_ids, *given.get('stop_token_ids', ())]
    with _named('stop_token_ids'):
      arguments_lib.to_ids('stop_token_ids', eos_ids, vocab_size)
      eos_ids, most = [*dict.fromkeys(eos_ids)], self.engine.most_eos_ids
      if len(eos_ids) > most:
        raise ValueError(f'at most {most} tokens can end a text')
    with _named('response_format' if 'regex' not in given else 'regex'):
      schema = _schema(given.get('response_format'))
      constraint = constraints_lib.constraint_of(given.get('regex'), schema)
      automaton = constraints_lib.automaton_of(
        constraint, pair.tokenizer, vocab_size, eos_ids
      )
    return {
      'method': methods[method],
      'seed': seed,
      'sampling': _sampled(given, self.sampling, vocab_size),
      'stops': stops,
      'eos_ids': eos_ids,
      'automaton': automaton,
      'keeps': given.get('cache_prompt', True),
    }
