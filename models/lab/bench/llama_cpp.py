"""Decoding by llama.cpp, from the GGUF files that our own arms read.

Each arm is a server of llama.cpp, which users install themselves. It is given
the ids of the prompts and the limit, and keeps nothing from one prompt to the
next. Everything else has the defaults of llama.cpp.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import os
import pathlib
import shutil
import subprocess
from typing import Any

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import gguf
from models.lab.bench import peer as peer_lib
from models.lab.bench import server as server_lib
from specdec import sampling as sampling_lib

# Flags of the server, by method; an arm may have other values.
_SPECULATION: Mapping[str, Mapping[str, str]] = {
  'llama.cpp': {},
  'llama.cpp-draft': {'spec_type': 'draft-simple'},
  'llama.cpp-lookup': {'spec_type': 'ngram-simple'},
}


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


def _decode(
  server: server_lib.Server,
  settings: Mapping[str, Any],
  eos_ids: Sequence[int],
  prompt: list[int],
  limit: int,
) -> tuple[list[int], int, int]:
  """See `server.ServerArm`."""
  request = {'prompt': prompt, 'n_predict': limit, 'cache_prompt': False}
  request |= {'return_tokens': True}
  answer = server.ask('/completion', {**settings, **request})
  row = answer['tokens'][:limit]
  if answer['stop_type'] == 'eos' and not {*row} & {*eos_ids}:
    row.append(eos_ids[0])  # The server leaves it out.
  timings = answer['timings']
  return row, timings.get('draft_n_accepted', 0), timings.get('draft_n', 0)


def load(
  found: checkpoint_lib.Checkpoint, given: str, dtype: str
) -> pathlib.Path:
  """The file of a model; ValueError if it is no GGUF file."""
  del dtype
  if not isinstance(found, gguf.GGUFFile):
    raise ValueError(
      f'{given}: llama.cpp reads GGUF files only; name one, or leave out the'
      ' llama.cpp arms'
    )
  return found.path


def _command(
  spec: peer_lib.ArmSpec,
  program: str,
  files: Mapping[str, pathlib.Path],
) -> list[str]:
  options = {
    'model': files['target'],
    'threads': os.cpu_count(),
    'ctx_size': server_lib.CONTEXT,
    'parallel': 1,
    **({'spec_draft_model': files['draft']} if 'draft' in files else {}),
    **_SPECULATION[spec.method],
    **dict(spec.options),
  }
  flags = ((f'--{k.replace("_", "-")}', f'{v}') for k, v in options.items())
  return [program, *(part for flag in flags for part in flag)]


def make_arm(
  spec: peer_lib.ArmSpec,
  task: peer_lib.BenchmarkTask,
  files: Mapping[str, pathlib.Path],
  eos_ids: Sequence[int],
) -> server_lib.ServerArm:
  """Starts a server; ValueError if llama.cpp is missing or does not start."""
  settings = _settings(task.sampling, task.seed)
  command = _command(spec, find_server(task.llama_cpp), files)
  server = server_lib.Server('llama.cpp', command)
  decode = functools.partial(_decode, server, settings, eos_ids)
  return server_lib.ServerArm('llama.cpp', decode, eos_ids, 'draft' in files)


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
  load=load,
  make_arm=make_arm,
)
