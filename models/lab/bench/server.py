"""A program that decodes for a benchmark, as a server on this machine."""

import abc
from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time
from typing import Any
import urllib.error
import urllib.request
import weakref

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import gguf
from specdec.models.lab.bench import peer as peer_lib
from specdec.models.lab.bench import timing
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

  def __init__(self, name: str, command: Sequence[str]):
    self._name = name
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      port = free.getsockname()[1]
    self._address = f'http://127.0.0.1:{port}'
    # By default vLLM leaves a core to the server.
    cores = {'VLLM_CPU_OMP_THREADS_BIND': f'0-{(os.cpu_count() or 1) - 1}'}
    # A file, because nobody reads while it decodes: a full pipe would stop it.
    with tempfile.TemporaryFile('w+') as log:
      process = subprocess.Popen(
        [*command, '--host', '127.0.0.1', '--port', f'{port}'],
        stdout=log,
        stderr=log,
        env={**os.environ, **cores},
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


class ServerPeer(peer_lib.Peer):
  """A program that serves a model, one prompt at a time.

  Attributes:
    name: of the peer.
    reads_files: whether it reads GGUF files; otherwise folders.
  """

  name: str
  reads_files: bool

  @abc.abstractmethod
  def command(
    self,
    spec: peer_lib.ArmSpec,
    task: peer_lib.BenchmarkTask,
    paths: Mapping[str, pathlib.Path],
  ) -> list[str]:
    """The command line of a server; ValueError if it is not installed."""

  @abc.abstractmethod
  def decode(
    self,
    server: Server,
    settings: Mapping[str, Any],
    eos_ids: Sequence[int],
    prompt: list[int],
    limit: int,
  ) -> tuple[list[int], int, int]:
    """New tokens, how many of them are accepted drafts, and how many were made.

    `settings` are fields of the request.
    """

  def load(
    self, found: checkpoint_lib.Checkpoint, given: str, dtype: str
  ) -> pathlib.Path:
    """The path of a model; see the base class."""
    del dtype
    if isinstance(found, gguf.GGUFFile) != self.reads_files:
      kind = 'GGUF files' if self.reads_files else 'folders'
      raise ValueError(
        f'{given}: the {self.name} arms read {kind}; name one, or leave them'
        ' out'
      )
    return found.path

  def make_arm(
    self,
    spec: peer_lib.ArmSpec,
    task: peer_lib.BenchmarkTask,
    models: Mapping[str, pathlib.Path],
    eos_ids: Sequence[int],
  ) -> timing.Arm:
    """Starts a server; see the base class."""
    server = Server(self.name, self.command(spec, task, models))
    sampling = task.sampling
    settings = {
      'seed': task.seed,
      'temperature': sampling.temperature,
      'top_k': sampling.top_k or 0,
      'top_p': 1.0 if sampling.top_p is None else sampling.top_p,
      'min_p': 0.0 if sampling.min_p is None else sampling.min_p,
    }
    if sampling.repetition_penalty is not None:
      settings['repetition_penalty'] = sampling.repetition_penalty

    def arm(prompts, limit):
      (prompt,) = prompts
      if len(prompt) + limit > CONTEXT:
        raise ValueError(
          f'a prompt of {len(prompt)} tokens and max_new_tokens={limit} exceed'
          f' the context of the {self.name} arms, {CONTEXT} tokens'
        )
      row, accepted, drafted = self.decode(
        server, settings, eos_ids, [*map(int, prompt)], limit
      )
      forwards = {'target': max(len(row) - accepted, 1)}
      if 'draft' in models:
        forwards['draft'] = drafted
      return peer_lib.as_generation([row], eos_ids, forwards)

    return arm
