"""Drafting heads: folders as those who train heads write them.

What a head is follows from its tensors, because configs are often copied from
the target (its number of layers too) or name another kind. Names of tensors:

    EAGLE-3    fc, midlayer.* (SafeAILab, SpecForge, SGLang) or layers.0.*
               (speculators, vLLM), norm, lm_head, d2t, t2d
    EAGLE-1/2  fc, layers.0.* without input_layernorm
    MTP        eh_proj, enorm, hnorm, shared_head.* (DeepSeek, GLM) or
               input_proj, token_layernorm, hidden_layernorm, final_layernorm
               (MiMo, speculators)
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import re
from typing import Any

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

from models.checkpoints import families
from models.checkpoints import gguf
from models.checkpoints import gguf_head
from models.checkpoints import hub
from models.checkpoints import hugging_face
from models.checkpoints import llama as checkpoints_llama
from models.nn import head as nn_head
from models.nn import llama as nn_llama
from models.nn import matrices as matrices_lib
from models.nn import sharding as sharding_lib
from specdec import cache as cache_lib
from specdec import model as model_lib
from specdec import text_files
from specdec.draft import head as head_lib

_BLOCK = r'(?:model\.)?(?:layers\.\d+|mtp_layers\.0)\.'
# Stored names and canonical ones, those of parameters of `models.nn.head`.
_RENAMED = tuple(
  (re.compile(pattern), new)
  for pattern, new in (
    (r'(?:model\.)?midlayer\.', 'layers.0.'),
    (_BLOCK + r'(?:eh_proj|input_proj)\.', 'fc.'),
    (_BLOCK + r'(?:enorm|token_layernorm)\.', 'enorm.'),
    (_BLOCK + r'(?:hnorm|hidden_layernorm)\.', 'hnorm.'),
    (_BLOCK + r'(?:shared_head\.norm|final_layernorm)\.', 'norm.'),
    (_BLOCK + r'shared_head\.head\.', 'lm_head.'),
    (_BLOCK + r'embed_tokens\.', 'embed_tokens.'),
    (r'(?:model\.)?mtp_layers\.', 'layers.'),
    (r'model\.', ''),
  )
)
_BUFFERS = re.compile(r'.*rotary_emb\.inv_freq')
_LAYER = re.compile(r'layers\.(\d+)\.(.*)')
# Of a reduced vocabulary: offsets of its tokens, and whether a token is one.
_D2T, _T2D = 'd2t', 't2d'
_AUX = 'eagle_aux_hidden_state_layer_ids'
_NAMES = {
  nn_head.EAGLE3: 'EAGLE-3',
  nn_head.EAGLE: 'EAGLE-1',
  nn_head.MTP: 'MTP',
}


def default_reads(num_layers: int) -> tuple[int, ...]:
  """The states that EAGLE-3 reads of a target with so many layers.

  What layers 2, n / 2 and n - 3 read, counted from 0; of a target too small for
  these, three that differ.
  """
  found = (2, num_layers // 2, num_layers - 3)
  if list(found) == sorted({*found}):
    return found
  return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))


@dataclasses.dataclass(frozen=True)
class HeadFolder:
  """A folder or GGUF file of a head, for a target of a given shape.

  Attributes:
    path: the folder or file.
    target: the shape of the target.
  """

  path: pathlib.Path
  target: Any

  @property
  def _folder(self) -> Any:
    if gguf.GGUFFile.holds(self.path):
      return gguf_head.GGUFHead(self.path)
    return hugging_face.HuggingFaceFolder(self.path)

  @functools.cached_property
  def _raw(self) -> Mapping[str, Any]:
    if gguf.GGUFFile.holds(self.path):
      return gguf_head.GGUFHead(self.path).keys()
    return text_files.read_object(self.path / hugging_face.CONFIG)

  @functools.cached_property
  def _all(self) -> dict[str, Any]:
    """Stored tensors by their canonical names."""
    folder = self._folder
    if isinstance(folder, gguf_head.GGUFHead):
      return dict(folder.stored())
    found: dict[str, Any] = {}
    for tensor in folder.stored():
      if not _BUFFERS.fullmatch(tensor.name):
        found[_canonical(tensor.name)] = tensor
    return _with_first_layer_0(found)

  def _refuse(self, reason: str) -> ValueError:
    return ValueError(f'{self.path}: {reason}')

  def _shape(self, name: str) -> tuple[int, ...]:
    if name not in self._all:
      raise self._refuse(f'lacks the tensor {name} of a drafting head')
    return self._all[name].shape

  @property
  def kind(self) -> str:
    """One of `models.nn.head.KINDS`, by the tensors."""
    if 'enorm.weight' in self._all:
      return nn_head.MTP
    if 'layers.0.hidden_norm.weight' in self._all:
      return nn_head.EAGLE3
    if 'layers.0.input_layernorm.weight' in self._all:
      raise self._refuse(
        'is no drafting head; its tensors are those of a language model, which'
        ' is a draft'
      )
    claims = [
      f'{key}={self._raw[key]!r}'
      for key in ('architectures', 'speculators_model_type')
      if 'eagle3' in str(self._raw.get(key)).lower()
    ]
    if claims:
      raise self._refuse(
        f'{claims[0]} says EAGLE-3, but the tensors are those of EAGLE-1'
        f' (fc.weight of shape {self._shape("fc.weight")}, no'
        ' midlayer.hidden_norm.weight); correct config.json'
      )
    return nn_head.EAGLE

  @functools.cached_property
  def config(self) -> nn_head.HeadConfig:
    """The shape; raises ValueError if it is not a head for the target."""
    kind, raw = self.kind, self._layer_keys()
    width, fused = self._shape('fc.weight')
    layer = families.config_from_keys(raw, self.path)
    fields = {
      field.name: getattr(layer, field.name)
      for field in dataclasses.fields(nn_llama.LlamaConfig)
    }
    vocabulary = self._raw.get('vocab_size', layer.vocab_size)
    if _T2D in self._all:
      vocabulary = self._shape(_T2D)[0]
    if vocabulary != self.target.vocab_size:
      raise self._refuse(
        f'is a head for a vocabulary of {vocabulary} tokens; the target has'
        f' {self.target.vocab_size}'
      )
    fields |= self._by_tensors(layer) | {'vocab_size': vocabulary}
    reads: tuple[int, ...] = (cache_lib.AFTER_NORM,)
    if kind == nn_head.EAGLE3:
      reads = self._reads(fused)
    elif width != self.target.width:
      raise self._refuse(
        f'is a head of width {width}, which reads the states of a target as'
        f' wide; this one has {self.target.width}'
      )
    stored = {tensor.name for tensor in self._all.values()}
    return nn_head.HeadConfig(
      **fields | {'width': width},
      kind=kind,
      target_width=self.target.width,
      reads=reads,
      norm_before_residual=bool(self._stated('norm_before_residual')),
      fc_norm='fc_norm.0.weight' in self._all,
      norm_before_fc='input_norm.weight' in self._all,
      # SpecForge says so of the norm before the output matrix.
      norm_output=bool(
        'speculators_model_type' in self._raw and self._stated('norm_output')
      ),
      state_first=any('.input_proj.' in name for name in stored),
    )

  def _stated(self, key: str) -> Any:
    """The value of a key of the config or of its `eagle_config`."""
    nested = self._raw.get('eagle_config') or {}
    return self._raw.get(key, nested.get(key))

  def _layer_keys(self) -> dict[str, Any]:
    """The keys of config.json that describe the layers."""
    raw = {**self._raw, **self._raw.get('transformer_layer_config', {})}
    if raw.get('model_type') not in checkpoints_llama.model_types(
      nn_llama.LlamaConfig
    ):
      raw['model_type'] = 'llama'
    theirs = {'rope_theta', 'rope_parameters', 'rope_scaling'} & raw.keys()
    layer = {**raw, 'tie_word_embeddings': False, 'vocab_size': 1}
    layer['vocab_size'] = raw.get('vocab_size') or self.target.vocab_size
    if not theirs and hasattr(self.target, 'rope'):
      layer['rope_theta'] = self.target.rope.theta
    layer.pop('auto_map', None)
    return layer

  def _by_tensors(self, layer: Any) -> dict[str, Any]:
    """What is read from the tensors rather than from the config."""
    has = lambda name: f'layers.0.self_attn.{name}' in self._all
    numbers = [_LAYER.fullmatch(name) for name in self._all]
    rows = self._shape('layers.0.self_attn.q_proj.weight')[0]
    return {
      'num_layers': 1 + max(int(one[1]) for one in numbers if one),
      'head_width': rows // layer.num_heads,
      'inner_width': self._shape('layers.0.mlp.gate_proj.weight')[0],
      'qkv_bias': has('q_proj.bias'),
      'output_bias': has('o_proj.bias'),
      'mlp_bias': 'layers.0.mlp.gate_proj.bias' in self._all,
      'qk_norm': has('q_norm.weight'),
      'tie_embeddings': False,
    }

  def _reads(self, fused: int) -> tuple[int, ...]:
    """The states of the target that an EAGLE-3 head reads.

    There are two numberings: `eagle_config` of SGLang counts the layers that
    write the states (the first is 1), all others those that read them.
    """
    number, rest = divmod(fused, self.target.width)
    if rest or not number:
      raise self._refuse(
        f'fc.weight reads {fused} numbers, which are no states of a target of'
        f' width {self.target.width}'
      )
    key, layers = _AUX, self.target.num_layers
    stated = self._stated(key)
    if stated is None:
      stated = default_reads(layers)
    elif key not in self._raw and stated and stated[0] == 1:
      stated = [layer + 1 for layer in stated]
    if len(stated) != number:
      raise self._refuse(
        f'fc.weight reads {number} states of a target of width'
        f' {self.target.width}, but {key}={stated!r}'
      )
    if not all(isinstance(one, int) and 0 <= one <= layers for one in stated):
      raise self._refuse(
        f'{key}={stated!r}: the target has {layers} layers; is this a head for'
        ' another target?'
      )
    return tuple(stated)

  def tensors(self) -> Iterator[tuple[str, Any]]:
    """Yields canonical names and tensors, but for `d2t` and `t2d`."""
    for name, tensor in self._all.items():
      if name not in (_D2T, _T2D):
        yield name, tensor

  @property
  def size(self) -> int:
    """Bytes of the files with weights."""
    return self._folder.size

  @property
  def files(self) -> list[pathlib.Path]:
    """See `models.checkpoints.checkpoint.Checkpoint`."""
    return self._folder.files

  @property
  def stored_dtypes(self) -> list[str]:
    """See `models.checkpoints.checkpoint.Checkpoint`."""
    return self._folder.stored_dtypes

  def own(self, name: str) -> bool:
    """Whether a head has a tensor of a canonical name."""
    return name in self._all

  def vocabulary(self) -> np.ndarray | None:
    """The ids `[D]` of a reduced vocabulary, None if it has all tokens.

    Raises:
      ValueError: `d2t` and `t2d` contradict each other, or ids are none.
    """
    size = self.target.vocab_size
    if _D2T not in self._all:
      return None
    ids = _values(self._all[_D2T]).astype(np.int64)
    ids = ids + np.arange(len(ids))  # Offsets are stored.
    if _T2D in self._all:
      marked = np.flatnonzero(_values(self._all[_T2D]))
      if not np.array_equal(ids, marked):
        raise self._refuse(
          'd2t (offsets of the ids) and t2d (which tokens are drafted) do not'
          ' say the same'
        )
    if len({*ids.tolist()}) < len(ids) or ids.min() < 0 or ids.max() >= size:
      raise self._refuse(
        f'd2t: ids must differ and lie below the vocabulary of {size} tokens'
      )
    return ids


def _canonical(name: str) -> str:
  for pattern, new in _RENAMED:
    if found := pattern.match(name):
      return new + name[found.end() :]
  return name


def _with_first_layer_0(found: dict[str, Any]) -> dict[str, Any]:
  """Numbers layers from 0: DeepSeek counts on from those of the target."""
  numbers = [int(one[1]) for one in map(_LAYER.fullmatch, found) if one]
  first = min(numbers, default=0)
  renamed = {}
  for name, tensor in found.items():
    if one := _LAYER.fullmatch(name):
      name = f'layers.{int(one[1]) - first}.{one[2]}'
    renamed[name] = tensor
  return renamed


def _values(tensor: Any) -> np.ndarray:
  """All of a stored vector."""
  return np.concatenate([rows for _, rows in tensor.blocks()])


def _shapes(
  head: HeadFolder, dtype: jnp.dtype, size: int
) -> tuple[nnx.GraphDef, dict[tuple, Any]]:
  """The graph of the module, and the shapes of all that is stored."""
  config = head.config
  graph, expected = hub.flat_params(
    nnx.eval_shape(lambda: nn_head.Head(config, dtype=dtype, rngs=nnx.Rngs(0)))
  )
  if head.own('embed_tokens.weight'):
    shape = (config.vocab_size, config.width)
    expected['embed_tokens', 'embedding'] = jax.ShapeDtypeStruct(shape, dtype)
  if head.own('lm_head.weight'):
    shape = (size, config.width)
    expected['lm_head',] = jax.ShapeDtypeStruct(shape, dtype)
  return graph, expected


def locate(name: str | pathlib.Path, target: Any) -> HeadFolder:
  """Finds a head for a target of this shape, and reads its own shape.

  Args:
    name: `demo` (embedded), a folder, a GGUF file, or an id on the Hugging Face
      hub.
    target: the shape of the target.

  Raises:
    ValueError: there is no such folder, it holds no head, or one for another
      target.
  """
  path = hub.locate('demo-head' if name == 'demo' else name).path
  found = HeadFolder(path, target)
  _ = found.config
  return found


def load(
  head: HeadFolder,
  target: model_lib.LanguageModel,
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  packed: bool = False,
  layout: sharding_lib.Layout = sharding_lib.Layout(),
) -> head_lib.Head:
  """Loads a head; embedding and output matrix it may have from the target.

  Args:
    head: the folder.
    target: the target.
    dtype: of the matrices, see `models.checkpoints.hub.read_module`.
    packed: whether matrices are packed for the kernels of `models.nn.cpu`.
    layout: where the head lies.

  Raises:
    ValueError: a tensor is unknown, missing or misshapen.
  """
  form, config = matrices_lib.format_of(dtype), head.config
  ids = head.vocabulary()
  size = config.vocab_size if ids is None else len(ids)
  graph, expected = _shapes(head, jnp.dtype(form.float_dtype), size)
  loaded = hub.read_parameters(
    head,
    dataclasses.replace(
      families.FAMILIES[1], name=f'head of the kind {_NAMES[config.kind]}'
    ),
    expected,
    form,
    config,
    packed=packed,
    layout=layout,
  )
  shared = matrices_of(target, head.target)
  embedding = loaded.pop(('embed_tokens', 'embedding'), shared[0])
  lm_head = loaded.pop(('lm_head',), shared[1])
  for what, matrix in (('embedding', embedding), ('lm_head', lm_head)):
    if matrix.shape[1] != config.width:
      raise ValueError(
        f'{head.path}: has no {what} of its own, and the width {config.width}'
        f' of the head is not that of the target, {matrix.shape[1]}'
      )
  if ids is not None and lm_head.shape[0] != size:
    raise ValueError(f'{head.path}: has d2t, but no lm_head.weight of its own')
  return nn_head.as_head(
    nnx.merge(graph, traverse_util.unflatten_dict(loaded)),
    embedding=embedding,
    lm_head=lm_head,
    index=None if ids is None else index_of(ids, config.vocab_size),
    layout=layout,
  )


def matrices_of(
  target: model_lib.LanguageModel, config: Any
) -> tuple[Any, Any]:
  """The embedding and the output matrix of a target of this shape."""
  embedding = target.params[config.embedding]['embedding']
  if config.tie_embeddings:
    return embedding, embedding
  return embedding, target.params['lm_head']


def index_of(ids: np.ndarray, vocab_size: int) -> jax.Array:
  """`[V]` int32, see `models.nn.head.expand`, of a reduced vocabulary."""
  index = np.full(vocab_size, -1, np.int32)
  index[ids] = np.arange(len(ids))
  return jnp.asarray(index)


def rows_of(matrix: Any, ids: np.ndarray) -> np.ndarray:
  """Rows `[D, in]` float32 of an array or another matrix `[V, in]`."""
  return np.asarray(matrices_lib.take_rows(matrix, jnp.asarray(ids)))


def save(
  module: nn_head.Head,
  folder: pathlib.Path,
  *,
  lm_head: Any = None,
  ids: np.ndarray | None = None,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> None:
  """Writes an EAGLE-3 head as SafeAILab, SpecForge and SGLang name it.

  Args:
    module: an EAGLE-3 head.
    folder: made if it does not exist.
    lm_head: `[D, H]`, its own output matrix; None: that of the target.
    ids: `[D]` ascending, the tokens of a reduced vocabulary.
    dtype: of the matrices and norms.
  """
  config = module.config
  _, params = hub.flat_params(module)
  stored: dict[str, Any] = {
    families.parameter_name(path): np.asarray(leaf, dtype=dtype)
    for path, leaf in params.items()
  }
  stored = {
    re.sub(r'^layers\.0\.', 'midlayer.', name): array
    for name, array in stored.items()
  }
  if lm_head is not None:
    stored['lm_head.weight'] = np.asarray(lm_head, dtype=dtype)
  if ids is not None:
    stored[_D2T] = np.asarray(ids - np.arange(len(ids)), np.int64)
    stored[_T2D] = np.isin(np.arange(config.vocab_size), ids)
  described = checkpoints_llama.to_hugging_face(
    nn_llama.LlamaConfig(
      **{
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(nn_llama.LlamaConfig)
      }
    ),
    dtype=jnp.dtype(dtype).name,
    eos_token_id=None,
  ).to_dict()
  described |= {
    'architectures': ['LlamaForCausalLMEagle3'],
    'target_hidden_size': config.target_width,
    'rope_theta': config.rope.theta,
    _AUX: list(config.reads),
    # SGLang counts the layers that write the states.
    'eagle_config': {
      _AUX: [layer - 1 for layer in config.reads],
      'use_aux_hidden_state': True,
    },
  }
  if lm_head is not None:  # Without it SGLang takes the target's matrix.
    described['draft_vocab_size'] = len(lm_head)
  folder.mkdir(parents=True, exist_ok=True)
  weights = folder / hugging_face.WEIGHTS
  safetensors_numpy.save_file(stored, weights, metadata={'format': 'pt'})
  weights.chmod(0o644)  # safetensors makes it readable by its owner only.
  text = text_files.to_json(described, indent=2) + '\n'
  (folder / hugging_face.CONFIG).write_text(text, 'utf-8')
