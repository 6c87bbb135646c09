"""Decoding by llama.cpp, from the GGUF files that our own arms read.

Each arm is a server of llama.cpp, which users install themselves. It is given
the ids of the prompts and the limit, and keeps nothing from one prompt to the
next. Everything else has the defaults of llama.cpp.
"""

from collections.abc import Mapping
import os
import shutil
import subprocess
from typing import Any

from specdec.models.lab.bench import peer as peer_lib
from specdec.models.lab.bench import server as server_lib

# Flags of the server, by method; an arm may have other values.
_SPECULATION: Mapping[str, Mapping[str, str]] = {
  'llama.cpp': {},
  'llama.cpp-draft': {'spec_type': 'draft-simple'},
  'llama.cpp-lookup': {'spec_type': 'ngram-simple'},
}


def _find(task: peer_lib.BenchmarkTask) -> str:
  """The program `llama-server`, in a folder or on the path."""
  name = task.llama_cpp
  found = shutil.which('llama-server', path=name)
  if found is None:
    raise ValueError(
      f'--llama_cpp={name or ""}: there is no program llama-server in'
      f' {name or "any folder of PATH"}; install llama.cpp'
      ' (https://github.com/ggml-org/llama.cpp) and name its folder of programs'
    )
  return found


class LlamaCpp(server_lib.ServerPeer):
  """See the top of the file; the options of arms are flags of the server."""

  name = 'llama.cpp'
  reads_files = True
  methods: Mapping[str, tuple[str, ...]] = {
    'llama.cpp': (),
    'llama.cpp-draft': ('spec_draft_n_max', 'spec_draft_p_min'),
    'llama.cpp-lookup': (
      'spec_type',
      'spec_ngram_simple_size_n',
      'spec_ngram_simple_size_m',
    ),
  }
  dtypes = ('gguf',)
  drafted = ('llama.cpp-draft',)
  lacks = ('logit_bias', 'repetition_penalty')

  def describe(self, task: peer_lib.BenchmarkTask) -> dict[str, Any]:
    """Version and threads of the server."""
    command = [_find(task), '--version']
    shown = subprocess.run(command, capture_output=True, text=True)
    lines = (shown.stdout + shown.stderr).splitlines()
    version = [line for line in lines if line.startswith('version')]
    return {'llama.cpp': ' '.join(version), 'llama.cpp_threads': os.cpu_count()}

  def command(self, spec, task, paths):
    """See the base class."""
    options = {
      'model': paths['target'],
      'threads': os.cpu_count(),
      'ctx_size': server_lib.CONTEXT,
      'parallel': 1,
      **({'spec_draft_model': paths['draft']} if 'draft' in paths else {}),
      **_SPECULATION[spec.method],
      **dict(spec.options),
    }
    flags = ((f'--{k.replace("_", "-")}', f'{v}') for k, v in options.items())
    return [_find(task), *(part for flag in flags for part in flag)]

  def decode(self, server, settings, eos_ids, prompt, limit):
    """See the base class."""
    request = {'prompt': prompt, 'n_predict': limit, 'cache_prompt': False}
    request |= {'return_tokens': True}
    request['samplers'] = ['temperature', 'top_k', 'top_p', 'min_p']
    answer = server.ask('/completion', {**settings, **request})
    row = answer['tokens'][:limit]
    if answer['stop_type'] == 'eos' and not {*row} & {*eos_ids}:
      row.append(eos_ids[0])  # The server leaves it out.
    timings = answer['timings']
    return row, timings.get('draft_n_accepted', 0), timings.get('draft_n', 0)
