"""A program that decodes for a benchmark, as a server on this machine."""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import socket
import subprocess
import tempfile
import time
from typing import Any
import urllib.error
import urllib.request
import weakref

from specdec.text import text_files

_START_SECONDS = 300.0


def _stop(process: subprocess.Popen) -> None:
  process.terminate()
  try:
    process.wait(timeout=10)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()


class Server:
  """A server, which ends with this object.

  Raises:
    ValueError: the program does not start; has the last lines that it wrote.
  """

  def __init__(
    self,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
  ):
    self._name = name
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      port = free.getsockname()[1]
    self._address = f'http://127.0.0.1:{port}'
    # A file, because nobody reads while it decodes: a full pipe would stop it.
    with tempfile.TemporaryFile('w+') as log:
      process = subprocess.Popen(
        [*command, '--host', '127.0.0.1', '--port', f'{port}'],
        stdout=log,
        stderr=log,
        env={**os.environ, **(environment or {})},
      )
      weakref.finalize(self, _stop, process)
      end = time.monotonic() + _START_SECONDS
      while not self._is_ready():
        if process.poll() is not None or time.monotonic() > end:
          _stop(process)
          log.seek(0)
          said = log.read().strip().splitlines()[-3:]
          raise ValueError(f'{" ".join(command)} does not start: {said}')
        time.sleep(0.1)

  def _is_ready(self) -> bool:
    try:
      self.read('/health')
      return True
    except OSError:  # Nothing listens yet, or the model is being loaded.
      return False

  def read(self, path: str) -> str:
    """The text at a path of the server."""
    with urllib.request.urlopen(f'{self._address}{path}') as reply:
      return reply.read().decode()

  def ask(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request in JSON; ValueError if it is refused."""
    message = urllib.request.Request(
      f'{self._address}{path}',
      text_files.to_json(request).encode(),
      {'Content-Type': 'application/json'},
    )
    try:
      with urllib.request.urlopen(message) as reply:
        return json.load(reply)
    except urllib.error.HTTPError as error:
      raise ValueError(f'{self._name}: {error.read().decode()}') from error
