"""Drafting heads: folders as those who train heads write them.

What a head is follows from its tensors, because configs are often copied from
the target (its number of layers too) or name another kind. Names of tensors:

    EAGLE-3    fc, midlayer.* (SafeAILab, SpecForge, SGLang) or layers.0.*
               (speculators, vLLM), norm, lm_head, d2t, t2d
    EAGLE-1/2  fc, layers.0.* without input_layernorm
    MTP        see `mtp`
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as cache_lib
from specdec import model as model_lib
from specdec.draft import block as block_lib
from specdec.draft import head as head_lib
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import assistants
from specdec.models.checkpoints.heads import block_drafters
from specdec.models.checkpoints.heads import head_tensors
from specdec.models.checkpoints.heads import mtp
from specdec.models.checkpoints.keys import head_keys
from specdec.models.nn import assistant
from specdec.models.nn import eagle
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib

_NAMES = {eagle.EAGLE3: 'EAGLE-3', eagle.EAGLE: 'EAGLE-1'}


def default_reads(num_layers: int) -> tuple[int, ...]:
  """The states that EAGLE-3 reads of a target with n layers.

  They are the inputs of layers 2, n / 2 and n - 3, counted from 0. A smaller
  target gives three others that differ.
  """
  reads = (2, num_layers // 2, num_layers - 3)
  if list(reads) == sorted({*reads}):
    return reads
  return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))


class StoredHead(head_tensors.Drafter):
  """An EAGLE head."""

  as_drafter = staticmethod(eagle.as_head)
  module = staticmethod(mtp.StoredMTP.module)

  @property
  def name(self) -> str:
    return f'head of the kind {_NAMES[self.kind]}'

  @property
  def kind(self) -> str:
    """`eagle.EAGLE3` or `eagle.EAGLE`, by the tensors."""
    if 'layers.0.hidden_norm.weight' in self.stored.all:
      return eagle.EAGLE3
    if 'layers.0.input_layernorm.weight' in self.stored.all:
      raise ValueError(
        'is a language model, not a drafting head; give it as the draft'
      )
    return eagle.EAGLE

  @functools.cached_property
  def _facts(self) -> dict[str, Any]:
    """Values by key that follow from the tensors and the target."""
    kind, shape, has = self.kind, self.stored.shape, self.stored.all.keys()
    outputs = self.target.vocab_size
    if 'lm_head.weight' in has:
      outputs = shape('lm_head.weight')[0]
    plain = {'norm_before_residual': False, 'norm_output': False}
    return {
      **({} if kind == eagle.EAGLE3 else plain),
      'hidden_size': shape('fc.weight')[0],
      'intermediate_size': shape('layers.0.mlp.gate_proj.weight')[0],
      'target_hidden_size': self.target.width,
      'draft_vocab_size': outputs,
      'truncated_vocab_size': outputs,
      'bias': 'fc.bias' in has,
      'fc_norm': 'fc_norm.0.weight' in has,
      'norm_before_fc': 'input_norm.weight' in has,
      'use_aux_hidden_state': kind == eagle.EAGLE3,
      'use_input_layernorm_in_first_layer': kind != eagle.EAGLE,
      'use_last_layernorm': kind != eagle.EAGLE,
      'use_mtp_layernorm': False,
    }

  @functools.cached_property
  def _keys(self) -> dict[str, Any]:
    keys = head_keys.merged(self.stored.keys)
    head_keys.check_claims(keys, self._facts)
    return keys

  @functools.cached_property
  @checkpoint_lib.named
  def config(self) -> eagle.HeadConfig:
    """The shape; raises ValueError if it is not a head for the target."""
    kind, keys, facts = self.kind, self._keys, self._facts
    width, fused = self.stored.shape('fc.weight')
    vocabulary = keys.get('vocab_size') or self.target.vocab_size
    if head_tensors.T2D in self.stored.all:
      vocabulary = self.stored.shape(head_tensors.T2D)[0]
    if vocabulary != self.target.vocab_size:
      raise ValueError(
        f'is a head for a vocabulary of {vocabulary} tokens; the target has'
        f' {self.target.vocab_size}'
      )
    layers = head_keys.of_layers(keys, facts, self.stored.num_layers)
    layers |= {'vocab_size': vocabulary}
    layer: Any = families.read(layers, self.path)[1]
    fields = nn_llama.fields_of(layer)
    fields |= self._by_tensors(layer) | {'width': width}
    reads: tuple[int, ...] = (cache_lib.AFTER_NORM,)
    if kind == eagle.EAGLE3:
      reads = self._reads(fused)
    elif width != self.target.width:
      raise ValueError(
        f'is a head of width {width}, which reads the states of a target as'
        f' wide; this one has {self.target.width}'
      )
    return eagle.HeadConfig(
      **fields,
      kind=kind,
      target_width=self.target.width,
      reads=reads,
      norm_before_residual=bool(keys.get('norm_before_residual')),
      fc_norm=facts['fc_norm'],
      norm_before_fc=facts['norm_before_fc'],
      # SpecForge says so of another norm; see `head_keys.merged`.
      norm_output=bool(
        keys.get('speculators_model_type') and keys.get('norm_output')
      ),
    )

  def _by_tensors(self, layer: Any) -> dict[str, Any]:
    """The facts that are read from the tensors, not from the config."""
    has = lambda name: f'layers.0.{name}' in self.stored.all
    rows = self.stored.shape('layers.0.self_attn.q_proj.weight')[0]
    head_width = rows // layer.num_heads
    if self._keys.get('head_dim') not in (None, head_width):
      raise ValueError(
        f'head_dim={self._keys["head_dim"]!r} contradicts q_proj.weight, which'
        f' has {rows} rows for num_attention_heads={layer.num_heads}'
      )
    return {
      'num_layers': self.stored.num_layers,
      'head_width': head_width,
      'inner_width': self._facts['intermediate_size'],
      'qkv_bias': has('self_attn.q_proj.bias'),
      'output_bias': has('self_attn.o_proj.bias'),
      'mlp_bias': has('mlp.gate_proj.bias'),
      'qk_norm': has('self_attn.q_norm.weight'),
      'tie_embeddings': bool(self._keys.get('tie_word_embeddings')),
      'fc_bias': self._facts['bias'],
    }

  def _reads(self, fused: int) -> tuple[int, ...]:
    """The states of the target that an EAGLE-3 head reads."""
    num_states, rest = divmod(fused, self.target.width)
    if rest or not num_states:
      raise ValueError(
        f'fc.weight reads {fused} numbers, not whole states of a target of'
        f' width {self.target.width}'
      )
    key, layers = head_keys.READS, self.target.num_layers
    stated = self._keys.get(key) or default_reads(layers)
    if len(stated) != num_states:
      raise ValueError(
        f'fc.weight reads {num_states} states of a target of width'
        f' {self.target.width}, but {key}={stated!r}'
      )
    if not all(0 <= layer <= layers for layer in stated):
      raise ValueError(
        f'{key}={stated!r}: the target has {layers} layers; is this a head for'
        ' another target?'
      )
    return tuple(stated)


Stored = (
  StoredHead
  | mtp.StoredMTP
  | assistants.StoredAssistant
  | block_drafters.StoredBlockDrafter
)
"""A head or a block drafter, which draft with states of the target."""


def own(target: checkpoint_lib.Checkpoint) -> mtp.StoredMTP:
  """The MTP layer in the folder or file of a target.

  Raises:
    ValueError: it has none, or one that is not supported.
  """
  layer, config = mtp.find(target.path, target.config), target.config
  if layer is None:
    raise ValueError(
      f'{target.path}: has {config.num_layers} layers of the family'
      f' {target.family.name} and no MTP layer (tensors mtp.*, or nextn.* in a'
      ' GGUF file), so head=own drafts nothing; give the folder or file of a'
      ' head or a draft'
    )
  with checkpoint_lib.naming(target.path):
    _ = layer.config
  return layer


def locate(name: str | pathlib.Path, target: Any) -> Stored:
  """Finds a head or block drafter for a target, and reads its own shape.

  Args:
    name: a folder, a GGUF file, an id on the Hugging Face hub, or `demo`, the
      embedded head.
    target: the shape of the target.

  Raises:
    ValueError: the folder does not exist, has no head, or has a head for
      another target.
  """
  name = 'demo-head' if name == 'demo' else name
  path = hub.locate(name).path
  with checkpoint_lib.naming(path):
    head: Stored = mtp.find(path, target) or StoredHead(path, target)
    if isinstance(head, StoredHead):
      if 'hidden_norm.weight' in head.stored.all:
        head = block_drafters.StoredBlockDrafter(path, target)
      elif head.stored.keys.get('model_type') == families.ASSISTANT:
        head = assistants.StoredAssistant(path, target)
    _ = head.config
  return head


def load(
  head: Stored,
  target: model_lib.LanguageModel,
  placement: checkpoint_lib.Placement | None = None,
  **options: Any,
) -> head_lib.Head | block_lib.BlockDrafter:
  """Loads a head; it may take embedding and output matrix from the target.

  With `outputs` it has a copy of their rows of the output matrix. Without a
  placement it is held as `checkpoint.placement_of(**options)` says.

  Raises:
    ValueError: a tensor is unknown, missing or misshapen, or the head has a
      reduced vocabulary of its own.
  """
  placement = placement or checkpoint_lib.placement_of(**options)
  config, outputs = head.config, placement.outputs
  placement = dataclasses.replace(placement, outputs=None)
  module, extras = hub.load_network(head, placement, drawn=head.drawn)
  embedding, output = matrices_of(target, head.target)
  embedding = extras.get(('embed_tokens', 'embedding'), embedding)
  output = embedding if config.tie_embeddings else output
  lm_head = extras.get(('lm_head',), output)
  if isinstance(head, assistants.StoredAssistant):
    if outputs is not None:
      raise ValueError(
        f'draft_vocab: {head.path} rates the tokens of its best groups only;'
        ' leave it out'
      )
    return assistant.as_head(
      module,
      embedding=embedding,
      lm_head=lm_head,
      target=target.params,
      ordering=head.ordering(),
      layout=placement.layout,
    )
  for what, matrix in (('embedding', embedding), ('lm_head', lm_head)):
    if matrix.shape[1] != config.width:
      raise ValueError(
        f'{head.path}: has no {what} of its own, and the head has the width'
        f' {config.width}, but the target {matrix.shape[1]}'
      )
  if (ids := head.ids) is not None:
    if lm_head.shape[0] != len(ids):
      raise ValueError(
        f'{head.path}: has d2t, but no lm_head.weight of its own'
      )
    if outputs is not None:
      raise ValueError(
        f'draft_vocab: {head.path} has a vocabulary of its own, of {len(ids)}'
        ' tokens; leave it out'
      )
    index = jnp.asarray(matrices_lib.index_of(ids, config.vocab_size))
    lm_head = matrices_lib.FewOutputs(outputs=lm_head, index=index)
  elif outputs is not None:
    lm_head = placement.hold_copy(lm_head, outputs, config)
  return head.as_drafter(
    module, embedding=embedding, lm_head=lm_head, layout=placement.layout
  )


def matrices_of(
  target: model_lib.LanguageModel, config: Any
) -> tuple[Any, Any]:
  """The embedding and the output matrix of a target of this shape."""
  embedding = target.params[config.embedding]['embedding']
  output = embedding if config.tie_embeddings else target.params['lm_head']
  if embedding.shape[0] != config.vocab_size:  # On a GPU it has more rows.
    embedding = embedding[: config.vocab_size]
  if output.shape[0] != config.vocab_size:
    output = output[: config.vocab_size]
  return embedding, output


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
    lm_head: `[D, H]`, its own output matrix; None: the target's.
    ids: `[D]` ascending, the tokens of a reduced vocabulary.
    dtype: of the matrices and norms.
  """
  config = module.config
  keys: dict[str, Any] = {
    'architectures': ['LlamaForCausalLMEagle3'],
    'target_hidden_size': config.target_width,
    head_keys.READS: list(config.reads),
    # SGLang counts the layers that write the states.
    'eagle_config': {
      head_keys.READS: [layer - 1 for layer in config.reads],
      'use_aux_hidden_state': True,
    },
  }
  if lm_head is not None:  # Without it SGLang takes the target's matrix.
    keys['draft_vocab_size'] = len(lm_head)
  head_tensors.write(
    module,
    folder,
    keys,
    lm_head=lm_head,
    ids=ids,
    dtype=dtype,
    first_layer='midlayer.',
  )
