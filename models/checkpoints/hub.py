"""Finds models by name; loads and saves them, one tensor at a time."""

from collections.abc import Iterator
import pathlib
from typing import Any

from absl import logging
from flax import nnx
from flax import traverse_util
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import transformers

from specdec import memory
from specdec.models import waiting
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints import gguf
from specdec.models.checkpoints import hugging_face
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import adapter
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib
from specdec.text import text_files
from specdec.text import whole_files

Path = tuple[Any, ...]
"""Where a parameter is in a module: names, and numbers in lists."""

Shapes = dict[Path, jax.ShapeDtypeStruct]
"""The shapes of parameters by their paths."""

# Tried in order; the first whose `holds(path)` is true opens it.
_CONTAINERS = (
  gguf.GGUFFile,
  hugging_face.RoundedFolder,
  hugging_face.HuggingFaceFolder,
)

_DEMO = pathlib.Path(__file__).parents[1] / 'demo'
_EMBEDDED = {
  'demo': _DEMO / 'target',
  'demo-draft': _DEMO / 'draft',
  'demo-head': _DEMO / 'head',
  'demo-block': _DEMO / 'block',
}

_HUB_FILES = ('*.json', '*.jinja', '*.safetensors', '*.txt', '*.model')
_SKIPPED_HUB_FILES = ('consolidated*',)  # Second copies of the weights.


def locate(
  name: str | pathlib.Path, *, revision: str | None = None
) -> checkpoint_lib.Checkpoint:
  """Finds a model by its name.

  Args:
    name: `demo`, `demo-draft`, `demo-head` or `demo-block` (embedded), a
      folder, a GGUF file of whatever name, or the id of a model on the Hugging
      Face hub, which is downloaded (weights in safetensors, config and
      tokenizer only). A `pathlib.Path` is always a folder or a file.
    revision: branch, tag or commit on the hub.

  Raises:
    ValueError: the folder or file does not exist, and no model of this name can
      be downloaded.
  """
  try:
    path = _EMBEDDED.get(str(name), pathlib.Path(name).expanduser())
  except RuntimeError as error:  # An unknown user, or none has a home.
    raise ValueError(f'there is no folder {name}: {error}') from error
  if any(container.holds(path) for container in _CONTAINERS):
    if revision is not None:
      raise ValueError(f'{name} is not a hub id, and a revision needs one')
  else:
    if path.is_file():
      text_files.refuse_stand_in(path)
      raise ValueError(
        f'{name} is a file, but no GGUF file; give the folder of a model'
      )
    if path.suffix.lower() == gguf.SUFFIX:
      raise ValueError(f'there is no file {name}')
    if isinstance(name, pathlib.Path) or name.startswith(('/', '.', '~')):
      raise ValueError(f'there is no folder {name}')
    path = _download(name, revision)
  return next(
    container(path) for container in _CONTAINERS if container.holds(path)
  )


def _download(name: str, revision: str | None) -> pathlib.Path:
  try:
    fetched = huggingface_hub.snapshot_download(
      name,
      revision=revision,
      allow_patterns=list(_HUB_FILES),
      ignore_patterns=list(_SKIPPED_HUB_FILES),
    )
  except (
    huggingface_hub.errors.HFValidationError,
    huggingface_hub.errors.HfHubHTTPError,
    huggingface_hub.errors.LocalEntryNotFoundError,
    OSError,
  ) as error:
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    raise ValueError(
      f'{name!r} is not a folder or file here, and could not be fetched from'
      f' the hub ({reason}); give the path of a model, or its name on the hub'
    ) from error
  return pathlib.Path(fetched)


def draft_name(name: str) -> str:
  """The name of a draft for `locate`, where `demo` is the embedded draft."""
  return 'demo-draft' if name == 'demo' else name


def shape_module(
  config: adapter.Config,
  dtype: jnp.dtype,
  layout: sharding_lib.Layout = sharding_lib.Layout(),
) -> adapter.Module:
  """A module with shapes and shardings in place of weights."""
  graph, shapes = _shapes(config, families.family_of(config), dtype, layout)
  return nnx.merge(graph, traverse_util.unflatten_dict(shapes))


def _shapes(
  config: Any,
  family: model_type.Family,
  dtype: jax.typing.DTypeLike,
  layout: sharding_lib.Layout,
) -> tuple[nnx.GraphDef[Any], Shapes]:
  """The graph of a module; the shapes and shardings of all that is stored."""
  graph, shapes = flat_params(
    nnx.eval_shape(lambda: family.module(config, dtype=dtype, rngs=nnx.Rngs(0)))
  )
  placed = {
    path: jax.ShapeDtypeStruct(
      leaf.shape,
      leaf.dtype,
      sharding=layout.of_parameter(path, leaf.shape, config),
    )
    for path, leaf in shapes.items()
  }
  for path, shape in family.extras:
    placed[path] = jax.ShapeDtypeStruct(shape, dtype)
  return graph, placed


def flat_params(
  module: nnx.Module,
) -> tuple[nnx.GraphDef[Any], dict[Path, Any]]:
  """The graph of a module, and its parameters by path."""
  graph, variables = nnx.split(module)
  return graph, traverse_util.flatten_dict(nnx.to_pure_dict(variables))


def layer_bytes(
  config: adapter.Config, form: matrices_lib.WeightFormat
) -> float:
  """The bytes of the matrices of one layer."""
  _, shapes = flat_params(shape_module(config, jnp.dtype(jnp.float32)))
  in_layers = lambda path: any(isinstance(part, int) for part in path)
  size = sum(
    leaf.size
    for path, leaf in shapes.items()
    if leaf.ndim > 1 and in_layers(path)
  )
  return form.bytes_per_weight * size / config.num_layers


def load_module(
  name: str | pathlib.Path, *, revision: str | None = None, **options: Any
) -> adapter.Module:
  """Loads the model of a name, see `locate`; the options of `read_module`."""
  return read_module(locate(name, revision=revision), **options)


def read_module(
  checkpoint: checkpoint_lib.Checkpoint, **options: Any
) -> adapter.Module:
  """Loads a model; for options and errors see `checkpoint.placement_of`."""
  return load_network(checkpoint, checkpoint_lib.placement_of(**options))[0]


def load_network(
  stored: checkpoint_lib.StoredNetwork,
  placement: checkpoint_lib.Placement,
  *,
  drawn: bool = False,
) -> tuple[Any, dict[Path, matrices_lib.Weight]]:
  """Loads a target, draft, head or block drafter.

  One tensor at a time is converted and put on the device, so the peak memory is
  the size of the network plus one tensor (of a tied head that is stored twice).
  On a mesh each device receives only its own parts. If it is `drawn`, it has
  random weights, and only the shape is read.

  Returns:
    The module, and the matrices of `Family.extras`.

  Raises:
    ValueError: a config or tensor is unknown, missing, left over or misshapen;
      the message names it.
  """
  config, family, layout = stored.config, stored.family, placement.layout
  with whole_files.reading(stored.path):
    # One matrix per layer, before shapes are made of absurd sizes.
    least = config.num_layers * config.width**2 // layout.num_devices
    memory.check_fits({'the weights; see config.json': least})
    dtype = placement.form.float_dtype
    graph, expected = _shapes(config, family, dtype, layout)
    ratio = placement.form.bytes_per_weight / jnp.dtype(dtype).itemsize
    held = sum(
      int(memory.bytes_on_device(leaf) * (ratio if leaf.ndim == 2 else 1))
      for leaf in expected.values()
    )
    memory.check_fits({'the weights; see dtype': held})
  if whole := sharding_lib.undivided(layout, config):
    logging.warning(
      '%s: every device has all of %s, which %d devices cannot divide',
      stored.path.name,
      ', '.join(whole),
      layout.parts('heads'),
    )
  is_model = isinstance(family, model_type.ModelType)
  if is_model and getattr(config, 'ends_with_training', False):
    logging.warning(
      '%s: the context is %d tokens, so --context may not be larger: a longer'
      ' text would rotate what is cached by other factors (longrope)',
      stored.path.name,
      config.num_positions,
    )
  loaded, origin = dict[Path, matrices_lib.Weight](), dict[Path, str]()
  read = _read(stored, expected, placement, drawn)
  for path, name, held in whole_files.reading_each(stored.path, read):
    if path not in loaded:
      loaded[path] = jax.block_until_ready(held)
      origin[path] = name
    elif not jax.tree.all(jax.tree.map(jnp.array_equal, loaded[path], held)):
      raise ValueError(
        f'{stored.path}: tensors {origin[path]} and {name} must be equal'
        ' but are not; is tie_word_embeddings wrong in config.json?'
      )
    del held  # Before the next tensor is read.
  extras = {path: loaded.pop(path) for path, _ in family.extras}
  return nnx.merge(graph, traverse_util.unflatten_dict(loaded)), extras


def _draw(
  expected: Shapes,
) -> Iterator[tuple[str, checkpoint_lib.StoredTensor]]:
  rng = np.random.default_rng(0)
  for path, leaf in expected.items():
    name = families.parameter_name(path)
    array = 0.02 * rng.standard_normal(leaf.shape, np.float32)
    yield name, tensor_parts.HostTensor(name, array)


def _read(
  stored: checkpoint_lib.StoredNetwork,
  expected: Shapes,
  placement: checkpoint_lib.Placement,
  drawn: bool = False,
) -> Iterator[tuple[Path, str, Any]]:
  """Yields paths in the module, stored names, and held parameters."""
  config, family = stored.config, stored.family
  expanded, read_names = list[str](), set[str]()
  paths = {families.parameter_name(path): path for path in expected}
  tensors: Iterator[tuple[str, checkpoint_lib.StoredTensor]]
  tensors = _draw(expected) if drawn else stored.tensors()
  size = 0 if drawn else stored.size
  for key, tensor in waiting.progress(
    tensors, f'reading {stored.path.name}', len(paths), size
  ):
    where = f'{stored.path}: tensor {tensor.name}'
    if key not in paths:
      raise ValueError(f'{where} is not part of a {family.name}')
    path, leaf = paths[key], expected[paths[key]]
    if tensor.shape != leaf.shape:
      by = -1 if getattr(tensor, 'transposed', False) else 1  # As in the file.
      raise ValueError(
        f'{where} has shape {tensor.shape[::by]}, expected {leaf.shape[::by]}'
      )
    is_matrix = leaf.ndim == 2 and not family.stays_float(key)
    dtype = None if is_matrix else leaf.dtype
    try:
      held = placement.hold(path, tensor, config, dtype)
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from error
    if (
      is_matrix
      and placement.form.keeps_blocks
      and str(held.dtype) == 'bfloat16'
    ):
      expanded.append(tensor.name)
    read_names.add(key)
    yield path, tensor.name, held
    del held  # Before the next tensor is read.
  if missing := sorted(paths.keys() - read_names):
    lacks = f'lacks {len(missing)} tensors, the first is {missing[0]}'
    raise ValueError(f'{stored.path} {lacks}')
  if expanded:
    logging.warning(
      '%s: %d matrices are in bfloat16, since no kernel multiplies their'
      ' types; the first is %s',
      stored.path.name,
      len(expanded),
      expanded[0],
    )


def save_pretrained(
  module: adapter.Module,
  folder: str | pathlib.Path,
  *,
  tokenizer: transformers.PreTrainedTokenizerBase | None = None,
  dtype: jax.typing.DTypeLike | None = None,
) -> None:
  """Writes a GPT-2 or a Llama that both `load_module` and transformers read.

  The folder is made if it does not exist, and the tokenizer saved next to the
  weights. Without a dtype every tensor keeps its own.

  Raises:
    ValueError: the matrices are in eight bits, or it is another model.
  """
  family = families.family_of(module.config)
  _, params = flat_params(module)
  for leaf in params.values():
    if (
      isinstance(leaf, matrices_lib.Matrix)
      and not matrices_lib.FORMATS[leaf.dtype].is_float
    ):
      raise ValueError(
        f'{folder}: a model loaded with dtype={leaf.dtype} cannot be saved;'
        ' load it as float32 or bfloat16'
      )
  keys = families.written_keys(
    module.config,
    families.SAVED,
    dtype=jnp.dtype(dtype or module.dtype).name,
    eos_token_id=None if tokenizer is None else tokenizer.eos_token_id,
  )
  prefix = 'model.' if family.is_llama else 'transformer.'
  tensors = dict[str, np.ndarray]()
  for path, leaf in params.items():
    name = families.parameter_name(path)
    array = np.asarray(matrices_lib.unpack(leaf))
    array = array.T if family.is_transposed(name) else array
    stored_name = name if path == ('lm_head',) else prefix + name
    tensors[stored_name] = np.ascontiguousarray(array, dtype)
  folder = pathlib.Path(folder)
  hugging_face.write(folder, keys, tensors)
  if tokenizer is not None:
    tokenizer.save_pretrained(folder)


def save_in_four_bits(name: str, folder: str | pathlib.Path) -> None:
  """Rounds a model to `int4` and writes a folder that loads as `stored`.

  Loading it takes no rounding, and gives the weights that `int4` gives. Besides
  the weights everything in the model's folder is copied.

  Args:
    name: see `locate`.
    folder: to be written; it is made if it does not exist.

  Raises:
    ValueError: the model is in blocks already, or cannot be read.
  """
  checkpoint = locate(name)
  if matrices_lib.STORED in checkpoint.stored_dtypes:
    raise ValueError(
      f'{name} is in blocks of few bits already; load it with dtype=stored'
    )
  if pathlib.Path(folder).resolve() == checkpoint.path.resolve():
    raise ValueError(f'{folder} is the folder of the model; give another')
  form = matrices_lib.FORMATS['int4']
  placement = checkpoint_lib.Placement(form, on_host=True)
  family, layout = checkpoint.family, placement.layout
  _, shapes = _shapes(checkpoint.config, family, form.float_dtype, layout)
  read = _read(checkpoint, shapes, placement)
  parameters = {
    families.parameter_name(path): host
    for path, _, host in whole_files.reading_each(checkpoint.path, read)
  }
  hugging_face.save(parameters, checkpoint.path, pathlib.Path(folder))
