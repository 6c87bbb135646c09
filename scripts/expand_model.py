"""Writes a wider, deeper model that computes the same function.

  python scripts/expand_model.py --model=demo --output=/tmp/gpt2-large \
      --width_factor=4 --layers=36
"""

import pathlib

from absl import flags
import command_line

_FLAGS = flags.FLAGS

flags.DEFINE_string('model', 'demo', 'folder or hub id to expand')
flags.DEFINE_string(
  'output', None, 'Hugging Face folder to write', required=True
)
flags.DEFINE_integer(
  'width_factor', 4, 'multiplies width, heads and inner width', lower_bound=1
)
flags.DEFINE_integer('layers', 36, 'number of blocks of the result')
flags.DEFINE_integer(
  'vocab_size',
  None,
  'tokens of the result; added tokens are hardly ever chosen; default: as many'
  ' as the model has',
)
flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16', 'float16'], 'stored dtype'
)


def main() -> None:
  import jax.numpy as jnp

  from specdec.models.checkpoints import expand

  shape = expand.expand_pretrained(
    _FLAGS.model,
    pathlib.Path(_FLAGS.output),
    width_factor=_FLAGS.width_factor,
    num_layers=_FLAGS.layers,
    vocab_size=_FLAGS.vocab_size,
    dtype=jnp.dtype(_FLAGS.dtype),
  )
  print(f'wrote {_FLAGS.output}: {shape}')


if __name__ == '__main__':
  command_line.run(main)
