"""Block drafters in folders, as z-lab, DeepSpec, speculators and Liquid do.

What a drafter is follows from its tensors, as for `heads`. Names of tensors:

    DFlash    fc, hidden_norm, layers.*, norm; embedding and output matrix are
              the target's, or embed_tokens, lm_head, d2t, t2d
    DSpark    also markov_head.*, confidence_head.proj
    DFlash 2  also layers.*.{attention,mlp}_conv, candidate_selector.*
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints.heads import head_tensors
from specdec.models.checkpoints.keys import block_keys
from specdec.models.checkpoints.keys import head_keys
from specdec.models.nn import block_drafter
from specdec.models.nn import llama as nn_llama

_EDGES = 'markov_head.hidden_projection.weight'
_CONFIDENCE = 'confidence_head.proj.weight'
_CONVOLUTION = 'layers.0.attention_conv.base_kernel'
# The beginnings of names of tensors of other drafters.
_OTHERS = {
  'prefix_gru.': 'Domino (its tensor prefix_gru)',
  'embed_proj.': 'Domino (its tensor embed_proj)',
  'lm_head_query_in.': 'Weaver (its tensor lm_head_query_in)',
  'markov_head.joint_proj.': "DSpark with markov_head_type='rnn'",
}


class StoredBlockDrafter(head_tensors.Drafter):
  """A block drafter."""

  name = 'block drafter'
  as_drafter = staticmethod(block_drafter.as_drafter)
  module = block_drafter.BlockDrafter

  def _facts(self) -> dict[str, Any]:
    """Values by key that follow from the tensors and the target."""
    if self.drawn:  # The keys alone say it.
      keys = block_keys.merged(self.stored.keys)
      stated = {key: keys[key] for key in keys if keys[key] is not None}
      unless = {'markov_rank': 0, 'enable_confidence_head': False}
      return unless | stated | {'vocab_size': self.target.vocab_size}
    shape, has = self.stored.shape, self.stored.all.keys()
    width = shape('norm.weight')[0]
    outputs = self.target.vocab_size
    if 'lm_head.weight' in has:
      outputs = shape('lm_head.weight')[0]
    facts = {
      'hidden_size': width,
      'intermediate_size': shape('layers.0.mlp.gate_proj.weight')[0],
      'num_hidden_layers': self.stored.num_layers,
      'head_dim': shape('layers.0.self_attn.q_norm.weight')[0],
      'vocab_size': self.target.vocab_size,
      'draft_vocab_size': outputs,
      'target_hidden_size': self.target.width,
      'num_target_layers': self.target.num_layers,
      'markov_rank': 0,
      'enable_confidence_head': _CONFIDENCE in has,
    }
    if _CONFIDENCE in has:
      inputs = shape(_CONFIDENCE)[1]
      facts['confidence_head_with_markov'] = inputs != width
    if _CONVOLUTION in has:
      size = shape(_CONVOLUTION)[1]
      projection = 'layers.0.attention_conv.kernel_projection.weight'
      facts['conv_kernel_size'] = size
      facts['conv_group_size'] = 2 * size * width // shape(projection)[0]
    if head_tensors.MARKOV[0] in has:
      key = 'selector_rank' if _EDGES in has else 'markov_rank'
      facts[key] = shape(head_tensors.MARKOV[0])[1]
    return facts

  @functools.cached_property
  @checkpoint_lib.named
  def config(self) -> block_drafter.BlockDrafterConfig:
    """The shape; raises ValueError if the target cannot have this drafter."""
    for prefix, name in _OTHERS.items():
      if any(stored.startswith(prefix) for stored in self.stored.all):
        raise ValueError(f'is a drafter of the kind {name}, not supported')
    keys, facts = block_keys.merged(self.stored.keys), self._facts()
    head_keys.check_claims(keys, facts)
    layers = block_keys.of_layers(keys) | {
      key: facts[key] for key in block_keys.SIZES if key in facts
    }
    layer: Any = families.read(layers, self.path)[1]
    slides = tuple(
      layer_type == 'sliding_attention'
      for layer_type in keys.get('layer_types') or ()
    ) or tuple(window is not None for window in layer.of_layers('window'))
    shape = nn_llama.fields_of(layer)
    markov_rank = facts['markov_rank'] or facts.get('selector_rank', 0)
    kind = keys.get('markov_head_type') or block_drafter.VANILLA
    if 'selector_rank' in facts:
      kind = block_drafter.EDGES
    reads = block_keys.reads(keys, self.target.num_layers)
    width = len(reads) * self.target.width
    if not self.drawn and self.stored.shape('fc.weight')[1] != width:
      raise ValueError(
        f'fc.weight reads {self.stored.shape("fc.weight")[1]} numbers, but'
        f' {len(reads)} states of a target of width {self.target.width} have'
        f' {width}; is this a drafter for another target?'
      )
    return block_drafter.BlockDrafterConfig(
      **shape | block_keys.fields(keys, slides),
      target_width=self.target.width,
      reads=reads,
      markov=kind if markov_rank else None,
      markov_rank=markov_rank,
      confidence=facts['enable_confidence_head'],
      confidence_with_markov=facts.get('confidence_head_with_markov', False),
      conv_size=facts.get('conv_kernel_size', 0),
      conv_group=facts.get('conv_group_size', 1),
    )


def save(
  module: block_drafter.BlockDrafter,
  folder: pathlib.Path,
  *,
  num_target_layers: int,
  lm_head: Any = None,
  ids: np.ndarray | None = None,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> None:
  """Writes a DSpark drafter as DeepSpec does, a DFlash drafter as z-lab does.

  It has neither convolutions nor edge scores. For other arguments than
  `num_target_layers` see `heads.save`.
  """
  config = module.config
  keys: dict[str, Any] = {
    'block_size': config.block_size,
    'num_target_layers': num_target_layers,
  }
  state_keys = {
    'mask_token_id': config.mask_token,
    'target_layer_ids': [layer - 1 for layer in config.reads],
  }
  if config.markov:
    keys |= state_keys | {
      'architectures': ['Qwen3DSparkModel'],
      'markov_rank': config.markov_rank,
      'markov_head_type': config.markov,
      'enable_confidence_head': config.confidence,
      'confidence_head_with_markov': config.confidence_with_markov,
    }
  else:
    keys |= {'architectures': ['DFlashDraftModel'], 'dflash_config': state_keys}
  head_tensors.write(
    module, folder, keys, lm_head=lm_head, ids=ids, dtype=dtype
  )
