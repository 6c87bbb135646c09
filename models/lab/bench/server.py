"""A program that decodes for a benchmark, as a server on this machine."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
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

from models.lab.bench import peer as peer_lib
from specdec import generation as generation_lib
from specdec.text import text_files

CONTEXT = 4096
"""Slots of the cache of a server, which serves one prompt at a time."""

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


@dataclasses.dataclass(frozen=True)
class ServerArm:
  """Decodes with a server, one prompt at a time; a `timing.Arm`.

  Attributes:
    name: of the peer, for messages.
    decode: makes new tokens of a prompt and a limit, and says how many of them
      were accepted drafts, and how many tokens were drafted.
    eos_ids: the tokens that end a text.
    has_draft: whether a model drafts, whose forwards are counted.
  """

  name: str
  decode: Callable[[list[int], int], tuple[list[int], int, int]]
  eos_ids: Sequence[int]
  has_draft: bool

  def __call__(
    self, prompts: Sequence[Sequence[int]], limit: int
  ) -> generation_lib.Generation:
    (prompt,) = prompts
    if len(prompt) + limit > CONTEXT:
      raise ValueError(
        f'a prompt of {len(prompt)} tokens and max_new_tokens={limit} exceed'
        f' the context of the {self.name} arms, {CONTEXT} tokens'
      )
    row, accepted, drafted = self.decode([*map(int, prompt)], limit)
    forwards = {'target': max(len(row) - accepted, 1)}
    if self.has_draft:
      forwards['draft'] = drafted
    return peer_lib.as_generation([row], self.eos_ids, forwards)
