"""Requests of clients, read from the JSON of OpenAI's interface.

Every parameter has its effect or is refused by its name.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import random
import threading
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

AUTO = 'auto'
_MOST_STOPS = 16
_LIMITS = 'max_completion_tokens', 'max_tokens'


# Options of sampling that are set together, with values that change nothing.
_FILTERS: dict[str, Any] = {'top_k': None, 'top_p': 1.0, 'min_p': 0.0}
_ADJUSTMENTS: dict[str, Any] = {'logit_bias': {}, 'repetition_penalty': 1.0}


class Refused(ValueError):
  """A request that cannot be answered; has the parameter and the status."""

  def __init__(
    self,
    message: str,
    param: str | None = None,
    status: int = 400,
    code: str | None = None,
  ):
    super().__init__(message)
    self.param, self.status, self.code = param, status, code


_COMMON: dict[str, Any] = {
  'model': str,
  'max_tokens': int,
  'temperature': float,
  'top_p': float,
  'top_k': int,
  'min_p': float,
  'repetition_penalty': float,
  'logit_bias': dict[str, float],
  'seed': int,
  'stop': str | list[str],
  'stop_token_ids': list[int],
  'n': int,
  'regex': str,
  'response_format': dict[str, Any],
  'method': str,
  'cache_prompt': bool,
  'stream': bool,
  'stream_options': dict[str, bool],
  'return_token_ids': bool,
  'user': str,
}
_OF_CHAT = {
  'messages': list[dict[str, Any]],
  'max_completion_tokens': int,
  'logprobs': bool,
  'top_logprobs': int,
}
_OF_TEXT = {
  'prompt': str | list[int] | list[str] | list[list[int]],
  'logprobs': int,
  'echo': bool,
}
# Parameters that cannot be done; these values say that they are not wanted.
_NOT_WANTED: dict[str, tuple[Any, ...]] = {
  'frequency_penalty': (0,),
  'presence_penalty': (0,),
  'best_of': (1,),
  'suffix': ('',),
  'tools': ([],),
  'functions': ([],),
  'tool_choice': ('none', 'auto'),
  'store': (False,),
  'metadata': ({},),
  'modalities': (['text'],),
  'service_tier': ('auto', 'default'),
}
_OF_MESSAGE: dict[str, Any] = {
  'role': str,
  'content': str,
  'name': str,
  'reasoning_content': str,
}


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


def _typed(
  body: Mapping[str, Any], kinds: Mapping[str, Any], place: str = ''
) -> dict[str, Any]:
  """The values that are not null; refuses other names and types."""
  given = {name: value for name, value in body.items() if value is not None}
  for name, value in given.items():
    if name in _NOT_WANTED and not place:
      if value not in _NOT_WANTED[name]:
        raise Refused(f'{name} cannot be done here; leave it out', name)
    elif name not in kinds:
      known = ', '.join(kinds)
      full = f'{place}{name!s:.60}'
      raise Refused(f'{full} is not known; known: {known}', full)
    else:
      try:
        text_files.check_types({name: value}, {name: kinds[name]}, place)
      except ValueError as error:
        raise Refused(str(error), f'{place}{name}') from error
  return given


@contextlib.contextmanager
def _named(param: str) -> Iterator[None]:
  """A `ValueError` within becomes a `Refused` that names the parameter."""
  try:
    yield
  except Refused:
    raise
  except (ValueError, RecursionError) as error:
    raise Refused(str(error), param) from error


def _messages(given: list[dict[str, Any]]) -> list[dict[str, str]]:
  """Messages as templates take them, with the text of contents in parts."""
  messages = []
  for number, message in enumerate(given):
    place, content = f'messages[{number}].', message.get('content')
    if isinstance(content, list):
      kinds = {'type': Literal['text'], 'text': str}
      parts = f'{place}content.'
      for part in content:
        if not isinstance(part, dict):
          raise Refused(f'{place}content must be text', f'{place}content')
        _typed(part, kinds, parts)
      content = ''.join(part.get('text', '') for part in content)
      message = message | {'content': content}
    message = _typed(message, _OF_MESSAGE, place)
    if 'reasoning_content' in message:
      message['reasoning'] = message.pop('reasoning_content')
    messages.append(message)
  return messages


def _schema(response_format: Mapping[str, Any]) -> Any:
  """The JSON schema of a `response_format`, if it has one."""
  kind, form = response_format.get('type'), 'response_format'
  if kind == 'text':
    return None
  if kind == 'json_object':
    return {'type': 'object'}
  described = response_format.get('json_schema')
  if kind != 'json_schema' or not isinstance(described, dict):
    raise Refused(
      f'{form} must have the type text, json_object, or json_schema and then'
      f' json_schema: {{"schema": ...}}, got {response_format!r:.80}',
      form,
    )
  schema = described.get('schema')
  if not isinstance(schema, dict):
    raise Refused(
      f'{form}.json_schema.schema must be an object, got {schema!r:.60}', form
    )
  return schema


def _logprobs(given: Mapping[str, Any], is_chat: bool) -> int | None:
  """The alternatives to each token; None if no figures are wanted."""
  name = 'top_logprobs' if is_chat else 'logprobs'
  number = given.get(name)
  if number is not None:
    with _named(name):
      most = scores_lib.MOST_ALTERNATIVES
      arguments_lib.check_count(name, number, most, least=0)
  if not is_chat:
    return number
  if number and not given.get('logprobs'):
    raise Refused('top_logprobs needs logprobs: true', name)
  return (number or 0) if given.get('logprobs') else None


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
      values['logit_bias'] = {int(name): own for name, own in bias.items()}
  for name, value in values.items():
    with _named(name):
      one = specdec.Sampling(**{name: value})
      arguments_lib.to_params(one, 1, vocab_size)
  if not values['temperature']:  # Filters keep the best token.
    values |= dict.fromkeys(_FILTERS)
  for group in (_FILTERS, _ADJUSTMENTS):
    own = {
      name: nothing if values[name] is None else values[name]
      for name, nothing in group.items()
    }
    values |= dict.fromkeys(group) if own == group else own
  return specdec.Sampling(**values)


class Reader:
  """Reads the requests of clients.

  Args:
    engine: what decodes it.
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
    max_new_tokens: int,
    sampling: specdec.Sampling,
    seed: int | None,
  ):
    self._engine, self.model = engine, model
    self._max_new_tokens, self._seed = max_new_tokens, seed
    self._sampling = sampling
    # Tokenizers are not made for several threads.
    self._lock = threading.Lock()

  def read(self, body: Mapping[str, Any], *, is_chat: bool) -> Asked:
    """The requests of the body of a request.

    Raises:
      Refused: a parameter cannot be used.
    """
    needed = 'messages' if is_chat else 'prompt'
    given = _typed(body, _COMMON | (_OF_CHAT if is_chat else _OF_TEXT))
    if needed not in given:
      raise Refused(f'{needed} is needed', needed)
    if given.get('model', self.model) != self.model:
      raise Refused(
        f'model {given["model"]!r:.80} is not served here, {self.model!r} is',
        'model',
        404,
        'model_not_found',
      )
    n, stream_options = given.get('n', 1), given.get('stream_options', {})
    _typed(stream_options, {'include_usage': bool}, 'stream_options.')
    with self._lock:
      prompts = self._prompts(given, is_chat)
    with _named('n'):
      most = self._engine.most_choices // len(prompts)
      arguments_lib.check_count('n', n, max(most, 1))
    if len(prompts) > self._engine.most_choices:
      raise Refused(f'prompt has {len(prompts)} prompts, too many', 'prompt')
    logprobs = _logprobs(given, is_chat)
    if logprobs is not None and given.get('stream'):
      raise Refused('logprobs are not streamed; leave out one', 'logprobs')
    if given.get('echo') and given.get('stream'):
      raise Refused('echo is not streamed; leave out one', 'echo')
    common = self._options(given)
    seed, section = common.pop('seed'), -1
    # A text with a constraint is all answer.
    if is_chat and common.get('automaton') is None:
      with self._lock, _named('messages'):
        messages = _messages(given['messages'])
        section = self._engine.pair.section_after(messages)
    requests = [
      engine_lib.Request(
        ids=ids,
        max_new_tokens=self._limit(ids, given, needed),
        seed=seed + i if seed + i < 2**32 else seed + i - 2**32,
        section=section,
        **common,
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
      include_usage=stream_options.get('include_usage') or False,
      echo=given.get('echo', False),
      logprobs=logprobs,
      return_token_ids=given.get('return_token_ids', False),
    )

  def _prompts(
    self, given: Mapping[str, Any], is_chat: bool
  ) -> list[tuple[str, list[int]]]:
    """The text and the ids of each prompt."""
    pair = self._engine.pair
    if is_chat:
      messages = _messages(given['messages'])
      with _named('messages'):
        ids = chat_template.conversation_ids(pair.tokenizer, messages)
        return [('', ids)]
    prompts = given['prompt']
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
      prompts = [prompts]
    if not prompts:
      raise Refused('prompt is empty; give at least one', 'prompt')
    vocab_size = pair.target.spec.vocab_size
    found = []
    with _named('prompt'):
      for prompt in prompts:
        (ids,) = pair.ids_of([prompt])
        ids = arguments_lib.to_prompt('prompt', ids, vocab_size)
        is_text = isinstance(prompt, str)
        found.append((prompt if is_text else pair.decode(ids), ids))
    return found

  def _limit(
    self, ids: list[int], given: Mapping[str, Any], prompt: str
  ) -> int:
    """The most new tokens after a prompt."""
    context = self._engine.context
    room = context - len(ids)
    asked = {name: given[name] for name in _LIMITS if name in given}
    if room < 1:
      raise Refused(
        f'{prompt} has {len(ids)} tokens, which exceeds the context of'
        f' {context} with an answer',
        prompt,
        code='context_length_exceeded',
      )
    if len({*asked.values()}) > 1:
      raise Refused(f'{" and ".join(asked)} contradict each other', _LIMITS[0])
    for name, limit in asked.items():
      with _named(name):
        arguments_lib.check_count(name, limit, least=0)
      if limit > room:
        raise Refused(
          f'{name}={limit} and {prompt} of {len(ids)} tokens exceed the'
          f' context of {context} tokens',
          name,
          code='context_length_exceeded',
        )
      return limit
    return min(self._max_new_tokens, room)

  def _method(self, method: str) -> str:
    own = self._engine.method
    if method not in (engine_lib.PLAIN, AUTO, own):
      raise Refused(
        f'method must be {own}, {engine_lib.PLAIN} or {AUTO}, got'
        f' {method!r:.60}',
        'method',
      )
    return own if method == AUTO else method

  def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of every request."""
    pair, seed = self._engine.pair, given.get('seed', self._seed)
    if seed is None:
      seed = random.getrandbits(32)
    if not -(2**31) <= seed < 2**32:
      raise Refused(f'seed must be an integer of 32 bits, got {seed}', 'seed')
    with _named('stop'):
      stops = text_options.stops_of_rows(given.get('stop', ()), 1)[0]
      if len(stops) > _MOST_STOPS:
        raise Refused(f'stop has more than {_MOST_STOPS} strings', 'stop')
    eos_ids = given.get('stop_token_ids')
    vocab_size = pair.target.spec.vocab_size
    if eos_ids is not None:
      with _named('stop_token_ids'):
        eos_ids = [*pair.eos_ids, *eos_ids]
        arguments_lib.to_ids('stop_token_ids', eos_ids, vocab_size)
        eos_ids, most = [*dict.fromkeys(eos_ids)], self._engine.most_eos_ids
        if len(eos_ids) > most:
          raise Refused(
            f'at most {most} tokens can end a text', 'stop_token_ids'
          )
    schema, regex = None, given.get('regex')
    if 'response_format' in given:
      schema = _schema(given['response_format'])
    param = 'response_format' if regex is None else 'regex'
    with _named(param):
      automaton = constraints_lib.automaton_of(
        constraints_lib.constraint_of(regex, schema),
        pair.tokenizer,
        vocab_size,
        pair.eos_ids if eos_ids is None else eos_ids,
      )
    return {
      'method': self._method(given.get('method', self._engine.method)),
      'seed': seed,
      'sampling': _sampled(given, self._sampling, vocab_size),
      'stops': stops,
      'eos_ids': eos_ids,
      'automaton': automaton,
      'keeps': given.get('cache_prompt', True),
    }
