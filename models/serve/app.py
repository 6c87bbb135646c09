"""OpenAI's interface over an `Engine`, and the server that has it."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Awaitable
from collections.abc import Callable
import contextlib
import functools
import hmac
import json
import pathlib
import sys
import time
from typing import Any

import anyio
import starlette.applications
import starlette.exceptions
import starlette.requests
import starlette.responses
import starlette.routing
import uvicorn

from specdec.models.serve import answers as answers_lib
from specdec.models.serve import asked as asked_lib
from specdec.models.serve import engine as engine_lib
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


class _Answering(_Response):
  """The answer to one request of a client.

  Its tickets end with it: when all is said, or when the client is gone.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    asked: asked_lib.Asked,
    form: answers_lib.Form,
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
        yield _sent(_Json(self._form.usage_chunk(self._ends)))
    except Exception as error:
      yield _sent(_error(error))
    yield b'data: [DONE]\n\n'


def _sent(event: _Json) -> bytes:
  """An event as the server sends it."""
  return b'data: ' + event.body + b'\n\n'


class _Handlers:
  """The functions that answer, by path."""

  def __init__(self, reader: asked_lib.Reader, api_key: str | None):
    self._reader, self._engine = reader, reader.engine
    self._key, self._begun = api_key, int(time.time())

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
    asked = await anyio.to_thread.run_sync(read)
    form = answers_lib.Form(self._engine.pair, asked, self._reader.model)
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
      print(f'listening at {self.address}', file=sys.stderr, flush=True)
