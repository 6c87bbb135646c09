"""A server that listens until Ctrl-C: engine, application and uvicorn."""

from collections.abc import Mapping
import contextlib
import dataclasses
import sys
from typing import Any

import uvicorn

import specdec
from specdec import arguments as arguments_lib
from specdec.models import waiting
from specdec.models.serve import app as app_lib
from specdec.models.serve import asked as asked_lib
from specdec.models.serve import engine as engine_lib
from specdec.models.text import chat as chat_lib
from specdec.models.text import generator as generator_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How to serve a generator; see `Engine` and `Reader`."""

  method: str
  model: str
  batch_size: int = 4
  queue_size: int = 64
  context: int | None = None  #: None: that of the target, and at most 2,048.
  max_new_tokens: int = 128
  sampling: specdec.Sampling = specdec.Sampling()
  seed: int | None = None
  #: Other options of `specdec.Slots`.
  slots: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  host: str = '127.0.0.1'
  port: int = 8000  #: 0: a free one.
  api_key: str | None = None


class Server(uvicorn.Server):
  """Ends open streams on Ctrl-C, and says where it listens."""

  def __init__(self, config: uvicorn.Config, engine: engine_lib.Engine):
    super().__init__(config)
    self.engine = engine
    self.address = ''  #: Once it listens.

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


def make_server(
  generator: generator_lib.Generator, settings: Settings
) -> Server:
  """A server that does not listen yet.

  Raises:
    ValueError: a setting cannot be used.
  """
  largest = generator.pair.target.spec.max_positions
  context = settings.context or min(largest, chat_lib.MAX_CONTEXT)
  arguments_lib.check_count('context', context, largest)
  engine = engine_lib.Engine(
    generator,
    method=settings.method,
    batch_size=settings.batch_size,
    context=context,
    queue_size=settings.queue_size,
    **settings.slots,
  )
  reader = asked_lib.Reader(
    engine,
    model=settings.model,
    max_new_tokens=settings.max_new_tokens,
    sampling=settings.sampling,
    seed=settings.seed,
  )
  config = uvicorn.Config(
    app_lib.make_app(engine, reader, api_key=settings.api_key),
    host=settings.host,
    port=settings.port,
    log_level='error',
    lifespan='off',
    timeout_graceful_shutdown=5,
  )
  return Server(config, engine)


def run(generator: generator_lib.Generator, settings: Settings) -> None:
  """Serves until Ctrl-C.

  Raises:
    ValueError: a setting cannot be used.
  """
  server = make_server(generator, settings)
  with waiting.announced('compiling'):
    server.engine.warm_up(settings.sampling)
  with contextlib.suppress(KeyboardInterrupt):  # After all streams have ended.
    server.run()
  server.engine.stop()
  server.engine.join()
