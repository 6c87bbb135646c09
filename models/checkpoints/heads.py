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

from models.checkpoints import families
from models.checkpoints import head_tensors
from models.checkpoints import hub
from models.checkpoints import hugging_face
from models.checkpoints import llama as checkpoints_llama
from models.nn import eagle
from models.nn import llama as nn_llama
from models.nn import matrices as matrices_lib
from models.nn import rope as rope_lib
from models.nn import sharding as sharding_lib
from specdec import cache as cache_lib
from specdec import model as model_lib
from specdec import text_files
from specdec import whole_files
from specdec.draft import head as head_lib

_AUX = 'eagle_aux_hidden_state_layer_ids'
_NAMES = {
  eagle.EAGLE3: 'EAGLE-3',
  eagle.EAGLE: 'EAGLE-1',
  eagle.MTP: 'MTP',
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
class StoredHead:
  """A folder or GGUF file of a head, for a target of a given shape.

  Attributes:
    path: the folder or file.
    target: the shape of the target.
  """

  path: pathlib.Path
  target: Any

  @functools.cached_property
  def stored(self) -> head_tensors.HeadTensors:
    """The tensors."""
    return head_tensors.HeadTensors(self.path)

  @property
  def _raw(self) -> Mapping[str, Any]:
    return self.stored.keys

  def _refuse(self, reason: str) -> ValueError:
    return ValueError(f'{self.path}: {reason}')

  @property
  def kind(self) -> str:
    """One of `models.nn.eagle.KINDS`, by the tensors."""
    if 'enorm.weight' in self.stored.all:
      return eagle.MTP
    if 'layers.0.hidden_norm.weight' in self.stored.all:
      return eagle.EAGLE3
    if 'layers.0.input_layernorm.weight' in self.stored.all:
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
        f' (fc.weight of shape {self.stored.shape("fc.weight")}, no'
        ' midlayer.hidden_norm.weight); correct config.json'
      )
    return eagle.EAGLE

  @functools.cached_property
  def config(self) -> eagle.HeadConfig:
    """The shape; raises ValueError if it is not a head for the target."""
    kind, raw = self.kind, self._layer_keys()
    width, fused = self.stored.shape('fc.weight')
    layer = families.config_from_keys(raw, self.path)
    fields = {
      field.name: getattr(layer, field.name)
      for field in dataclasses.fields(nn_llama.LlamaConfig)
    }
    vocabulary = self._raw.get('vocab_size', layer.vocab_size)
    if head_tensors.T2D in self.stored.all:
      vocabulary = self.stored.shape(head_tensors.T2D)[0]
    if vocabulary != self.target.vocab_size:
      raise self._refuse(
        f'is a head for a vocabulary of {vocabulary} tokens; the target has'
        f' {self.target.vocab_size}'
      )
    fields |= self._by_tensors(layer) | {'vocab_size': vocabulary}
    reads: tuple[int, ...] = (cache_lib.AFTER_NORM,)
    if kind == eagle.EAGLE3:
      reads = self._reads(fused)
    elif width != self.target.width:
      raise self._refuse(
        f'is a head of width {width}, which reads the states of a target as'
        f' wide; this one has {self.target.width}'
      )
    stored = {tensor.name for tensor in self.stored.all.values()}
    return eagle.HeadConfig(
      **fields | {'width': width},
      kind=kind,
      target_width=self.target.width,
      reads=reads,
      norm_before_residual=bool(self._stated('norm_before_residual')),
      fc_norm='fc_norm.0.weight' in self.stored.all,
      norm_before_fc='input_norm.weight' in self.stored.all,
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
    raw = {
      **self._raw,
      **self._raw.get('transformer_layer_config', {}),
    }
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
    has = lambda name: f'layers.0.self_attn.{name}' in self.stored.all
    rows = self.stored.shape('layers.0.self_attn.q_proj.weight')[0]
    return {
      'num_layers': self.stored.num_layers,
      'head_width': rows // layer.num_heads,
      'inner_width': self.stored.shape('layers.0.mlp.gate_proj.weight')[0],
      'qkv_bias': has('q_proj.bias'),
      'output_bias': has('o_proj.bias'),
      'mlp_bias': 'layers.0.mlp.gate_proj.bias' in self.stored.all,
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


def _shapes(
  head: StoredHead, dtype: jnp.dtype, size: int
) -> tuple[nnx.GraphDef, dict[tuple, Any]]:
  """The graph of the module, and the shapes of all that is stored."""
  config = head.config
  graph, expected = hub.flat_params(
    nnx.eval_shape(lambda: eagle.Head(config, dtype=dtype, rngs=nnx.Rngs(0)))
  )
  if 'embed_tokens.weight' in head.stored.all:
    shape = (config.vocab_size, config.width)
    expected['embed_tokens', 'embedding'] = jax.ShapeDtypeStruct(shape, dtype)
  if 'lm_head.weight' in head.stored.all:
    shape = (size, config.width)
    expected['lm_head',] = jax.ShapeDtypeStruct(shape, dtype)
  return graph, expected


def locate(name: str | pathlib.Path, target: Any) -> StoredHead:
  """Finds a head for a target of this shape, and reads its own shape.

  Args:
    name: a folder, a GGUF file, an id on the Hugging Face hub, or `demo`, the
      embedded head.
    target: the shape of the target.

  Raises:
    ValueError: there is no such folder, it holds no head, or one for another
      target.
  """
  name = 'demo-head' if name == 'demo' else name
  found = StoredHead(hub.locate(name).path, target)
  with whole_files.reading(found.path):
    _ = found.config
  return found


def load(
  head: StoredHead,
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
  with whole_files.reading(head.path):
    ids = head.stored.vocabulary(config.vocab_size)
    size = config.vocab_size if ids is None else len(ids)
    graph, expected = _shapes(head, jnp.dtype(form.float_dtype), size)
  loaded = hub.read_parameters(
    head.stored,
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
  if ids is not None:
    index = jnp.asarray(matrices_lib.index_of(ids, config.vocab_size))
    lm_head = matrices_lib.FewOutputs(outputs=lm_head, index=index)
  return eagle.as_head(
    nnx.merge(graph, traverse_util.unflatten_dict(loaded)),
    embedding=embedding,
    lm_head=lm_head,
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


def rows_of(matrix: Any, ids: np.ndarray) -> np.ndarray:
  """Rows `[D, in]` float32 of an array or another matrix `[V, in]`."""
  return np.asarray(matrices_lib.take_rows(matrix, jnp.asarray(ids)))


def _described(
  config: eagle.HeadConfig, dtype: jnp.dtype, lm_head: Any
) -> dict[str, Any]:
  """The config.json of an EAGLE-3 head."""
  assert isinstance(config.rope, rope_lib.Rope)  # One for all its layers.
  described = checkpoints_llama.to_hugging_face(
    nn_llama.LlamaConfig(
      **{
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(nn_llama.LlamaConfig)
      }
    ),
    dtype=dtype.name,
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
  return described


def save(
  module: eagle.Head,
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
    stored[head_tensors.D2T] = np.asarray(ids - np.arange(len(ids)), np.int64)
    stored[head_tensors.T2D] = np.isin(np.arange(config.vocab_size), ids)
  described = _described(config, jnp.dtype(dtype), lm_head)
  weights = folder / hugging_face.WEIGHTS
  whole_files.write_tensors(weights, stored, {'format': 'pt'})
  text = text_files.to_json(described, indent=2) + '\n'
  whole_files.write_text(folder / hugging_face.CONFIG, text)
