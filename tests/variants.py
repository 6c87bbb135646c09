"""Tiny random checkpoints of every family, as Hugging Face has them.

The two files in `golden/` say what transformers stores and computes of each.
"""

from collections.abc import Callable
from collections.abc import Mapping
import json
import pathlib
from typing import Any
import zlib

import ml_dtypes
import numpy as np
from safetensors import numpy as safetensors_numpy

VOCAB_SIZE = 40
LENGTH = 12

_GOLDEN = pathlib.Path(__file__).parent / 'golden'
DESCRIBED = _GOLDEN / 'variants.json'
RESULTS = _GOLDEN / 'variants.npz'

Variant = dict[str, Any]
"""`config`, and `tensors`: shapes by name; perhaps `dtype`, `shards`, `length`
of the texts, `buffers`: the causal masks that old versions stored; `scale` of
weights."""

VARIANTS: dict[str, Variant] = json.loads(DESCRIBED.read_text())

# Random shapes of families, longer texts, and the tokens whose logits are kept.
FAMILIES_DESCRIBED = _GOLDEN / 'families.json'
FAMILY_RESULTS = _GOLDEN / 'families.npz'
FAMILIES: dict[str, Variant] = json.loads(FAMILIES_DESCRIBED.read_text())
LONG = np.random.RandomState(1).randint(VOCAB_SIZE, size=40)
CAUSAL = np.tri(len(LONG), dtype=bool)
SOME_WORDS = np.arange(0, VOCAB_SIZE, 5)


def _draw(
  name: str, shape: list[int], dtype: str, scale: float = 0.3
) -> np.ndarray:
  name = name.removeprefix('model.').removeprefix('transformer.')
  is_scale = (
    'norm' in name
    or 'scalar' in name
    or ('ln_' in name and name.endswith('weight'))
  )
  # NumPy never changes what this old generator draws.
  rng = np.random.RandomState(zlib.crc32(name.encode()))
  values = scale * rng.standard_normal(shape) + is_scale
  return values.astype(getattr(ml_dtypes, dtype, dtype))


def _buffers(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
  causal = np.tri(config['n_positions'], dtype=np.uint8)[None, None]
  return {
    f'transformer.h.{layer}.attn.{name}': array
    for layer in range(config['n_layer'])
    for name, array in (
      ('bias', causal),
      ('masked_bias', np.array(-1e4, np.float32)),
    )
  }


def write(variant: Variant | str, folder: pathlib.Path) -> pathlib.Path:
  """Writes a checkpoint; every tensor of it matters for the logits."""
  if isinstance(variant, str):
    variant = VARIANTS[variant]
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(variant['config']))
  dtype, shards = variant.get('dtype', 'float32'), variant.get('shards', 1)
  tensors = {
    name: _draw(name, shape, dtype, variant.get('scale', 0.3))
    for name, shape in variant['tensors'].items()
  }
  if variant.get('buffers'):
    tensors |= _buffers(variant['config'])
  files = dict.fromkeys(tensors, 'model.safetensors')
  if shards > 1:
    files = {
      name: f'model-{number % shards:05d}.safetensors'
      for number, name in enumerate(tensors)
    }
    index = json.dumps({'metadata': {}, 'weight_map': files})
    (folder / 'model.safetensors.index.json').write_text(index)
  for file in set(files.values()):
    safetensors_numpy.save_file(
      {name: tensors[name] for name in tensors if files[name] == file},
      folder / file,
      metadata={'format': 'pt'},
    )
  return folder


def edit_tensors(
  folder: pathlib.Path,
  edits: Mapping[str, Callable[[dict[str, np.ndarray]], np.ndarray] | None],
) -> None:
  """Replaces or adds tensors of a checkpoint of one file; None removes one."""
  path = folder / 'model.safetensors'
  tensors = safetensors_numpy.load_file(path)
  for name, edit in edits.items():
    if edit is None:
      del tensors[name]
    else:
      tensors[name] = edit(tensors)
  safetensors_numpy.save_file(tensors, path)


def tokens(variant: Variant | str) -> np.ndarray:
  """Two rows, no longer than the context."""
  if isinstance(variant, str):
    variant = VARIANTS[variant]
  most = variant.get('length', LENGTH)
  length = min(most, variant['config'].get('n_positions', most))
  drawn = np.random.RandomState(0).randint(VOCAB_SIZE, size=(2, most))
  return drawn[:, :length]
