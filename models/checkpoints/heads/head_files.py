"""The files of drafting heads and block drafters, as they are written."""

from collections.abc import Mapping
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec.models.checkpoints import families
from specdec.models.checkpoints import hub
from specdec.models.checkpoints import hugging_face
from specdec.models.checkpoints.heads import head_tensors
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import rope as rope_lib


def write(
  module: Any,
  folder: pathlib.Path,
  keys: Mapping[str, Any],
  *,
  lm_head: Any,
  ids: np.ndarray | None,
  dtype: jax.typing.DTypeLike,
  first_layer: str = 'layers.0.',
) -> None:
  """Writes the folder of a drafter; see `heads.save`.

  Args:
    module: a drafter.
    folder: made if it does not exist.
    keys: of config.json, in addition to the keys of the layers.
    lm_head: `[D, H]`, its own output matrix, if any.
    ids: `[D]`, the tokens of a reduced vocabulary, if any.
    dtype: of the matrices and norms.
    first_layer: prefix of the names of the first layer's tensors.

  Raises:
    ValueError: the layers have several rotations.
  """
  config, dtype = module.config, jnp.dtype(dtype)
  if not isinstance(config.rope, rope_lib.Rope):
    raise ValueError('a head without one rotation of all layers is not saved')
  layers = families.written_keys(
    nn_llama.LlamaConfig(**nn_llama.fields_of(config)),
    families.SAVED_LAYERS,
    dtype=dtype.name,
  )
  stored = dict[str, np.ndarray]()
  for path, leaf in hub.flat_params(module)[1].items():
    name = families.parameter_name(path)
    if name.startswith('layers.0.'):
      name = first_layer + name.removeprefix('layers.0.')
    stored[name] = np.asarray(leaf, dtype=dtype)
  if lm_head is not None:
    stored['lm_head.weight'] = np.asarray(lm_head, dtype=dtype)
  if ids is not None:
    stored[head_tensors.D2T] = np.asarray(ids - np.arange(len(ids)), np.int64)
    tokens = np.arange(config.vocab_size)
    stored[head_tensors.T2D] = np.isin(tokens, ids)
  described = {**layers, 'rope_theta': config.rope.theta, **keys}
  hugging_face.write(folder, described, stored)
