"""Tiny random block drafters, in folders as their trainers write them.

`golden/block_drafters.npz` says what the packages that define the formats
compute of each; `golden/make_block_drafters.py` makes it.
"""

import numpy as np
import variants

GOLDEN = variants.GOLDEN / 'block_drafters.npz'
VOCAB, WIDTH, INNER, HEADS, KV_HEADS, HEAD_WIDTH = 16, 32, 48, 4, 2, 8
LAYERS, BLOCK, MASK, CONTEXT = 4, 4, 15, 96
SIZES = CONTEXT, WIDTH, INNER, HEADS, KV_HEADS, HEAD_WIDTH
KEPT = np.array([0, 1, 3, 4, 6, 7, 9, 11, 12, 14])  # A reduced vocabulary.
TEXT = 10  # Tokens of the text that a forward reads; the root comes after them.

# A name tells the package. The last two are the drafter of `speculators dspark`
# in layouts of others, which have no package.
CONFIGS = {
  name: variant['config']
  for name, variant in variants.BLOCK_DRAFTERS.items()
  if name != 'target'
}
TARGET = variants.BLOCK_DRAFTERS['target']['config']


def tensors(case):
  """The tensors of a case, by their stored names."""
  arrays = variants.drawn(variants.BLOCK_DRAFTERS[case])
  if case == 'speculators gated':
    arrays['d2t'] = KEPT - np.arange(len(KEPT))
  if case == 'liquid':
    arrays |= {
      name: neighbours(array)
      for name, array in arrays.items()
      if '.q_' in name or '.k_' in name
    }
  return arrays


def neighbours(array):
  """Rows of queries or keys in the order of formats that rotate neighbours."""
  halves = array.reshape(-1, 2, HEAD_WIDTH // 2, *array.shape[1:])
  return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def write(folder, case, *, keys=None, **changed):
  """Writes a folder; `changed` are tensors; None removes a tensor."""
  config = CONFIGS[case] | (keys or {})
  return variants.save(folder, config, tensors(case) | changed)


def write_target(folder):
  """Writes the target, a Qwen 3."""
  return variants.write(variants.BLOCK_DRAFTERS['target'], folder)


def states():
  """`[2, TEXT, WIDTH]`, of the two layers that a forward reads."""
  return variants.draw('states', [2, TEXT, WIDTH])
