"""Tiny random targets that bring an MTP layer along, in their folders.

`golden/own_heads.npz` says what a program in plain torch computes of each.
"""

import pathlib

import block_folders
import numpy as np
import variants

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'own_heads.npz'
VOCAB, NUM_SHAPES, DEPTHS = 40, 12, 3
TEXT = np.random.RandomState(7).randint(VOCAB, size=40)
WORDS = np.arange(0, VOCAB, 9)  # Whose logits are kept.


def _qwen(rng):
  pick = lambda *values: values[rng.randint(len(values))]
  keys, values = pick((1, 1), (2, 2), (2, 4), (2, 6))
  return {
    'model_type': 'qwen3_5_text',
    'head_dim': pick(8, 16),
    'full_attention_interval': pick(2, 3),
    'linear_num_key_heads': keys,
    'linear_num_value_heads': values,
    'linear_key_head_dim': pick(8, 12),
    'linear_value_head_dim': pick(8, 20),
    'linear_conv_kernel_dim': pick(2, 4),
    'attention_bias': pick(False, True),
    'partial_rotary_factor': pick(0.25, 0.5, 1.0),
    'mtp_num_hidden_layers': 1,
  }


def config(family, number):
  """The keys of a shape of a family, `qwen` or `mimo`."""
  rng = np.random.RandomState(number)
  pick = lambda *values: values[rng.randint(len(values))]
  heads, kv_heads = pick((2, 1), (2, 2), (4, 2), (6, 2))
  keys = {
    'vocab_size': VOCAB,
    'hidden_size': 8 * heads,
    'intermediate_size': pick(24, 40),
    'num_hidden_layers': pick(3, 4),
    'num_attention_heads': heads,
    'num_key_value_heads': kv_heads,
    'max_position_embeddings': 96,
    'rms_norm_eps': pick(1e-6, 1e-3),
    'rope_theta': pick(100.0, 1e4),
    'tie_word_embeddings': pick(False, True),
    'bos_token_id': 0,
    'eos_token_id': 0,
  }
  mimo = {'model_type': 'mimo', 'num_nextn_predict_layers': 1}
  return keys | (mimo if family == 'mimo' else _qwen(rng))


def _attention(keys, prefix):
  """Shapes of a layer with attention."""
  width, is_qwen = keys['hidden_size'], keys['model_type'] != 'mimo'
  heads, kv_heads = keys['num_attention_heads'], keys['num_key_value_heads']
  size = keys.get('head_dim', width // heads)
  shapes = block_folders.layer_shapes(
    width, keys['intermediate_size'], heads * size, kv_heads * size, width
  )
  query = 'self_attn.q_proj.weight'
  if is_qwen:  # Each head has a gate, too.
    shapes[query] = (2 * heads * size, width)
    shapes |= {f'self_attn.{letter}_norm.weight': (size,) for letter in 'qk'}
  with_bias = 'qkv' if not is_qwen else 'qkvo' * keys['attention_bias']
  for letter in with_bias:
    rows = shapes[f'self_attn.{letter}_proj.weight'][:1]
    shapes[f'self_attn.{letter}_proj.bias'] = rows
  shapes['input_layernorm.weight'] = (width,)
  return {prefix + name: shape for name, shape in shapes.items()}


def _delta(keys, prefix):
  """Shapes of a layer with a delta net."""
  width = keys['hidden_size']
  keys_of, values = (keys[f'linear_num_{n}_heads'] for n in ('key', 'value'))
  key, value = (keys[f'linear_{n}_head_dim'] for n in ('key', 'value'))
  mixed = 2 * keys_of * key + values * value
  shapes = {
    'A_log': (values,),
    'dt_bias': (values,),
    'conv1d.weight': (mixed, 1, keys['linear_conv_kernel_dim']),
    'in_proj_qkv.weight': (mixed, width),
    'in_proj_z.weight': (values * value, width),
    'in_proj_a.weight': (values, width),
    'in_proj_b.weight': (values, width),
    'norm.weight': (value,),
    'out_proj.weight': (width, values * value),
  }
  others = _attention(keys, prefix).items()
  return {
    f'{prefix}linear_attn.{name}': shape for name, shape in shapes.items()
  } | {name: shape for name, shape in others if 'self_attn' not in name}


def tensors(keys):
  """The tensors of a shape, by their stored names."""
  width, is_mimo = keys['hidden_size'], keys['model_type'] == 'mimo'
  shapes = {'model.embed_tokens.weight': (VOCAB, width)}
  shapes['model.norm.weight'] = (width,)
  if not keys['tie_word_embeddings']:
    shapes['lm_head.weight'] = (VOCAB, width)
  for layer in range(keys['num_hidden_layers']):
    has_state = not is_mimo and (layer + 1) % keys['full_attention_interval']
    make = _delta if has_state else _attention
    shapes |= make(keys, f'model.layers.{layer}.')
  prefix = 'model.mtp_layers.0.' if is_mimo else 'mtp.'
  norms = ('pre_fc_norm_embedding', 'pre_fc_norm_hidden', 'norm')
  if is_mimo:
    norms = ('token_layernorm', 'hidden_layernorm', 'final_layernorm')
  shapes |= {f'{prefix}{name}.weight': (width,) for name in norms}
  projection = 'input_proj' if is_mimo else 'fc'
  shapes[f'{prefix}{projection}.weight'] = (width, 2 * width)
  shapes |= _attention(keys, prefix if is_mimo else 'mtp.layers.0.')
  drawn = {
    name: block_folders.draw(name, shape) for name, shape in shapes.items()
  }
  # Qwen3.5 has the scales of most norms minus one.
  shift = lambda name: not is_mimo and is_norm(name)
  return {name: array - shift(name) for name, array in drawn.items()}


def is_norm(name):
  """Whether a tensor of a Qwen3.5 has the scales of a norm minus one."""
  return 'norm' in name and 'linear_attn' not in name


_NAMES = {'enorm': 'pre_fc_norm_embedding', 'hnorm': 'pre_fc_norm_hidden'}


def stored_name(name):
  """The name that the folder of a Qwen3.5 has for a canonical one."""
  first, _, rest = name.partition('.')
  return f'mtp.{_NAMES.get(first, first)}.{rest}'


def write(folder, family, number, *, keys=None, nested=False, **changed):
  """Writes a folder with further keys; `nested`: as part of a larger model.

  `changed` are tensors; None removes a tensor.
  """
  described = config(family, number) | (keys or {})
  stored = {n: np.float32(array) for n, array in tensors(described).items()}
  stored |= changed
  if nested:  # As models that see store it.
    nest = lambda name: name.replace('model.', 'model.language_model.')
    stored = {nest(name): array for name, array in stored.items()}
    described = {'model_type': 'qwen3_5', 'text_config': described}
  return block_folders.save(folder, described, stored, {'format': 'pt'})


def assistant(number):
  """The keys of an assistant of a Gemma 4 of `variants.FAMILIES`."""
  target = variants.FAMILIES[f'gemma4_{number}']['config']
  rng = np.random.RandomState(number)
  types = target['layer_types']
  own_types = types[: len(types) - target['num_kv_shared_layers']]
  layers = [own_types[rng.randint(len(own_types))] for _ in range(3)]
  layers.append('full_attention')  # As transformers has it.
  heads = target['num_attention_heads']
  shared = ('vocab_size', 'num_attention_heads', 'num_key_value_heads')
  shared += ('max_position_embeddings', 'head_dim', 'global_head_dim')
  shared += ('rms_norm_eps', 'sliding_window', 'rope_parameters', 'model_type')
  shared += ('bos_token_id', 'eos_token_id', 'pad_token_id')
  text = {key: target[key] for key in shared if key in target}
  text |= {
    'hidden_size': 4 * heads,
    'intermediate_size': 20 + 4 * (number % 3),
    'num_hidden_layers': len(layers),
    'num_kv_shared_layers': len(layers),
    'layer_types': layers,
    'hidden_size_per_layer_input': 0,
    'vocab_size_per_layer_input': 0,
    'use_double_wide_mlp': False,
    'tie_word_embeddings': True,
    'final_logit_softcapping': None,
    'attention_bias': target['attention_bias'],
  }
  return {
    'model_type': 'gemma4_assistant',
    'architectures': ['Gemma4AssistantForCausalLM'],
    'backbone_hidden_size': target['hidden_size'],
    'use_ordered_embeddings': number % 2 == 0,
    'num_centroids': 10,
    'centroid_intermediate_top_k': 3,
    'tie_word_embeddings': True,
    'text_config': text,
  }


def write_assistant(folder, number, **changed):
  """Writes an assistant; `changed` are keys."""
  keys = assistant(number) | changed
  text, whole = keys['text_config'], keys['backbone_hidden_size']
  width, inner = text['hidden_size'], text['intermediate_size']
  shapes = {
    'pre_projection.weight': (width, 2 * whole),
    'post_projection.weight': (whole, width),
    'model.embed_tokens.weight': (VOCAB, width),
    'model.norm.weight': (width,),
  }
  if keys['use_ordered_embeddings']:
    name = 'masked_embedding.centroids.weight'
    shapes[name] = (keys['num_centroids'], width)
  norms = ('input', 'post_attention', 'pre_feedforward', 'post_feedforward')
  for layer, kind in enumerate(text['layer_types']):
    is_full = kind == 'full_attention'
    size = text['global_head_dim' if is_full else 'head_dim']
    rows = text['num_attention_heads'] * size
    layer_shapes = block_folders.layer_shapes(width, inner, rows, 0, width)
    layer_shapes |= {f'{name}_layernorm.weight': (width,) for name in norms}
    layer_shapes['self_attn.q_norm.weight'] = (size,)
    layer_shapes['layer_scalar'] = (1,)
    if text['attention_bias']:
      layer_shapes['self_attn.q_proj.bias'] = (rows,)
      layer_shapes['self_attn.o_proj.bias'] = (width,)
    shapes |= {
      f'model.layers.{layer}.{name}': shape
      for name, shape in layer_shapes.items()
      if 0 not in shape  # It has no keys and values.
    }
  stored = {
    name: block_folders.draw(f'a.{name}', shape) + name.endswith('scalar')
    for name, shape in shapes.items()
  }
  stored = {name: np.float32(array) for name, array in stored.items()}
  if keys['use_ordered_embeddings']:
    tokens = np.random.RandomState(number).permutation(VOCAB)
    stored['masked_embedding.token_ordering'] = tokens
  return block_folders.save(folder, keys, stored, {'format': 'pt'})
