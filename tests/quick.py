"""How programs that run for moments are compiled: fast, and slower to run."""

import os

import jaxlib

_FLAGS = [
  '--xla_backend_optimization_level=0',
  # In one part: where tests run, other processes compile at the same time.
  '--xla_cpu_parallel_codegen_split_count=1',
]
# Compiler options: of programs whose operations are counted as users have them,
# and of programs that compile as fast as others here.
AS_FOR_USERS, PLAIN_FUSIONS = {}, {}
if jaxlib.__version__.startswith('0.10.'):
  # Without optimization, what the fusion emitters write takes up to three times
  # as long to compile. Later versions of XLA cannot do without them.
  _FLAGS.append('--xla_cpu_use_fusion_emitters=false')
  AS_FOR_USERS['xla_cpu_use_fusion_emitters'] = True
  PLAIN_FUSIONS['xla_cpu_use_fusion_emitters'] = False


def environment(**more: str) -> dict[str, str]:
  """Variables of this process, and `more`, for one that has not imported JAX.

  Where in the source an operation was written is not kept, because XLA would
  carry it through all of its passes.
  """
  flags = ' '.join([os.environ.get('XLA_FLAGS', ''), *_FLAGS])
  compiling = {'XLA_FLAGS': flags, 'JAX_TRACEBACK_IN_LOCATIONS_LIMIT': '0'}
  return os.environ | compiling | more
