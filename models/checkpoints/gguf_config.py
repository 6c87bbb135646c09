"""What the metadata of GGUF files says of a model's shape, as config.json does.

Names of keys and tensors are those that llama.cpp's converters write
(github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py).
"""

from collections.abc import Mapping
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from models.checkpoints import gguf_header
from models.checkpoints import gguf_tensor
from models.nn import rope as rope_lib

# Keys of the metadata, after the architecture, and those of config.json.
_GPT2_KEYS = {
  'context_length': 'n_positions',
  'embedding_length': 'n_embd',
  'block_count': 'n_layer',
  'attention.head_count': 'n_head',
  'feed_forward_length': 'n_inner',
  'attention.layer_norm_epsilon': 'layer_norm_epsilon',
}
_LLAMA_KEYS = {
  'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size',
  'block_count': 'num_hidden_layers',
  'attention.head_count': 'num_attention_heads',
  'attention.head_count_kv': 'num_key_value_heads',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
  'attention.key_length': 'head_dim',
  'attention.sliding_window': 'sliding_window',
  'feed_forward_length': 'intermediate_size',
  'expert_count': 'num_local_experts',
  'expert_used_count': 'num_experts_per_tok',
  'expert_feed_forward_length': 'moe_intermediate_size',
}
_CAPPED_KEYS = _LLAMA_KEYS | {
  'attn_logit_softcapping': 'attn_logit_softcapping',
  'final_logit_softcapping': 'final_logit_softcapping',
}
_GRANITE_KEYS = _LLAMA_KEYS | {
  'attention.scale': 'attention_multiplier',
  'embedding_scale': 'embedding_multiplier',
  'logit_scale': 'logits_scaling',
  'residual_scale': 'residual_multiplier',
}
# Keys that a file may lack, beside those of experts.
_OPTIONAL_KEYS = {
  'attention.head_count_kv',
  'attention.key_length',
  'attention.sliding_window',
  'attn_logit_softcapping',
  'final_logit_softcapping',
}
# For each layer, whether it has the window; or every how many has not.
_PATTERN = 'attention.sliding_window_pattern'
# Keys that are read elsewhere, or that change nothing.
_OTHER_KEYS = {
  _PATTERN,
  'attention.value_length',
  'rope.dimension_count',
  'rope.freq_base',
  'rope.freq_base_swa',
  'rope.scaling.attn_factor',
  'rope.scaling.factor',
  'rope.scaling.finetuned',
  'rope.scaling.original_context_length',
  'rope.scaling.type',
  'rope.scaling.yarn_beta_fast',
  'rope.scaling.yarn_beta_slow',
  'tensor_data_layout',
  'vocab_size',
}

ROPE_FACTORS = 'rope_freqs.weight'
# Of the scaling of Llama 3.1 and later; a file has only what follows from them.
_LLAMA3: dict[str, Any] = {
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}

# Names of tensors, and their canonical names (`models.checkpoints.families`).
_GPT2_NAMES = {
  'token_embd': 'wte',
  'position_embd': 'wpe',
  'output_norm': 'ln_f',
  'output': 'lm_head',
  'attn_norm': 'ln_1',
  'attn_qkv': 'attn.c_attn',
  'attn_output': 'attn.c_proj',
  'ffn_norm': 'ln_2',
  'ffn_up': 'mlp.c_fc',
  'ffn_down': 'mlp.c_proj',
}
_LLAMA_NAMES = {
  'token_embd': 'embed_tokens',
  'output_norm': 'norm',
  'output': 'lm_head',
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
  'ffn_gate_inp': 'mlp.gate',
}
_BEHIND_NAMES = _LLAMA_NAMES | {
  'post_attention_norm': 'post_attention_layernorm',
  'post_ffw_norm': 'post_feedforward_layernorm',
}
_GEMMA_NAMES = _BEHIND_NAMES | {'ffn_norm': 'pre_feedforward_layernorm'}


class Architecture(NamedTuple):
  """What the files of an architecture have.

  Attributes:
    plain: the `model_type` without experts, None if there is none.
    mixture: the `model_type` with experts.
    keys: of the metadata.
    names: of the tensors.
    layers: canonical name of the list of layers.
    rotates: whether positions are rotations of queries and keys.
    swaps_rows: whether rows of queries and keys have llama.cpp's order.
    pattern: every how many layers one has no window, of files that do not say
      it; 0 if all have one, None if it is not known.
    local_rope: whether layers with a window have a rotation of their own.
    head_from_width: the number of layers of a model whose scores are divided by
      the square root of the width over the number of heads, not of a head's.
  """

  plain: str | None
  mixture: str | None = None
  keys: Mapping[str, str] = _LLAMA_KEYS
  names: Mapping[str, str] = _LLAMA_NAMES
  layers: str = 'layers'
  rotates: bool = True
  swaps_rows: bool = False
  pattern: int | None = None
  local_rope: bool = False
  head_from_width: int | None = None


ARCHITECTURES = {
  'gpt2': Architecture(
    'gpt2', keys=_GPT2_KEYS, names=_GPT2_NAMES, layers='h', rotates=False
  ),
  'llama': Architecture('llama', 'mixtral', swaps_rows=True, pattern=0),
  'gemma': Architecture('gemma'),
  'gemma2': Architecture(
    'gemma2',
    keys=_CAPPED_KEYS,
    names=_GEMMA_NAMES,
    pattern=2,
    head_from_width=46,
  ),
  'gemma3': Architecture(
    'gemma3_text',
    keys=_CAPPED_KEYS,
    names=_GEMMA_NAMES,
    pattern=6,
    local_rope=True,
    head_from_width=62,
  ),
  'granite': Architecture('granite', keys=_GRANITE_KEYS, swaps_rows=True),
  'olmo2': Architecture('olmo2', names=_BEHIND_NAMES),
  'qwen2': Architecture('qwen2'),
  'qwen3': Architecture('qwen3'),
  'qwen3moe': Architecture(None, 'qwen3_moe'),
  'smollm3': Architecture('smollm3', swaps_rows=True),
}


def architecture_of(path: pathlib.Path, header: gguf_header.Header) -> str:
  """The name of the architecture; ValueError if it is not known."""
  found = header.metadata.get('general.architecture')
  if found not in ARCHITECTURES:
    raise ValueError(
      f'{path}: architecture {found!r} is not known; choose from'
      f' {sorted(ARCHITECTURES)}'
    )
  if header.metadata.get('split.count', 0) > 1:  # 0 in merged files.
    raise ValueError(
      f'{path} is one of {header.metadata["split.count"]} parts of a model;'
      ' merge them with llama-gguf-split --merge'
    )
  return found


def _rope_parameters(
  metadata: Mapping[str, Any], header: gguf_header.Header
) -> dict:
  """What transformers calls `rope_parameters`.

  Args:
    metadata: of the architecture, without its name before the keys.
    header: of the file.
  """
  parameters = {'rope_theta': metadata.get('rope.freq_base', 10000.0)}
  default = 'linear' if 'rope.scaling.factor' in metadata else 'none'
  kind = metadata.get('rope.scaling.type', default)
  if metadata.get('rope.scaling.attn_factor', 1.0) != 1.0:
    raise ValueError(
      f'rope.scaling.attn_factor={metadata["rope.scaling.attn_factor"]} is not'
      ' supported'
    )
  if kind == 'linear':
    if 'rope.scaling.factor' not in metadata:
      raise ValueError('rope.scaling.type=linear needs rope.scaling.factor')
    parameters |= {
      'rope_type': 'linear',
      'factor': metadata['rope.scaling.factor'],
    }
  elif kind == 'yarn':
    keys = {
      'rope.scaling.factor': 'factor',
      'rope.scaling.original_context_length': (
        'original_max_position_embeddings'
      ),
      'rope.scaling.yarn_beta_fast': 'beta_fast',
      'rope.scaling.yarn_beta_slow': 'beta_slow',
    }
    found = {keys[key]: metadata[key] for key in keys if key in metadata}
    parameters |= {'rope_type': 'yarn', **found}
  elif kind != 'none':
    raise ValueError(f'rope.scaling.type {kind!r} is not supported')
  if ROPE_FACTORS in header.tensors:
    parameters |= {'rope_type': 'llama3', **_LLAMA3}
  return parameters


def _llama3_factor(
  path: pathlib.Path, header: gguf_header.Header, theta: float
) -> float:
  """The factor of a Llama 3 scaling, of which a file has the result.

  Raises:
    ValueError: no such scaling has that result.
  """
  [(_, stored)] = gguf_tensor.Tensor(
    path, header.tensors[ROPE_FACTORS]
  ).blocks()
  exponents = np.arange(len(stored), dtype=np.float32) / len(stored)
  frequencies = np.float32(1) / np.float32(theta) ** exponents
  factor = float(np.max(stored))
  scaling = rope_lib.Llama3Scaling(factor=factor, **_LLAMA3)
  scaled = frequencies / scaling.scale(frequencies, theta)
  if not np.allclose(stored, scaled, rtol=1e-3):
    raise ValueError(
      f'{path}: {ROPE_FACTORS} holds factors {stored[:4]}... that are not'
      " those of Llama 3's scaling, and no others are supported"
    )
  return factor


def _shortest(value: Any) -> Any:
  """1e-05 in place of 9.99999974737875e-06, which is the same in float32."""
  return float(str(np.float32(value))) if isinstance(value, float) else value


def own_keys(
  path: pathlib.Path, header: gguf_header.Header, name: str
) -> dict[str, Any]:
  """The keys of an architecture, without its name before them.

  A list that repeats a value, once for each layer, is this value; only whether
  layers have windows may differ between them.

  Raises:
    ValueError: the values of a list differ, or there are none.
  """
  found = {}
  for key, value in header.metadata.items():
    if not key.startswith(f'{name}.'):
      continue
    if isinstance(value, list) and key != f'{name}.{_PATTERN}':
      if not value or any(one != value[0] for one in value):
        raise ValueError(
          f'{path}: {key} differs between layers; this is not supported'
        )
      value = value[0]
    found[key.removeprefix(f'{name}.')] = _shortest(value)
  return found


def _check_keys(
  path: pathlib.Path,
  name: str,
  metadata: Mapping[str, Any],
) -> None:
  """Refuses keys of an architecture that are not known or missing."""
  keys, pattern = ARCHITECTURES[name].keys, ARCHITECTURES[name].pattern
  if unknown := sorted(metadata.keys() - keys.keys() - _OTHER_KEYS):
    raise ValueError(f'{path}: {name}.{unknown[0]} is not supported')
  optional = {key for key in keys if key.startswith('expert_')}
  optional |= _OPTIONAL_KEYS - {'attention.sliding_window' if pattern else ''}
  if missing := sorted(keys.keys() - metadata.keys() - optional):
    raise ValueError(f'{path} lacks the key {name}.{missing[0]}')


def config_keys(path: pathlib.Path) -> dict[str, Any]:
  """What the `config.json` of the same model would have.

  Raises:
    ValueError: the architecture or one of its keys is not known, or a key is
      missing; the message names it.
  """
  header = gguf_header.read_header(path)
  name = architecture_of(path, header)
  kind = ARCHITECTURES[name]
  metadata = own_keys(path, header, name)
  num_experts = metadata.get('expert_count', 0)
  model_type = kind.mixture if num_experts > 0 else kind.plain
  if model_type is None:
    raise ValueError(
      f'{path}: {name} with {num_experts} experts is not supported'
    )
  _check_keys(path, name, metadata)
  if 'token_embd.weight' not in header.tensors:
    raise ValueError(f'{path} lacks the tensor token_embd.weight')
  found = {
    theirs: metadata[key]
    for key, theirs in kind.keys.items()
    if key in metadata and (num_experts > 0 or not key.startswith('expert_'))
  }
  found |= {
    'model_type': model_type,
    'vocab_size': header.tensors['token_embd.weight'].shape[0],
    'tie_word_embeddings': 'output.weight' not in header.tensors,
  }
  if num_experts > 0:
    found |= {'norm_topk_prob': True, 'num_experts': num_experts}
  if kind.rotates:
    _add_attention(path, header, name, found)
  return found


def _add_attention(
  path: pathlib.Path,
  header: gguf_header.Header,
  name: str,
  found: dict[str, Any],
) -> None:
  """Adds the keys of attention with rotations to those that were found."""
  metadata = own_keys(path, header, name)
  rope = _rope_parameters(metadata, header)
  if ROPE_FACTORS in header.tensors:
    rope['factor'] = _llama3_factor(path, header, rope['rope_theta'])
  found['rope_parameters'] = rope
  from_width = found['hidden_size'] // max(found['num_attention_heads'], 1)
  head_width = found.setdefault('head_dim', from_width)
  special = ARCHITECTURES[name].head_from_width
  if special is not None:
    found['query_pre_attn_scalar'] = (
      from_width if special == found['num_hidden_layers'] else head_width
    )
  for key in ('rope.dimension_count', 'attention.value_length'):
    if metadata.get(key, head_width) != head_width:
      raise ValueError(
        f'{path}: {name}.{key}={metadata[key]} is not the width of a head,'
        f' {head_width}'
      )
  found['attention_bias'] = 'blk.0.attn_q.bias' in header.tensors
  if found.get('sliding_window'):
    _add_windows(path, name, metadata, found)


def _add_windows(
  path: pathlib.Path,
  name: str,
  metadata: Mapping[str, Any],
  found: dict[str, Any],
) -> None:
  """Adds which layers have the window, and how those rotate."""
  kind, number = ARCHITECTURES[name], found['num_hidden_layers']
  pattern = metadata.get(_PATTERN, kind.pattern)
  if pattern is None:
    raise ValueError(
      f'{path}: {name}.attention.sliding_window={found["sliding_window"]}, but'
      f' no {name}.{_PATTERN} says which layers have it'
    )
  if not isinstance(pattern, list):
    pattern = [pattern == 0 or (at + 1) % pattern for at in range(number)]
  if name == 'llama' and found['model_type'] == 'llama':
    found['model_type'] = 'mistral' if all(pattern) else 'ministral'
  types = ['sliding_attention' if one else 'full_attention' for one in pattern]
  found |= {'layer_types': types, 'use_sliding_window': True}
  if kind.local_rope:
    local = {'rope_theta': metadata.get('rope.freq_base_swa', 10000.0)}
    found['rope_parameters'] = {
      'full_attention': found['rope_parameters'],
      'sliding_attention': local | {'rope_type': 'default'},
    }
