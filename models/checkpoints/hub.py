"""Loads and saves models as Hugging Face folders, one tensor at a time."""

from collections.abc import Iterator
import dataclasses
import json
import math
import pathlib
from typing import Any

from absl import logging
from flax import nnx
from flax import traverse_util
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy
import transformers

from models.checkpoints import folder_tokenizer
from models.checkpoints import gguf
from models.checkpoints import gguf_tokenizer
from models.checkpoints.families import config_from_keys
from models.checkpoints.families import Family
from models.checkpoints.families import family_of
from models.checkpoints.families import parameter_name
from models.checkpoints.families import read_config
from models.nn.adapter import Config
from models.nn.adapter import Module
from models.nn.dtypes import AUTO
from models.nn.dtypes import native_dtypes
from models.nn.matrices import fill
from models.nn.matrices import format_of
from models.nn.matrices import FORMATS
from models.nn.matrices import Matrix
from models.nn.matrices import pack
from models.nn.matrices import unpack
from models.nn.sharding import Layout
from models.nn.sharding import undivided
from models.waiting import progress
from specdec.memory import bytes_on_device
from specdec.memory import check_fits

_DEMO = pathlib.Path(__file__).parents[1] / 'demo'
_EMBEDDED = {'demo': _DEMO / 'target', 'demo-draft': _DEMO / 'draft'}

_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'
_BLOCK_BYTES = 1 << 24  # Bytes of a tensor, as float32, read at once.
_FLOATS = {
  'F32': 'float32',
  'F16': 'float16',
  'BF16': 'bfloat16',
  'F64': 'float64',
}
_HUB_FILES = ('*.json', '*.jinja', '*.safetensors', '*.txt', '*.model')
_NO_HUB_FILES = ('consolidated*',)  # The weights once more, in one file.


def locate(
  name: str | pathlib.Path, *, revision: str | None = None
) -> pathlib.Path:
  """Resolves the name of a model to its folder or GGUF file.

  Args:
    name: `demo` or `demo-draft` (the embedded pair), a folder, a GGUF file of
      whatever name, or the id of a model on the Hugging Face hub, which is
      downloaded (weights in safetensors, config and tokenizer only). A
      `pathlib.Path` is always a folder or a file, so a result of this function
      is never looked up again.
    revision: branch, tag or commit on the hub.

  Returns:
    A folder with a `config.json`, or a GGUF file.

  Raises:
    ValueError: there is no such folder or file, and no such model can be
      downloaded.
  """
  try:
    folder = _EMBEDDED.get(str(name), pathlib.Path(name).expanduser())
  except RuntimeError as error:  # An unknown user, or none has a home.
    raise ValueError(f'there is no folder {name}: {error}') from error
  if folder.is_dir() or (gguf.is_gguf(folder) and folder.is_file()):
    if revision is not None:
      raise ValueError(f'{name} is not a hub id, and a revision needs one')
    return folder
  if folder.is_file():
    raise ValueError(
      f'{name} is a file, but no GGUF file; give the folder of a model'
    )
  if gguf.is_gguf(folder):
    raise ValueError(f'there is no file {name}')
  if isinstance(name, pathlib.Path) or name.startswith(('/', '.', '~')):
    raise ValueError(f'there is no folder {name}')
  try:
    fetched = huggingface_hub.snapshot_download(
      name,
      revision=revision,
      allow_patterns=list(_HUB_FILES),
      ignore_patterns=list(_NO_HUB_FILES),
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
  """The name of a draft for `locate`, where `demo` is the embedded draft."""
  return 'demo-draft' if name == 'demo' else name


def load_tokenizer(
  path: pathlib.Path,
) -> transformers.PreTrainedTokenizerBase | None:
  """The tokenizer of a located model, or None if it has none.

  Raises:
    ValueError: it cannot be loaded.
  """
  if gguf.is_gguf(path):
    return gguf_tokenizer.load_tokenizer(path)
  return folder_tokenizer.load_tokenizer(path)


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files with the weights of a located model.

  Raises:
    ValueError: there are none, or some are missing.
  """
  if gguf.is_gguf(folder):
    return [folder]
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


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """Location and type of a stored tensor."""

  file: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]

  def check(self, expected: tuple[int, ...]) -> None:
    """Raises ValueError on another shape, or a dtype that is not a float."""
    where = f'{self.file.parent}: tensor {self.name}'
    if self.shape != expected:
      raise ValueError(f'{where} has shape {self.shape}, expected {expected}')
    if self.dtype not in _FLOATS:
      raise ValueError(
        f'{where} has dtype {self.dtype}, expected one of {sorted(_FLOATS)}'
      )

  def blocks(self, *, transposed: bool) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields indices of n rows and their values, `[n, in]` or `[n]`.

    The rows are those of the transposed tensor if that is asked for.

    The file is mapped anew for every block: pages of a mapping that were
    touched stay resident until it is closed, and would double the peak memory.
    """
    length = self.shape[-1 if transposed else 0]
    row_bytes = 4 * math.prod(self.shape) // max(length, 1)
    step = max(1, _BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, length, step):
      rows = slice(start, min(start + step, length))
      with safetensors.safe_open(self.file, 'numpy') as mapped:
        stored = mapped.get_slice(self.name)
        yield rows, stored[:, rows].T if transposed else stored[rows]


def _tensors(
  folder: pathlib.Path, family: Family, config: Config
) -> Iterator[tuple[str, _Tensor | gguf.Tensor, bool]]:
  """Yields canonical names, tensors, and whether they are transposed."""
  if gguf.is_gguf(folder):
    for key, stored in gguf.tensors(folder):
      yield key, stored, False
    return
  for tensor in _described(folder):
    known = family.canonical_name(tensor.name, config)
    if known is not None:
      yield known, tensor, family.is_transposed(known)


def _described(folder: pathlib.Path) -> Iterator[_Tensor]:
  """Yields the stored tensors of a folder, in the order of its files."""
  for file in weight_files(folder):
    try:
      with safetensors.safe_open(file, 'numpy') as mapped:
        described = [
          _Tensor(file, name, part.get_dtype(), tuple(part.get_shape()))
          for name in mapped.offset_keys()
          for part in (mapped.get_slice(name),)
        ]
    except safetensors.SafetensorError as error:
      raise ValueError(f'{file} is not a safetensors file: {error}') from error
    yield from described


def config_of(name: str | pathlib.Path) -> Config:
  """The shape of a model; see `locate` for the name.

  Raises:
    ValueError: there is no such model, or no family supports it.
  """
  folder = locate(name)
  if gguf.is_gguf(folder):
    return config_from_keys(gguf.config_keys(folder), folder)
  if not (folder / 'config.json').exists():
    raise ValueError(f'{folder} has no config.json')
  return read_config(folder / 'config.json')


def _stored_dtypes(path: pathlib.Path) -> list[str]:
  """Dtypes of the matrices as they are stored, each once."""
  if gguf.is_gguf(path):
    return gguf.stored_dtypes(path)
  kinds = (tensor.dtype for tensor in _described(path) if len(tensor.shape) > 1)
  return list(dict.fromkeys(_FLOATS.get(kind, kind) for kind in kinds))


def resolve_dtype(dtype: jax.typing.DTypeLike, name: str | pathlib.Path) -> str:
  """The name of a dtype, where `auto` is chosen for a checkpoint.

  It is the 16-bit type of the checkpoint's matrices if this platform computes
  in it natively, else float32. The weights of few bits that GGUF files hold
  fit either 16-bit type.

  Args:
    dtype: `auto` or a dtype.
    name: of the checkpoint, see `locate`.
  """
  if dtype != AUTO:
    return jnp.dtype(dtype).name
  stored, native = _stored_dtypes(locate(name)), native_dtypes()
  usable = [one for one in ('bfloat16', 'float16') if one in {*stored} & native]
  return usable[0] if usable else 'float32'


def resolve_draft_dtype(
  dtype: jax.typing.DTypeLike | None,
  name: str | pathlib.Path,
  *,
  target_dtype: str,
  packed: bool,
) -> str:
  """The name of the dtype of a draft, where None is chosen for it.

  It is that of the target, but int8 beside a target in bfloat16 if the kernels
  of `models.nn.cpu` are used: no dtype of the draft changes what is decoded, a
  forward then reads half as many bytes, and eight bits are multiplied faster.

  Args:
    dtype: None or a dtype, `auto` as for `resolve_dtype`.
    name: of the draft, see `locate`.
    target_dtype: of the target.
    packed: whether the kernels are used.
  """
  if dtype is not None:
    return resolve_dtype(dtype, name)
  return 'int8' if packed and target_dtype == 'bfloat16' else target_dtype


def shape_module(
  config: Config, dtype: jnp.dtype, layout: Layout = Layout()
) -> Module:
  """A module with shapes and shardings in place of weights."""
  make = family_of(config).module
  graph, shapes = flat_params(
    nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0)))
  )
  placed = {
    path: jax.ShapeDtypeStruct(
      leaf.shape,
      leaf.dtype,
      sharding=layout.of_parameter(path, leaf.shape, config),
    )
    for path, leaf in shapes.items()
  }
  return nnx.merge(graph, traverse_util.unflatten_dict(placed))


def flat_params(module: Module) -> tuple[nnx.GraphDef, dict[tuple, Any]]:
  """The graph of a module, and its parameters by path."""
  graph, variables = nnx.split(module)
  return graph, traverse_util.flatten_dict(nnx.to_pure_dict(variables))


def layer_bytes(config: Config, dtype: jax.typing.DTypeLike) -> float:
  """The bytes of the matrices of one layer."""
  _, shapes = flat_params(shape_module(config, jnp.dtype(jnp.float32)))
  in_layers = lambda path: any(isinstance(part, int) for part in path)
  size = sum(
    leaf.size
    for path, leaf in shapes.items()
    if leaf.ndim > 1 and in_layers(path)
  )
  return format_of(dtype).bytes_per_weight * size / config.num_layers


def load_module(
  name: str | pathlib.Path,
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  revision: str | None = None,
  packed: bool = False,
  layout: Layout = Layout(),
) -> Module:
  """Loads a model.

  One tensor at a time is converted and put on the device, so the peak memory is
  the size of the model plus one tensor (of a tied head that is stored twice).
  Of several devices each gets its own parts, so what lies in the memory of the
  host is one tensor, and no device has more than its parts.

  Args:
    name: see `locate`.
    dtype: of the matrices, one of `DTYPES`; norms are always float32. `int8`
      rounds all matrices to eight bits, except position embeddings and routers,
      and the rest is computed in bfloat16.
    revision: see `locate`.
    packed: whether matrices are packed for the kernels of `models.nn.cpu`,
      which must be available; those of float16 are not. Not with several
      devices.
    layout: where the tensors lie.

  Raises:
    ValueError: a config or tensor is unknown, missing, left over or misshapen;
      the message names it.
  """
  folder = locate(name, revision=revision)
  config = config_of(folder)
  family = family_of(config)
  # Of one matrix per layer, before shapes are made of absurd sizes.
  least = config.num_layers * config.width**2 // layout.num_devices
  check_fits({'the weights; see config.json': least})
  form = format_of(dtype)
  float_dtype = jnp.dtype(form.float_dtype)
  ratio = form.bytes_per_weight / float_dtype.itemsize
  graph, expected = flat_params(shape_module(config, float_dtype, layout))
  held = sum(
    int(bytes_on_device(leaf) * (ratio if leaf.ndim == 2 else 1))
    for leaf in expected.values()
  )
  check_fits({'the weights; see dtype': held})
  if whole := undivided(layout, config):
    logging.warning(
      '%s: every device has all of %s, which %d devices cannot divide',
      *(folder.name, ', '.join(whole), layout.parts('heads')),
    )
  paths = {parameter_name(path): path for path in expected}
  loaded, origin = {}, {}
  tensors = _tensors(folder, family, config)
  total = sum(file.stat().st_size for file in weight_files(folder))
  for key, tensor, transposed in progress(
    tensors, f'reading {folder.name}', len(paths), total
  ):
    if key not in paths:
      raise ValueError(
        f'{folder}: tensor {tensor.name} is not part of a {family.name}'
      )
    path = paths[key]
    leaf = expected[path]
    tensor.check(leaf.shape[::-1] if transposed else leaf.shape)
    blocks = tensor.blocks(transposed=transposed)
    if leaf.ndim == 2 and not family.stays_float(key):
      host = form.from_blocks(blocks, leaf.shape)
    else:
      host = fill(blocks, leaf.shape, dtype=leaf.dtype)
    # Position embeddings are added, not multiplied.
    if packed and leaf.ndim == 2 and path[0] != 'wpe':
      host = pack(host)
    final = layout.put_parameter(path, host, config)
    if key not in loaded:
      loaded[key] = jax.block_until_ready(final)
      origin[key] = tensor.name
    elif not jax.tree.all(jax.tree.map(jnp.array_equal, loaded[key], final)):
      raise ValueError(
        f'{folder}: tensors {origin[key]} and {tensor.name} should be equal but'
        ' differ; is tie_word_embeddings wrong in config.json?'
      )
  if missing := sorted(paths.keys() - loaded.keys()):
    raise ValueError(
      f'{folder} lacks {len(missing)} tensors, the first is {missing[0]}'
    )
  by_path = {paths[key]: leaf for key, leaf in loaded.items()}
  return nnx.merge(graph, traverse_util.unflatten_dict(by_path))


def save_pretrained(
  module: Module,
  folder: str | pathlib.Path,
  *,
  tokenizer: transformers.PreTrainedTokenizerBase | None = None,
  dtype: jnp.dtype | None = None,
) -> None:
  """Writes a folder that both `load_module` and transformers read.

  The folder is made if it does not exist, and the tokenizer saved beside the
  weights. Without a dtype every tensor keeps its own.

  Raises:
    ValueError: the matrices are in eight bits, or no model of transformers has
      the shape.
  """
  family = family_of(module.config)
  _, params = flat_params(module)
  for leaf in params.values():
    if isinstance(leaf, Matrix) and not FORMATS[leaf.dtype].is_float:
      raise ValueError(
        f'{folder}: a model loaded with dtype={leaf.dtype} cannot be saved;'
        ' load it as float32 or bfloat16'
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
    name = parameter_name(path)
    values = unpack(leaf)
    array = np.asarray(values, dtype=dtype or values.dtype)
    if family.is_transposed(name):
      array = array.T
    stored = family.stored_name(name, module.config)
    tensors[stored] = np.ascontiguousarray(array)
  safetensors_numpy.save_file(
    tensors, folder / _SINGLE, metadata={'format': 'pt'}
  )
  # safetensors makes the file readable by its owner only.
  (folder / _SINGLE).chmod(0o644)
  described.save_pretrained(folder)
  if tokenizer is not None:
    tokenizer.save_pretrained(folder)
