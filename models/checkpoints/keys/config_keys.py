"""Checks the keys of configurations: their types, and that none is ignored.

Every key of a configuration is read, known to change nothing that is computed
here, or refused. This module has the rules that all formats share; the modules
of the formats say which keys they read.
"""

from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
import re
from typing import Any

import transformers

# Keys that change nothing here: they describe the training, how others run a
# model, or how text is made from logits.
_NO_EFFECT = re.compile(
  r"""
  # Keys of transformers, for all its models.
  _(?!sliding_window_pattern).* | .*_token_(ids?|index) | .*dropout.* | .*_pdrop
  | (torch_)?dtype | transformers[._].* | architectures | auto_map
  | chunk_size_feed_forward | finetuning_task | gradient_checkpointing
  | id2label | initializer_range | is_decoder | label2id | model_type
  | name_or_path | neftune_noise_alpha | num_labels | prefix | pretraining_tp
  | problem_type | return_dict | task_specific_params | tokenizer_class
  | torchscript | use_bfloat16 | (attn|experts)_implementation
  # Keys of single model types.
  | is_llama_config | max_sequence_length | model_max_length | mup_denominator
  | n_special | output_past | output_router_logits | predict_special_tokens
  | reorder_and_upcast_attn | router_(aux_loss_coef|jitter_noise) | summary_.*
  | unsloth_.*
  # Keys of drafting heads.
  | base_model_.*_plan | embed_requires_grad | enable_sp_ulysses | has_lm_head
  | has_no_defaults_at_init | speculators_.* | target_layer_count
  | target_model_type
  | """
  + '|'.join(map(re.escape, vars(transformers.GenerationConfig()))),
  re.VERBOSE,
)
# Keys with the values that change nothing. If they are off, they change nothing
# either, except keys that may be true.
_HARMLESS: dict[str, tuple[Any, ...]] = {
  '_sliding_window_pattern': (6,),
  'activation': ('swiglu',),
  'attn_output_gate': (True,),
  'block_use_swiglu': (True,),
  'decoder_sparse_step': (1,),
  'full_attn_mod': (1,),
  'interpolate_factor': (1,),
  'is_causal': (True,),
  'logit_scale': (1,),
  'next_layer_regular': (True,),
  'norm_topk_prob': (True,),
  'num_nextn_predict_layers': (1,),
  'parallel_draft_step': (1,),
  'use_bidirectional_attention': ('vision',),
  'use_pos_enc': (True,),
}
# Keys that say the same as another one; a format reads only one of the two.
_SYNONYMS = {
  'hidden_act': 'hidden_activation',
  'hidden_activation': 'hidden_act',
  'num_local_experts': 'num_experts',
  'n_ctx': 'n_positions',
  'moe_intermediate_size': 'intermediate_size',
  'experts_per_token': 'num_experts_per_tok',
  # LFM2 has these.
  **dict.fromkeys(('block_dim', 'conv_dim', 'conv_dim_out'), 'hidden_size'),
  'num_heads': 'num_attention_heads',
  'block_norm_eps': 'norm_eps',
}


class UnreadKey(ValueError):
  """A key says what nothing here computes; a file may be right without it."""


def types_of(config: Any) -> dict[str, Any]:
  """The keys of a class of transformers that not all have, and their types."""
  base = {
    field.name for field in dataclasses.fields(transformers.PreTrainedConfig)
  }
  fields = [
    field for field in dataclasses.fields(config) if field.name not in base
  ]
  return {field.name: field.type for field in fields}


def check_same(first: str, value: Any, second: str, other: Any) -> None:
  """Raises ValueError if two keys are there, not null and contradict."""
  if value is not None and other is not None and value != other:
    raise ValueError(
      f'{first}={value!r:.60} and {second}={other!r:.60} contradict each other'
    )


def select(
  config: Any, keys: Mapping[str, Any], read: Collection[str]
) -> dict[str, Any]:
  """The keys of a configuration that a class of transformers is to read.

  Keys among `read` may have a second name in the class.

  Raises:
    ValueError: two names of the same key contradict each other.
  """
  names = {*read}
  for name, alias in config.attribute_map.items():
    if name in names or alias in names:
      names |= {name, alias}
      check_same(name, keys.get(name), alias, keys.get(alias))
  # A null becomes a default only if the class has a field of this name.
  fields = {field.name for field in dataclasses.fields(config)}
  stated = {key: keys[key] for key in names & keys.keys()}
  return {k: v for k, v in stated.items() if v is not None or k in fields}


def refuse_unread(
  keys: Mapping[str, Any],
  read: Collection[str],
  *,
  idle: Collection[str] = (),
  resolved: Any = None,
) -> None:
  """Refuses keys that would be ignored, and might change what is computed.

  Args:
    keys: of a configuration.
    read: the keys that were read.
    idle: further ones that change nothing in this format.
    resolved: an object with the values of the keys that were read, or their
      defaults, as attributes.

  Raises:
    UnreadKey: a key was not read, is not known to change nothing, and is
      neither null, false, zero nor empty.
    ValueError: it contradicts one that was read.
  """
  for key in sorted(keys.keys() - {*read} - {*idle}):
    value, synonym = keys[key], _SYNONYMS.get(key, '')
    if value is None or value in _HARMLESS.get(key, ()):
      continue
    if synonym in read:
      same = getattr(resolved, synonym, None)
      if value != keys.get(synonym):
        check_same(key, value, synonym, same)
      continue
    never_off = any(off is True for off in _HARMLESS.get(key, ()))
    if (value or never_off) and not _NO_EFFECT.fullmatch(key):
      raise UnreadKey(f'{key}={value!r:.60} is not supported')
