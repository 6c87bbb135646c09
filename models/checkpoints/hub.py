"""Loads and saves models as Hugging Face folders, one tensor at a time."""

from collections.abc import Iterator
import json
import pathlib

from flax import nnx
from flax import traverse_util
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy
import transformers

from models.checkpoints.families import family_of
from models.checkpoints.families import read_config
from models.checkpoints.family import Config
from models.checkpoints.family import Module
from models.checkpoints.family import parameter_name
from models.nn.matmul import Int8Matrix
from models.nn.matmul import quantize

_DEMO = pathlib.Path(__file__).parents[1] / 'demo'
_EMBEDDED = {
  'demo': _DEMO / 'target',
  'demo-moe': _DEMO / 'moe',
  'demo-draft': _DEMO / 'draft',
}

_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'
DTYPES = ('float32', 'bfloat16', 'int8')
"""What the matrices of a model may be loaded as; see `load_module`."""

_FLOATS = {'F32', 'F16', 'BF16', 'F64'}
_BLOCK_BYTES = 1 << 24  # Read at once.
_HUB_FILES = ('*.json', '*.safetensors', '*.txt', '*.model')


def locate(name: str, *, revision: str | None = None) -> pathlib.Path:
  """The folder of a model.

  Args:
    name: `demo` or `demo-draft`, the embedded pair; `demo-moe`, the embedded
      mixture of experts; a folder; or the id of a model on the Hugging Face
      hub, which is downloaded (weights in safetensors, config and tokenizer
      only).
    revision: branch, tag or commit on the hub.

  Returns:
    A folder with a `config.json`.

  Raises:
    ValueError: there is no such folder and no such model can be fetched.
  """
  folder = _EMBEDDED.get(name, pathlib.Path(name).expanduser())
  if folder.is_dir():
    if revision is not None:
      raise ValueError(f'{name} is a folder; a revision needs a hub id')
    return folder
  if name.startswith(('/', '.', '~')):
    raise ValueError(f'there is no folder {name}')
  try:
    fetched = huggingface_hub.snapshot_download(
      name, revision=revision, allow_patterns=list(_HUB_FILES)
    )
  except (
    huggingface_hub.errors.HFValidationError,
    huggingface_hub.errors.HfHubHTTPError,
    huggingface_hub.errors.LocalEntryNotFoundError,
    OSError,
  ) as error:
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    raise ValueError(
      f'{name!r} is neither a folder nor a model that could be fetched from'
      f' the hub ({reason})'
    ) from error
  return pathlib.Path(fetched)


def draft_name(name: str) -> str:
  """What `locate` is to find for a draft: `demo` is the embedded one."""
  return 'demo-draft' if name == 'demo' else name


def has_tokenizer(folder: pathlib.Path) -> bool:
  """Whether a folder holds a tokenizer; transformers may invent one if not."""
  names = ('tokenizer.json', 'vocab.json', 'tokenizer_config.json')
  return any((folder / name).exists() for name in names)


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  if (folder / _SINGLE).exists():
    return [folder / _SINGLE]
  if (folder / _INDEX).exists():
    try:
      index = json.loads((folder / _INDEX).read_text('utf-8'))
      shards = sorted(set(index['weight_map'].values()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f'{folder / _INDEX} is not an index of shards: {error!r}'
      ) from error
    files = [folder / shard for shard in shards]
    missing = [file.name for file in files if not file.exists()]
    if missing:
      raise ValueError(f'{folder} lacks the shards {missing}')
    return files
  suffixes = {'.bin', '.pt', '.pth'}
  pickled = sorted(p.name for p in folder.iterdir() if p.suffix in suffixes)
  if pickled:
    raise ValueError(
      f'{folder} has only pickled weights ({pickled[0]}), which can run code'
      ' when read; convert them where torch is installed: python -c "from'
      ' transformers import AutoModelForCausalLM as M;'
      f" M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
  raise ValueError(
    f'{folder} has no {_SINGLE} and no {_INDEX}; no other weights are read'
  )


def _read(file, name, shape, dtype, *, transposed) -> np.ndarray:
  """Reads one tensor into its final dtype and layout, block by block.

  A file is mapped anew for every block: pages of a mapping that were touched
  stay resident until it is closed, and would double the peak memory.
  """
  array = np.empty(shape[::-1] if transposed else shape, dtype)
  as_stored = array.T if transposed else array
  rows = max(1, _BLOCK_BYTES * shape[0] // array.nbytes)
  for start in range(0, shape[0], rows):
    end = min(start + rows, shape[0])
    with safetensors.safe_open(file, 'numpy') as mapped:
      as_stored[start:end] = mapped.get_slice(name)[start:end]
  return array


def _tensors(
  folder: pathlib.Path,
) -> Iterator[tuple[pathlib.Path, str, str, tuple[int, ...]]]:
  """Yields `(file, stored name, dtype, shape)`."""
  for file in _weight_files(folder):
    try:
      with safetensors.safe_open(file, 'numpy') as mapped:
        names = mapped.offset_keys()  # In the order of the file.
        slices = [mapped.get_slice(name) for name in names]
        described = [
          (name, part.get_dtype(), tuple(part.get_shape()))
          for name, part in zip(names, slices, strict=True)
        ]
        del slices
    except safetensors.SafetensorError as error:
      raise ValueError(f'{file} is not a safetensors file: {error}') from error
    for name, dtype, shape in described:
      yield file, name, dtype, shape


def config_of(name: str, *, revision: str | None = None) -> Config:
  """The shape of a model; see `locate` for the arguments, and what it raises.

  Raises:
    ValueError: there is none, or it is of a kind that is not known.
  """
  folder = locate(name, revision=revision)
  if not (folder / 'config.json').exists():
    raise ValueError(f'{folder} has no config.json')
  return read_config(folder / 'config.json')


def shape_module(config: Config, dtype: jnp.dtype) -> Module:
  """A module whose weights are shapes."""
  make = family_of(config).module
  return nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0)))


def abstract_module(config: Config, dtype: jnp.dtype):
  """A module without weights: its graph, and its parameters' shapes by path."""
  module = shape_module(config, dtype)
  graph, variables = nnx.split(module)
  return graph, traverse_util.flatten_dict(nnx.to_pure_dict(variables))


def load_module(
  name: str | pathlib.Path,
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  revision: str | None = None,
) -> Module:
  """Loads a model of any family and size from a folder or from the hub.

  Tensors go one at a time from the file into their final dtype on the default
  device, so the peak of host memory is the model plus one tensor
  (scripts/measure.py memory).

  Args:
    name: see `locate`.
    dtype: of the matrices: float32, bfloat16 or int8; with the last, of all but
      position embeddings and routers, and the rest is computed in bfloat16.
    revision: see `locate`.

  Returns:
    The module.

  Raises:
    ValueError: a config or tensor that is not known, missing, left over or
      misshapen; the message names it.
  """
  folder = locate(str(name), revision=revision)
  config = config_of(str(folder))
  family = family_of(config)
  in_int8 = jnp.dtype(dtype) == jnp.int8
  graph, wanted = abstract_module(
    config, jnp.dtype(jnp.bfloat16 if in_int8 else dtype)
  )
  paths = {parameter_name(path): path for path in wanted}
  loaded, origin = {}, {}
  for file, stored, stored_dtype, shape in _tensors(folder):
    tensor_name = family.canonical_name(stored, config)
    if tensor_name is None:
      continue
    if tensor_name not in paths:
      raise ValueError(
        f'{folder}: tensor {stored} is not part of a {family.name}'
      )
    path = paths[tensor_name]
    leaf = wanted[path]
    transposed = family.is_transposed(path)
    expected = leaf.shape[::-1] if transposed else leaf.shape
    if shape != expected:
      raise ValueError(
        f'{folder}: tensor {stored} has shape {shape}, expected {expected}'
      )
    if stored_dtype not in _FLOATS:
      raise ValueError(
        f'{folder}: tensor {stored} has dtype {stored_dtype}, expected one of'
        f' {sorted(_FLOATS)}'
      )
    quantized = in_int8 and leaf.ndim == 2 and not family.stays_float(path)
    kept_dtype = np.float32 if quantized else leaf.dtype
    array = _read(file, stored, shape, kept_dtype, transposed=transposed)
    final = quantize(array) if quantized else jax.device_put(array)
    if path not in loaded:
      loaded[path] = jax.block_until_ready(final)
      origin[path] = stored
    elif not jax.tree.all(jax.tree.map(np.array_equal, loaded[path], final)):
      raise ValueError(
        f'{folder}: tensors {origin[path]} and {stored} should be equal but'
        ' differ; is tie_word_embeddings wrong in config.json?'
      )
  missing = sorted(name for name, path in paths.items() if path not in loaded)
  if missing:
    raise ValueError(
      f'{folder} lacks {len(missing)} tensors, the first is {missing[0]}'
    )
  return nnx.merge(graph, traverse_util.unflatten_dict(loaded))


def save_pretrained(
  module: Module,
  folder: str | pathlib.Path,
  *,
  tokenizer: transformers.PreTrainedTokenizerBase | None = None,
  dtype: jnp.dtype | None = None,
) -> None:
  """Writes a folder that both `load_module` and transformers read.

  Args:
    module: what to save.
    folder: created if need be.
    tokenizer: saved beside the weights.
    dtype: to store all tensors in; default: as they are.

  Raises:
    ValueError: the matrices are in eight bits, or the shape is one that no
      model of transformers has.
  """
  family = family_of(module.config)
  _, variables = nnx.split(module)
  params = traverse_util.flatten_dict(nnx.to_pure_dict(variables))
  if any(isinstance(leaf, Int8Matrix) for leaf in params.values()):
    raise ValueError(
      f'{folder}: a model loaded with dtype=int8 cannot be saved; load it as'
      ' float32 or bfloat16'
    )
  described = family.to_hugging_face(
    module.config,
    dtype=jnp.dtype(dtype or module.dtype).name,
    eos_token_id=None if tokenizer is None else tokenizer.eos_token_id,
  )
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  tensors = {}
  for path, leaf in params.items():
    array = np.asarray(leaf, dtype=dtype or leaf.dtype)
    if family.is_transposed(path):
      array = array.T
    stored = family.stored_name(path, module.config)
    tensors[stored] = np.ascontiguousarray(array)
  safetensors_numpy.save_file(
    tensors, folder / _SINGLE, metadata={'format': 'pt'}
  )
  (folder / _SINGLE).chmod(0o644)  # safetensors writes it for its owner alone.
  described.save_pretrained(folder)
  if tokenizer is not None:
    tokenizer.save_pretrained(folder)
