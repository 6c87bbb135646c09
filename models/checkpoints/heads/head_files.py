"""The files of drafting heads and block drafters, as they are written."""

import pathlib
from typing import Any

from flax import nnx
import jax.numpy as jnp
import numpy as np

from models.checkpoints import families
from models.checkpoints import hub
from models.checkpoints import hugging_face
from models.checkpoints import llama as checkpoints_llama
from models.checkpoints.heads import head_tensors
from models.nn import llama_config
from models.nn import rope as rope_lib
from specdec.text import text_files
from specdec.text import whole_files


def keys_of_layers(
  config: llama_config.LlamaConfig, dtype: jnp.dtype
) -> dict[str, Any]:
  """The keys of config.json that the layers of a drafter have."""
  if not isinstance(config.rope, rope_lib.Rope):
    raise ValueError('a head without one rotation of all layers is not saved')
  described = checkpoints_llama.to_hugging_face(
    llama_config.LlamaConfig(**llama_config.fields_of(config)),
    dtype=dtype.name,
    eos_token_id=None,
  ).to_dict()
  return described | {'rope_theta': config.rope.theta}


def tensors_of(module: nnx.Module, dtype: jnp.dtype) -> dict[str, Any]:
  """The parameters of a module by the names of transformers."""
  _, params = hub.flat_params(module)
  return {
    families.parameter_name(path): np.asarray(leaf, dtype=dtype)
    for path, leaf in params.items()
  }


def own_outputs(
  lm_head: Any, ids: np.ndarray | None, vocab_size: int, dtype: jnp.dtype
) -> dict[str, Any]:
  """The tensors of an output matrix `[D, H]` and its tokens `[D]`, if any."""
  stored: dict[str, Any] = {}
  if lm_head is not None:
    stored['lm_head.weight'] = np.asarray(lm_head, dtype=dtype)
  if ids is not None:
    stored[head_tensors.D2T] = np.asarray(ids - np.arange(len(ids)), np.int64)
    stored[head_tensors.T2D] = np.isin(np.arange(vocab_size), ids)
  return stored


def write(
  folder: pathlib.Path, tensors: dict[str, Any], keys: dict[str, Any]
) -> None:
  """Writes a folder, which is made if it does not exist."""
  weights = folder / hugging_face.WEIGHTS
  whole_files.write_tensors(weights, tensors, {'format': 'pt'})
  text = text_files.to_json(keys, indent=2) + '\n'
  whole_files.write_text(folder / hugging_face.CONFIG, text)
