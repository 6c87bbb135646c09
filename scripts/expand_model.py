"""Writes a wider, deeper model that computes the same function.

  python scripts/expand_model.py --model=demo --output=/tmp/gpt2-large \
      --width_factor=4 --layers=36
"""

import pathlib

from absl import flags
import command_line
import jax.numpy as jnp

from models.checkpoints import expand

_MODEL = flags.DEFINE_string('model', 'demo', 'folder or hub id to expand')
_OUTPUT = flags.DEFINE_string(
  'output', None, 'Hugging Face folder to write', required=True
)
_WIDTH_FACTOR = flags.DEFINE_integer(
  'width_factor', 4, 'multiplies width, heads and inner width', lower_bound=1
)
_LAYERS = flags.DEFINE_integer('layers', 36, 'transformer blocks of the result')
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16', 'float16'], 'to store'
)
_SEED = flags.DEFINE_integer('seed', 0, 'of the added weights')


def main() -> None:
  shape = expand.expand_pretrained(
    _MODEL.value,
    pathlib.Path(_OUTPUT.value),
    width_factor=_WIDTH_FACTOR.value,
    num_layers=_LAYERS.value,
    seed=_SEED.value,
    dtype=jnp.dtype(_DTYPE.value),
  )
  print(f'wrote {_OUTPUT.value}: {shape}')


if __name__ == '__main__':
  command_line.run(main)
