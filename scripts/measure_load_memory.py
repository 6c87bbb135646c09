"""Measures the peak of host memory while a model is loaded, as JSON (Linux).

python scripts/measure_load_memory.py --model=openai-community/gpt2-large
"""

import json
import pathlib

from absl import flags
import command_line
import jax
import jax.numpy as jnp

from models.checkpoints import hub

_MODEL = flags.DEFINE_string('model', 'demo', 'folder or hub id to load')
_DTYPE = flags.DEFINE_enum(
  'dtype', 'bfloat16', ['float32', 'bfloat16'], 'of the loaded matrices'
)


def _status_bytes(key: str) -> int:
  """A size in `/proc/self/status`."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    name, _, value = line.partition(':')
    if name == key:
      return 1024 * int(value.removesuffix('kB'))
  raise ValueError(f'/proc/self/status has no {key}')


def main() -> None:
  folder = hub.locate(_MODEL.value)
  files = sum(file.stat().st_size for file in folder.glob('*.safetensors'))
  jax.devices()  # The backend's own memory is not the loader's.
  before = _status_bytes('VmRSS')
  module = hub.load_module(folder, dtype=jnp.dtype(_DTYPE.value))
  jax.block_until_ready(jax.tree.leaves(module))
  # The high-water mark may predate loading: then this is too much, not too
  # little.
  peak = _status_bytes('VmHWM') - before
  result = {
    'model': _MODEL.value,
    'dtype': _DTYPE.value,
    'checkpoint_bytes': files,
    'loaded_bytes': sum(leaf.nbytes for leaf in jax.tree.leaves(module)),
    'peak_bytes': peak,
    'peak_per_checkpoint_byte': round(peak / files, 3),
  }
  print(json.dumps(result))


if __name__ == '__main__':
  command_line.run(main)
