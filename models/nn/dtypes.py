"""Names of dtypes, and which 16-bit floats a platform computes in natively."""

import pathlib

import jax

AUTO = 'auto'
"""In place of a dtype: see `checkpoint.resolve_dtype`."""

# Flags of x86 processors with products of bfloat16, as in /proc/cpuinfo.
_BFLOAT16_INSTRUCTIONS = {'avx512_bf16', 'amx_bf16'}


def native_dtypes() -> frozenset[str]:
  """The 16-bit floats that the default device multiplies without emulation.

  On CPU XLA has kernels for bfloat16 where the processor has instructions for
  it; float16 it always converts. NVIDIA GPUs have products of float16 since
  compute capability 7.0, of bfloat16 since 8.0. TPUs have bfloat16 only.
  """
  platform = jax.default_backend()
  if platform == 'cpu':
    cpuinfo = pathlib.Path('/proc/cpuinfo')
    words = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return frozenset({'bfloat16'} if _BFLOAT16_INSTRUCTIONS & {*words} else ())
  if platform == 'tpu':
    return frozenset({'bfloat16'})
  capability = getattr(jax.devices()[0], 'compute_capability', '')
  try:  # NVIDIA's are numbers; AMD's are names, and have both dtypes.
    version = float(capability)
  except ValueError:
    version = 9.0
  return frozenset(
    name
    for name, since in (('float16', 7.0), ('bfloat16', 8.0))
    if version >= since
  )
