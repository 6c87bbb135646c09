"""OpenAI's interface over an `Engine`, as a Starlette application."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Awaitable
from collections.abc import Callable
import functools
import hmac
import json
import pathlib
import time
from typing import Any
import uuid

import anyio
import starlette.applications
import starlette.exceptions
import starlette.requests
import starlette.responses
import starlette.routing

from specdec.models.serve import answers as answers_lib
from specdec.models.serve import asked as asked_lib
from specdec.models.serve import engine as engine_lib
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import text_files

_MOST_BYTES = 8 << 20  # The size of a body.
_MOST_SECONDS = 30.0  # In which a body arrives.
_PAGE = pathlib.Path(__file__).with_name('page.html')

_Refused = asked_lib.Refused
_Response = starlette.responses.Response
_Send = Callable[[Any], Awaitable[None]]
_Receive = Callable[[], Awaitable[Any]]


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
  """The status and the body of an error, in OpenAI's form."""
  status, param, code = 500, None, None
  if isinstance(error, _Refused):
    status, param, code = error.status, error.param, error.code
  elif isinstance(error, starlette.exceptions.HTTPException):
    status = error.status_code
  elif isinstance(error, engine_lib.QueueFull):
    status, code = 429, 'queue_full'
  elif isinstance(error, engine_lib.Stopped):
    status, code = 503, 'stopped'
  elif isinstance(error, ValueError):
    status = 400
  kind = 'invalid_request_error' if status < 500 else 'server_error'
  described = {
    'message': getattr(error, 'detail', str(error)),
    'type': kind,
    'param': param,
    'code': code,
  }
  return status, {'error': described}


def _json(value: Any, status: int = 200) -> _Response:
  text = text_files.to_json(value)
  return _Response(text, status, media_type='application/json')


async def _refuse(_: starlette.requests.Request, error: Exception) -> _Response:
  status, body = _error(error)
  return _json(body, status)


def _not_json(name: str) -> Any:
  raise ValueError(f'{name} is no JSON')


async def _body(request: starlette.requests.Request) -> dict[str, Any]:
  """The JSON object of a request."""
  parts, size = [], 0
  try:
    async with asyncio.timeout(_MOST_SECONDS):
      async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
          raise _Refused(f'the body exceeds {_MOST_BYTES} bytes', status=413)
  except TimeoutError as error:
    raise _Refused('the body did not arrive in time', status=408) from error
  try:
    text = b''.join(parts).decode()
    found = json.loads(text, parse_constant=_not_json)
  except (ValueError, RecursionError) as error:
    raise _Refused(f'the body is no JSON: {error}') from error
  if not isinstance(found, dict):
    raise _Refused('the body must be a JSON object')
  return found


async def _gone(receive: _Receive) -> None:
  """Returns when the client is gone."""
  while (await receive())['type'] != 'http.disconnect':
    pass


class _Answering:
  """The answer to one request of a client, as a response of Starlette.

  Its tickets end with it: when all is said, or when the client is gone.
  """

  def __init__(
    self, engine: engine_lib.Engine, asked: asked_lib.Asked, form: Any
  ):
    self._engine, self._asked, self._form = engine, asked, form
    self._events: asyncio.Queue[tuple[int, engine_lib.Event]] = asyncio.Queue()

  async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
    del scope
    loop = asyncio.get_running_loop()

    def listen(index: int, event: engine_lib.Event) -> None:
      loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    requests = self._asked.requests
    listeners = [functools.partial(listen, i) for i in range(len(requests))]
    tickets = self._engine.submit(requests, listeners)
    answer = self._stream if self._asked.stream else self._whole
    tasks = [
      asyncio.ensure_future(one) for one in (answer(send), _gone(receive))
    ]
    try:
      await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
      if tasks[0].done():
        await tasks[0]  # Raises what it raised.
    finally:
      for task in tasks:
        task.cancel()
      self._engine.cancel(tickets)

  async def _all_events(self) -> AsyncIterator[tuple[int, engine_lib.Event]]:
    """The events of all choices until the last has ended."""
    missing = len(self._asked.requests)
    while missing:
      index, event = await self._events.get()
      if isinstance(event, Exception):
        raise event
      missing -= isinstance(event, engine_lib.Answer)
      yield index, event

  async def _whole(self, send: _Send) -> None:
    pieces: list[list[token_bytes_lib.Said]] = [
      [] for _ in self._asked.requests
    ]
    ends: list[Any] = [None] * len(pieces)
    async for index, event in self._all_events():
      if isinstance(event, engine_lib.Piece):
        pieces[index] += event.said
      else:
        ends[index] = event
    said = [
      token_bytes_lib.Said(
        ''.join(piece.text for piece in row),
        ''.join(piece.reasoning for piece in row),
      )
      for row in pieces
    ]
    whole = functools.partial(self._form.whole, said, ends)
    body = await anyio.to_thread.run_sync(whole)
    await _json(body)({'type': 'http'}, _no_receive, send)

  async def _stream(self, send: _Send) -> None:
    ends: dict[int, engine_lib.Answer] = {}
    begun = False

    async def write(value: Any) -> None:
      text = value if isinstance(value, str) else text_files.to_json(value)
      body = f'data: {text}\n\n'.encode()
      await send(
        {'type': 'http.response.body', 'body': body, 'more_body': True}
      )

    try:
      async for index, event in self._all_events():
        if not begun:  # Until now an error would have had a status of its own.
          begun = True
          await send(_STREAM_HEAD)
          for chunk in self._form.first():
            await write(chunk)
        if isinstance(event, engine_lib.Answer):
          ends[index] = event
        await write(self._form.chunk(index, event))
      if self._asked.include_usage:
        every = [ends[index] for index in range(len(ends))]
        await write(self._form.usage_chunk(every))
    except Exception as error:
      if not begun:
        raise
      await write(_error(error)[1])
    await write('[DONE]')
    await send({'type': 'http.response.body', 'body': b''})


_STREAM_HEAD = {
  'type': 'http.response.start',
  'status': 200,
  'headers': [
    (b'content-type', b'text/event-stream; charset=utf-8'),
    (b'cache-control', b'no-cache'),
  ],
}


async def _no_receive() -> Any:
  return {'type': 'http.disconnect'}


class _Handlers:
  """The functions that answer, by path."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    reader: asked_lib.Reader,
    api_key: str | None,
  ):
    self._engine, self._reader = engine, reader
    self._key, self._begun = api_key, time.time()

  def check_key(self, request: starlette.requests.Request) -> None:
    """Refuses a request without the key, if there is one."""
    given = request.headers.get('authorization', '')
    wanted = f'Bearer {self._key}'
    if self._key is not None and not hmac.compare_digest(
      given.encode('latin-1'), wanted.encode()
    ):
      raise _Refused(
        'the header Authorization must be: Bearer and the --api_key',
        status=401,
        code='invalid_api_key',
      )

  async def complete(
    self, request: starlette.requests.Request, *, is_chat: bool
  ) -> Any:
    """Answers a request for a chat or for a text."""
    self.check_key(request)
    body = await _body(request)
    read = functools.partial(self._reader.read, body, is_chat=is_chat)
    asked = await anyio.to_thread.run_sync(read)
    form = answers_lib.Form(
      self._engine.pair,
      asked,
      model=self._reader.model,
      name=uuid.uuid4().hex,
      created=int(time.time()),
    )
    return _Answering(self._engine, asked, form)

  async def models(self, request: starlette.requests.Request) -> _Response:
    """The one model, and what a page must know about it."""
    self.check_key(request)
    engine = self._engine
    model = {
      'id': self._reader.model,
      'object': 'model',
      'created': int(self._begun),
      'owned_by': 'specdec',
      'max_model_len': engine.context,
      'specdec': {
        'methods': [*dict.fromkeys([engine.method, engine_lib.PLAIN])],
        'has_chat_template': bool(engine.pair.tokenizer.chat_template),
      },
    }
    return _json({'object': 'list', 'data': [model]})

  async def health(self, _: starlette.requests.Request) -> _Response:
    """Whether the server answers."""
    return _json({'status': 'ok'})

  async def metrics(self, request: starlette.requests.Request) -> _Response:
    """Figures in the format of Prometheus."""
    self.check_key(request)
    lines = []
    for kind, figures, suffix in (
      ('counter', self._engine.counts, '_total'),
      ('gauge', self._engine.gauges(), ''),
    ):
      for name, value in figures.items():
        full = f'specdec_{name}{suffix}'
        lines += [f'# TYPE {full} {kind}', f'{full} {value:g}']
    text = '\n'.join([*lines, ''])
    return _Response(text, media_type='text/plain; version=0.0.4')

  async def page(self, _: starlette.requests.Request) -> _Response:
    """The page for people."""
    return starlette.responses.HTMLResponse(_PAGE.read_text('utf-8'))


def make_app(
  engine: engine_lib.Engine,
  reader: asked_lib.Reader,
  *,
  api_key: str | None = None,
) -> starlette.applications.Starlette:
  """The application; `api_key` None lets everybody ask."""
  handlers = _Handlers(engine, reader, api_key)
  chat, text = (
    functools.partial(handlers.complete, is_chat=is_chat)
    for is_chat in (True, False)
  )
  route = starlette.routing.Route
  errors: list[Any] = [
    Exception,
    _Refused,
    starlette.exceptions.HTTPException,
    engine_lib.Failed,
    engine_lib.QueueFull,
    engine_lib.Stopped,
  ]
  return starlette.applications.Starlette(
    routes=[
      route('/v1/chat/completions', chat, methods=['POST']),
      route('/v1/completions', text, methods=['POST']),
      route('/v1/models', handlers.models),
      route('/health', handlers.health),
      route('/metrics', handlers.metrics),
      route('/', handlers.page),
    ],
    exception_handlers=dict.fromkeys(errors, _refuse),
  )
