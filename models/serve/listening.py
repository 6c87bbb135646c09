"""A server that listens until Ctrl-C: engine, application and uvicorn."""

import dataclasses
import sys
from typing import Any

import uvicorn

from models import waiting
from models.serve import app as app_lib
from models.serve import asked as asked_lib
from models.serve import engine as engine_lib
from models.text import chat as chat_lib
from models.text import generator as generator_lib
import specdec
from specdec import arguments as arguments_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How to serve a generator; see `Engine` and `Reader`."""

  method: str
  model: str
  batch_size: int
  queue_size: int
  context: int | None  #: None: that of the target, and at most 2,048.
  max_new_tokens: int
  sampling: specdec.Sampling
  seed: int | None
  slots: dict[str, Any]  #: Other options of `specdec.Slots`.
  host: str
  port: int  #: 0: a free one.
  api_key: str | None


class _Server(uvicorn.Server):
  """Ends open streams on Ctrl-C, and says where it listens."""

  def __init__(self, config: uvicorn.Config, engine: engine_lib.Engine):
    super().__init__(config)
    self._engine = engine

  def handle_exit(self, sig: int, frame: Any) -> None:
    """Called on Ctrl-C."""
    self._engine.stop()
    super().handle_exit(sig, frame)

  async def startup(self, sockets: Any = None) -> None:
    """Called before the first request."""
    await super().startup(sockets)
    for server in self.servers:
      for socket in server.sockets:
        host, port, *_ = socket.getsockname()
        host = f'[{host}]' if ':' in host else host
        print(f'listening at http://{host}:{port}', file=sys.stderr, flush=True)


def make_engine(
  generator: generator_lib.Generator, settings: Settings
) -> engine_lib.Engine:
  """The engine of the settings.

  Raises:
    ValueError: the context is longer than the target's.
  """
  largest = generator.pair.target.spec.max_positions
  context = settings.context or min(largest, chat_lib.MAX_CONTEXT)
  arguments_lib.check_count('context', context, largest)
  return engine_lib.Engine(
    generator,
    method=settings.method,
    batch_size=settings.batch_size,
    context=context,
    queue_size=settings.queue_size,
    **settings.slots,
  )


def make_app(engine: engine_lib.Engine, settings: Settings) -> Any:
  """The application of the settings."""
  reader = asked_lib.Reader(
    engine,
    model=settings.model,
    max_new_tokens=settings.max_new_tokens,
    sampling=settings.sampling,
    seed=settings.seed,
  )
  return app_lib.make_app(engine, reader, api_key=settings.api_key)


def run(generator: generator_lib.Generator, settings: Settings) -> None:
  """Serves until Ctrl-C.

  Raises:
    ValueError: a setting cannot be used.
    OSError: the port cannot be had.
  """
  engine = make_engine(generator, settings)
  app = make_app(engine, settings)
  with waiting.announced('compiling'):
    engine.warm_up(settings.sampling)
  config = uvicorn.Config(
    app,
    host=settings.host,
    port=settings.port,
    log_level='error',
    lifespan='off',
    timeout_graceful_shutdown=5,
  )
  _Server(config, engine).run()
  engine.stop()
  engine.join()
