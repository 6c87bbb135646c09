"""A server that listens until Ctrl-C: uvicorn with the application."""

import sys
from typing import Any

import uvicorn

from specdec.models.serve import app as app_lib
from specdec.models.serve import asked as asked_lib


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
    app = app_lib.make_app(reader, api_key)
    super().__init__(
      uvicorn.Config(
        app,
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
