"""Decoding by llama.cpp, from the GGUF files that our own arms read.

Each arm is a server of llama.cpp, which users install themselves. It is given
the ids of the prompts and the limit, and keeps nothing from one prompt to the
next. Everything else has the defaults of llama.cpp.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import os
import shutil
import subprocess
from typing import Any

from models.checkpoints import gguf
from models.checkpoints import hub
from models.lab.bench import peer as peer_lib
from models.lab.bench import server as server_lib
from specdec import sampling as sampling_lib

# Flags of the server, by method; an arm may have other values.
_SPECULATION: Mapping[str, Mapping[str, str]] = {
  'llama.cpp': {},
  'llama.cpp-draft': {'spec_type': 'draft-simple'},
  'llama.cpp-lookup': {'spec_type': 'ngram-simple'},
}
_CONTEXT = 4096  # Slots of the cache, of two bytes per element.


def find_server(name: str | None) -> str:
  """The program `llama-server`, in a folder or on the path.

  Raises:
    ValueError: there is none.
  """
  found = shutil.which('llama-server', path=name)
  if found is None:
    raise ValueError(
      f'--llama_cpp={name or ""}: there is no program llama-server in'
      f' {name or "any folder of PATH"}; install llama.cpp'
      ' (https://github.com/ggml-org/llama.cpp) and name its folder of programs'
    )
  return found


def describe(task: peer_lib.BenchmarkTask) -> dict[str, Any]:
  """Version and threads of the server."""
  command = [find_server(task.llama_cpp), '--version']
  shown = subprocess.run(command, capture_output=True, text=True)
  lines = (shown.stdout + shown.stderr).splitlines()
  version = [line for line in lines if line.startswith('version')]
  return {'llama.cpp': ' '.join(version), 'llama.cpp_threads': os.cpu_count()}


def _settings(sampling: sampling_lib.Sampling, seed: int) -> dict[str, Any]:
  """The fields of a request for a `Sampling`, in the order of its fields."""
  if sampling.logit_bias is not None or sampling.repetition_penalty is not None:
    raise ValueError(
      'llama.cpp arms have no --logit_bias and --repetition_penalty; leave them'
      ' out'
    )
  return {
    'seed': seed,
    'samplers': ['temperature', 'top_k', 'top_p', 'min_p'],
    'temperature': sampling.temperature,
    'top_k': sampling.top_k or 0,
    'top_p': 1.0 if sampling.top_p is None else sampling.top_p,
    'min_p': 0.0 if sampling.min_p is None else sampling.min_p,
  }


class _Arm:
  """Decodes with a server; a `models.lab.bench.timing.Arm`."""

  def __init__(self, server, task, eos_ids, has_draft):
    self._server, self._eos_ids, self._has_draft = server, eos_ids, has_draft
    self._settings = _settings(task.sampling, task.seed)

  def __call__(self, prompts: Sequence[Sequence[int]], limit: int):
    (prompt,) = prompts
    if len(prompt) + limit > _CONTEXT:
      raise ValueError(
        f'a prompt of {len(prompt)} tokens and max_new_tokens={limit} exceed'
        f' the context of the llama.cpp arms, {_CONTEXT} tokens'
      )
    answer = self._server.ask(
      '/completion',
      self._settings
      | {
        'prompt': [*map(int, prompt)],
        'n_predict': limit,
        'cache_prompt': False,
        'return_tokens': True,
      },
    )
    row = answer['tokens'][:limit]
    if answer['stop_type'] == 'eos' and not {*row} & {*self._eos_ids}:
      row.append(self._eos_ids[0])  # The server leaves it out.
    timings = answer['timings']
    accepted = timings.get('draft_n_accepted', 0)
    forwards = {'target': max(len(row) - accepted, 1)}
    if self._has_draft:
      forwards['draft'] = timings.get('draft_n', 0)
    return peer_lib.as_generation([row], self._eos_ids, forwards)


def _file(name: str, flag: str) -> gguf.GGUFFile:
  found = hub.locate(name)
  if not isinstance(found, gguf.GGUFFile):
    raise ValueError(
      f'--{flag}={name}: llama.cpp reads GGUF files only; name one, or leave'
      ' out the llama.cpp arms'
    )
  return found


def _command(
  spec: peer_lib.ArmSpec,
  program: str,
  files: Mapping[str, gguf.GGUFFile],
) -> list[str]:
  options = {
    'model': files['target'].path,
    'threads': os.cpu_count(),
    'ctx_size': _CONTEXT,
    'parallel': 1,
    **({'spec_draft_model': files['draft'].path} if 'draft' in files else {}),
    **_SPECULATION[spec.method],
    **dict(spec.options),
  }
  flags = ((f'--{k.replace("_", "-")}', f'{v}') for k, v in options.items())
  return [program, *(part for flag in flags for part in flag)]


def make_arms(
  specs: Sequence[peer_lib.ArmSpec],
  task: peer_lib.BenchmarkTask,
  eos_ids: Sequence[int],
) -> dict[peer_lib.ArmSpec, peer_lib.ReadyArm]:
  """Starts a server for each arm.

  Raises:
    ValueError: llama.cpp is missing or does not start, or a model is no GGUF
      file.
  """
  program = find_server(task.llama_cpp)
  arms = {}
  for spec in specs:
    files = {'target': _file(task.models.target, 'target')}
    if spec.method in PEER.drafted and task.models.draft is not None:
      files['draft'] = _file(task.models.draft, 'draft')
    server = server_lib.Server('llama.cpp', _command(spec, program, files))
    arms[spec] = peer_lib.ReadyArm(
      _Arm(server, task, eos_ids, 'draft' in files)
    )
  return arms


PEER = peer_lib.Peer(
  methods={  # The options are flags of the server.
    'llama.cpp': (),
    'llama.cpp-draft': ('spec_draft_n_max', 'spec_draft_p_min'),
    'llama.cpp-lookup': (
      'spec_type',
      'spec_ngram_simple_size_n',
      'spec_ngram_simple_size_m',
    ),
  },
  dtypes=('gguf',),
  drafted=('llama.cpp-draft',),
  describe=describe,
  make_arms=make_arms,
)
