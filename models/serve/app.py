"""OpenAI's interface over an `Engine`, and the server that has it."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import functools
import hmac
import itertools
import json
import pathlib
import sys
import time
from typing import Any
import uuid

import anyio
import starlette.applications
import starlette.exceptions
import starlette.requests
import starlette.responses
import starlette.routing
import uvicorn

from specdec.models.serve import asked as asked_lib
from specdec.models.serve import engine as engine_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import scores as scores_lib
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import text_files

_MOST_BYTES = 8 << 20  # The size of a body.
_MOST_SECONDS = 30.0  # The longest that a body may take to arrive.
_PAGE = pathlib.Path(__file__).with_name('page.html')

_ApiError = engine_lib.ApiError
_Request = starlette.requests.Request
_Response = starlette.responses.Response
_Send = Callable[[Any], Awaitable[None]]
_Receive = Callable[[], Awaitable[Any]]


class _Json(starlette.responses.JSONResponse):
  def render(self, content: Any) -> bytes:
    return text_files.to_json(content).encode()  # Without infinities.


def _error(error: Exception) -> _Json:
  """An error in OpenAI's form."""
  status = getattr(
    error, 'status', 400 if isinstance(error, ValueError) else 500
  )
  if isinstance(error, starlette.exceptions.HTTPException):
    status = error.status_code
  described = {
    'message': getattr(error, 'detail', str(error)),
    'type': 'invalid_request_error' if status < 500 else 'server_error',
    'param': getattr(error, 'param', None),
    'code': getattr(error, 'code', None),
  }
  return _Json({'error': described}, status)


async def _refuse(_: _Request, error: Exception) -> _Response:
  return _error(error)


def _not_json(name: str) -> Any:
  raise ValueError(f'{name} is not JSON')


async def _body(request: _Request) -> dict[str, Any]:
  """The JSON object of a request."""
  data = bytearray()
  try:
    async with asyncio.timeout(_MOST_SECONDS):
      async for part in request.stream():
        data += part
        if len(data) > _MOST_BYTES:
          raise _ApiError(f'the body exceeds {_MOST_BYTES} bytes', status=413)
    body = json.loads(data.decode(), parse_constant=_not_json)
  except TimeoutError as error:
    raise _ApiError('the body did not arrive in time', status=408) from error
  except (ValueError, RecursionError) as error:
    raise _ApiError(f'the body is not JSON: {error}') from error
  if not isinstance(body, dict):
    raise _ApiError('the body must be a JSON object')
  return body


class _Form:
  """The form of the answer to one request of a client: whole, or in chunks."""

  def __init__(self, pair: pair_lib.Pair, asked: asked_lib.Asked, model: str):
    self._pair, self._asked = pair, asked
    kind = 'chatcmpl' if asked.is_chat else 'cmpl'
    self._head: dict[str, Any] = {'created': int(time.time()), 'model': model}
    self._head['id'] = f'{kind}-{uuid.uuid4().hex}'

  def wrapped(
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
    return self.wrapped(choices, ends, is_chunk=False)

  def first(self) -> list[dict[str, Any]]:
    """The chunks before all others: who speaks in a chat, and the echo."""
    num_choices = len(self._asked.requests)
    return [
      self.wrapped([self._choice(i, self._echo(i), role='assistant')])
      for i in range(
        num_choices if self._asked.is_chat or self._asked.echo else 0
      )
    ]

  def chunk(
    self, index: int, event: engine_lib.Piece | engine_lib.Answer
  ) -> dict[str, Any]:
    """A chunk of a choice: what was added, or its end with all `logprobs`."""
    if isinstance(event, engine_lib.Answer):
      return self.wrapped([self._choice(index, None, event)])
    choice = self._choice(index, engine_lib.joined(event.said))
    pieces = [said.reasoning + said.text for said in event.said]
    choice['specdec'] = {'pieces': pieces, 'origins': event.origins}
    return self.wrapped([choice])

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


class _Answering(_Response):
  """The answer to one request of a client.

  Its tickets end with it: when all is said, or when the client is gone.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    asked: asked_lib.Asked,
    form: _Form,
  ):
    self._engine, self._asked, self._form = engine, asked, form
    self._events: asyncio.Queue[tuple[int, engine_lib.Event]] = asyncio.Queue()
    self._ends: list[Any] = [None] * len(asked.requests)  # Each an `Answer`.

  async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
    loop = asyncio.get_running_loop()

    def listen(index: int, event: engine_lib.Event) -> None:
      with contextlib.suppress(RuntimeError):  # The loop is closed.
        loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def watch() -> None:
      while (await receive())['type'] != 'http.disconnect':
        pass
      answer.cancel()

    tickets = self._engine.submit(self._asked.requests, listen)
    answer = asyncio.ensure_future(self._answer(scope, receive, send))
    watching = asyncio.ensure_future(watch())
    try:
      with contextlib.suppress(asyncio.CancelledError):
        await answer
    finally:
      answer.cancel()
      watching.cancel()
      self._engine.cancel(tickets)

  async def _answer(self, scope: Any, receive: _Receive, send: _Send) -> None:
    if self._asked.stream:
      stream = starlette.responses.StreamingResponse(
        self._chunks(), media_type='text/event-stream'
      )
      return await stream.stream_response(send)
    async for _ in self._all_events():
      pass
    whole = functools.partial(self._form.whole, self._ends)
    await _Json(await anyio.to_thread.run_sync(whole))(scope, receive, send)

  async def _all_events(self) -> AsyncIterator[tuple[int, Any]]:
    """The pieces and ends of all choices until the last has ended."""
    while None in self._ends:
      index, event = await self._events.get()
      if isinstance(event, Exception):
        raise event
      if isinstance(event, engine_lib.Answer):
        self._ends[index] = event
      yield index, event

  async def _chunks(self) -> AsyncIterator[bytes]:
    """The events of a stream; an error is one, too."""
    try:
      for chunk in self._form.first():
        yield _sent(_Json(chunk))
      async for index, event in self._all_events():
        make = functools.partial(self._form.chunk, index, event)
        if isinstance(event, engine_lib.Answer):  # Scores may take a while.
          yield _sent(_Json(await anyio.to_thread.run_sync(make)))
        else:
          yield _sent(_Json(make()))
      if self._asked.include_usage:
        yield _sent(_Json(self._form.wrapped([], self._ends)))
    except Exception as error:
      yield _sent(_error(error))
    yield b'data: [DONE]\n\n'


def _tell(line: str) -> None:
  """Tells a line to who started the server."""
  print(line, file=sys.stderr, flush=True)


def _sent(event: _Json) -> bytes:
  """An event as the server sends it."""
  return b'data: ' + event.body + b'\n\n'


class _Handlers:
  """The functions that answer, by path."""

  def __init__(self, reader: asked_lib.Reader, api_key: str | None):
    self._reader, self._engine = reader, reader.engine
    self._key, self._begun = api_key, int(time.time())
    # Tokenizers are not made for several threads.
    self._tokenizing = asyncio.Lock()

  def _check_key(self, request: _Request) -> None:
    """Refuses a request without the key, if there is one."""
    given = request.headers.get('authorization', '').encode('latin-1')
    wanted = f'Bearer {self._key}'.encode()
    if self._key is not None and not hmac.compare_digest(given, wanted):
      message = 'the header Authorization must be: Bearer and the --api_key'
      raise _ApiError(message, status=401, code='invalid_api_key')

  async def complete(self, request: _Request, *, is_chat: bool) -> _Response:
    """Answers a request for a chat or for a text."""
    self._check_key(request)
    body = await _body(request)
    read = functools.partial(self._reader.read, body, is_chat=is_chat)
    async with self._tokenizing:
      asked = await anyio.to_thread.run_sync(read)
    form = _Form(self._engine.pair, asked, self._reader.model)
    return _Answering(self._engine, asked, form)

  async def models(self, request: _Request) -> _Response:
    """The one model, and what a page must know about it."""
    self._check_key(request)
    engine = self._engine
    model = {
      'id': self._reader.model,
      'object': 'model',
      'created': self._begun,
      'owned_by': 'specdec',
      'max_model_len': engine.context,
      'specdec': {
        'methods': [*dict.fromkeys([engine.method, engine_lib.PLAIN])],
        'has_chat_template': bool(engine.pair.tokenizer.chat_template),
      },
    }
    return _Json({'object': 'list', 'data': [model]})

  async def health(self, _: _Request) -> _Response:
    """Whether the server answers."""
    return _Json({'status': 'ok'})

  async def metrics(self, request: _Request) -> _Response:
    """Figures in the format of Prometheus."""
    self._check_key(request)
    lines = []
    for kind, figures, suffix in (
      ('counter', self._engine.counts, '_total'),
      ('gauge', self._engine.gauges(), ''),
    ):
      for name, value in figures.items():
        full = f'specdec_{name}{suffix}'
        lines += [f'# TYPE {full} {kind}\n', f'{full} {value}\n']
    return _Response(''.join(lines), media_type='text/plain; version=0.0.4')

  async def page(self, _: _Request) -> _Response:
    """The page for people."""
    return starlette.responses.HTMLResponse(_PAGE.read_text('utf-8'))


def _make_app(
  reader: asked_lib.Reader, api_key: str | None
) -> starlette.applications.Starlette:
  handlers = _Handlers(reader, api_key)
  chat = functools.partial(handlers.complete, is_chat=True)
  text = functools.partial(handlers.complete, is_chat=False)
  route = starlette.routing.Route
  http_error = starlette.exceptions.HTTPException
  return starlette.applications.Starlette(
    routes=[
      route('/v1/chat/completions', chat, methods=['POST']),
      route('/v1/completions', text, methods=['POST']),
      route('/v1/models', handlers.models),
      route('/health', handlers.health),
      route('/metrics', handlers.metrics),
      route('/', handlers.page),
    ],
    exception_handlers=dict.fromkeys(
      (Exception, _ApiError, http_error), _refuse
    ),
  )


class Server(uvicorn.Server):
  """Ends open streams on Ctrl-C, and says where it listens.

  Args:
    reader: reads the requests, and has the engine.
    host: the address to listen at.
    port: 0 takes a free one.
    api_key: that clients must send; None: none.
  """

  def __init__(
    self,
    reader: asked_lib.Reader,
    *,
    host: str = '127.0.0.1',
    port: int = 0,
    api_key: str | None = None,
  ):
    self.reader, self.engine, self.address = reader, reader.engine, ''
    super().__init__(
      uvicorn.Config(
        _make_app(reader, api_key),
        host,
        port,
        log_config=None,
        log_level='error',
        lifespan='off',
        timeout_graceful_shutdown=5,
      )
    )

  def handle_exit(self, sig: int, frame: Any) -> None:
    """Called on Ctrl-C."""
    self.engine.stop()
    super().handle_exit(sig, frame)

  async def startup(self, sockets: Any = None) -> None:
    """Called before the first request."""
    await super().startup(sockets)
    for server in self.servers:
      host, port, *_ = server.sockets[0].getsockname()
      host = f'[{host}]' if ':' in host else host
      self.address = f'http://{host}:{port}'
      _tell(
        f'ready: open {self.address} in a browser; the base URL for clients is'
        f' {self.address}/v1'
      )

  async def shutdown(self, sockets: Any = None) -> None:
    """Called after Ctrl-C."""
    under_way = sum(self.engine.gauges().values())
    _tell(
      'ending once the step or compilation under way is done; requests that get'
      f' an error: {under_way}'
    )
    await super().shutdown(sockets)
