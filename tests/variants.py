"""Tiny random checkpoints of every family, as Hugging Face has them.

Also heads that targets bring along. Files in `golden/` have the configs, the
shapes of the tensors, and the logits that others compute of each.
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

GOLDEN = pathlib.Path(__file__).parent / 'golden'
DESCRIBED = GOLDEN / 'variants.json'
RESULTS = GOLDEN / 'variants.npz'

Variant = dict[str, Any]
"""`config`, and `tensors`: shapes by name; perhaps `dtype`, `shards`, `length`
of the texts, `buffers`: the causal masks that old versions stored; `scale` of
weights; `minus_one`: as Qwen3.5 stores the scales of most norms; what weights
are drawn by instead of their names: `seed` and a name, or `drawn_by` of some.
"""


def expanded(variant: Variant) -> Variant:
  """A variant in which every tensor has a name of its own.

  In the files a name such as `h.[0,1].ln_1.bias` stands for two.
  """
  shapes = {}
  for name, shape in variant.get('tensors', {}).items():
    before, _, rest = name.partition('[')
    layers, _, after = rest.partition(']')
    shapes |= {f'{before}{at}{after}': shape for at in layers.split(',')}
  return variant | {'tensors': shapes}


def _read(path: pathlib.Path) -> dict[str, Variant]:
  described = json.loads(path.read_text())
  return {name: expanded(described[name]) for name in described}


VARIANTS = _read(DESCRIBED)

# Random shapes of families, longer texts, and the tokens whose logits are kept.
FAMILIES_DESCRIBED = GOLDEN / 'families.json'
FAMILY_RESULTS = GOLDEN / 'families.npz'
FAMILIES = _read(FAMILIES_DESCRIBED)
# Qwen3.5s and MiMos with their MTP layers, and assistants of `gemma4`.
OWN_HEADS = _read(GOLDEN / 'own_heads.json')
BLOCK_DRAFTERS = _read(GOLDEN / 'block_drafters.json')
OWN_HEAD_RESULTS = GOLDEN / 'own_heads.npz'
DEPTHS = 3  # Tokens that these heads draft.
LONG = np.random.RandomState(1).randint(VOCAB_SIZE, size=40)
CAUSAL = np.tri(len(LONG), dtype=bool)
SOME_WORDS = np.arange(0, VOCAB_SIZE, 5)


def draw(
  name: str, shape: list[int], dtype: str = 'float32', scale: float = 0.3
) -> np.ndarray:
  """Values of a tensor, by its name."""
  is_scale = (
    'norm' in name
    or name.endswith(('scalar', 'base_kernel'))
    or ('ln_' in name and name.endswith('weight'))
  )
  # NumPy never changes what this old generator draws.
  rng = np.random.RandomState(zlib.crc32(name.encode()))
  if name.endswith('token_ordering'):
    return rng.permutation(*shape)
  values = scale * rng.standard_normal(shape) + is_scale
  return values.astype(getattr(ml_dtypes, dtype, dtype))


def is_minus_one(name: str) -> bool:
  """Whether a tensor of a Qwen3.5 has the scales of a norm minus one."""
  return 'norm' in name and 'linear_attn' not in name


def drawn(variant: Variant) -> dict[str, np.ndarray]:
  """The tensors of a variant."""
  others, seed = variant.get('drawn_by', {}), variant.get('seed', '')
  dtype, scale = variant.get('dtype', 'float32'), variant.get('scale', 0.3)
  tensors = {}
  for name, shape in variant['tensors'].items():
    short = name.removeprefix('model.').removeprefix('transformer.')
    drawn_by = others.get(name, seed + short)
    tensors[name] = draw(drawn_by, shape, dtype, scale)
    if variant.get('minus_one') and is_minus_one(name):
      tensors[name] -= 1
  return tensors


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


def save(
  folder: pathlib.Path,
  config: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray | None],
  shards: int = 1,
) -> pathlib.Path:
  """Writes a checkpoint without the tensors that are None."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  stored = {n: array for n, array in tensors.items() if array is not None}
  files = dict.fromkeys(stored, 'model.safetensors')
  if shards > 1:
    files = {
      name: f'model-{number % shards:05d}.safetensors'
      for number, name in enumerate(stored)
    }
    index = json.dumps({'metadata': {}, 'weight_map': files})
    (folder / 'model.safetensors.index.json').write_text(index)
  for file in set(files.values()):
    safetensors_numpy.save_file(
      {name: stored[name] for name in stored if files[name] == file},
      folder / file,
      metadata={'format': 'pt'},
    )
  return folder


def write(
  variant: Variant | str,
  folder: pathlib.Path,
  *,
  keys: Mapping[str, Any] | None = None,
  **changed: np.ndarray | None,
) -> pathlib.Path:
  """Writes a checkpoint; every tensor of it matters for the logits.

  `keys` are further ones of its config, or other values; `changed` are other
  tensors, None removes one.
  """
  if isinstance(variant, str):
    variant = VARIANTS[variant]
  tensors = drawn(variant)
  if variant.get('buffers'):
    tensors |= _buffers(variant['config'])
  config = variant['config'] | (keys or {})
  return save(folder, config, tensors | changed, variant.get('shards', 1))


def edit_tensors(
  folder: pathlib.Path,
  edits: Mapping[str, Callable[[dict[str, np.ndarray]], np.ndarray]],
) -> None:
  """Replaces or adds tensors of a checkpoint of one file."""
  path = folder / 'model.safetensors'
  tensors = safetensors_numpy.load_file(path)
  edited = {name: edit(tensors) for name, edit in edits.items()}
  safetensors_numpy.save_file(tensors | edited, path)


def tokens(variant: Variant | str) -> np.ndarray:
  """Two rows, no longer than the context."""
  if isinstance(variant, str):
    variant = VARIANTS[variant]
  most = variant.get('length', LENGTH)
  length = min(most, variant['config'].get('n_positions', most))
  drawn = np.random.RandomState(0).randint(VOCAB_SIZE, size=(2, most))
  return drawn[:, :length]
