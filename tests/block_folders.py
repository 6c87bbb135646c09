"""Tiny random block drafters, in folders as their trainers write them.

`golden/block_drafters.npz` says what the packages that define the formats
compute of each; `golden/make_block_drafters.py` makes it.
"""

import json
import pathlib
import zlib

import numpy as np
from safetensors import numpy as safetensors_numpy

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'block_drafters.npz'
VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, INNER = (
  16,
  32,
  4,
  4,
  2,
  8,
  48,
)
BLOCK, MASK, RANK, CONTEXT = 4, 15, 8, 96
SIZES = CONTEXT, WIDTH, INNER, HEADS, KV_HEADS, HEAD_WIDTH
KEPT = np.array([0, 1, 3, 4, 6, 7, 9, 11, 12, 14])  # A reduced vocabulary.
TEXT = 10  # Tokens of the text that a forward reads; the root comes after them.

_SLIDING, _FULL = 'sliding_attention', 'full_attention'
_QWEN = {
  'model_type': 'qwen3',
  'vocab_size': VOCAB,
  'hidden_size': WIDTH,
  'intermediate_size': INNER,
  'num_attention_heads': HEADS,
  'num_key_value_heads': KV_HEADS,
  'head_dim': HEAD_WIDTH,
  'max_position_embeddings': CONTEXT,
  'rms_norm_eps': 1e-6,
  'rope_theta': 100.0,
  'tie_word_embeddings': False,
  'bos_token_id': 0,
  'eos_token_id': 0,
  'pad_token_id': None,
}
TARGET = _QWEN | {'num_hidden_layers': LAYERS}
_LAYERS = _QWEN | {'num_hidden_layers': 2}
_WINDOW = {'sliding_window': 4, 'use_sliding_window': True}
_WINDOWS = _WINDOW | {'layer_types': [_SLIDING, _FULL]}
_LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'rope_theta': 100.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
_CONVOLUTIONS = {'conv_kernel_size': 2, 'conv_group_size': 8}
_SELECTOR = {'selector_rank': RANK, 'selector_top_k': 6}


def _z_lab(keys=None, **method):
  """Keys as z-lab writes them; `method` are keys of `dflash_config`."""
  method = {'mask_token_id': MASK, 'target_layer_ids': [0, 2]} | method
  config = _LAYERS | {'block_size': BLOCK, 'num_target_layers': LAYERS}
  config |= {'architectures': ['DFlashDraftModel'], 'dflash_config': method}
  return config | (keys or {})


def _speculators(kind, layers=None, **more):
  """Keys as speculators writes them."""
  config = {'speculators_model_type': kind, 'block_size': BLOCK}
  config |= {'mask_token_id': MASK, 'draft_vocab_size': VOCAB}
  config |= {'aux_hidden_state_layer_ids': [1, 3]}
  verifier = {'architectures': ['Qwen3ForCausalLM'], 'name_or_path': None}
  method = {'proposal_type': 'greedy', 'speculative_tokens': BLOCK - 1}
  config['speculators_config'] = {
    'algorithm': kind,
    'default_proposal_method': 'greedy',
    'proposal_methods': [method],
    'verifier': verifier,
  }
  layers = _LAYERS | (layers or {})
  return config | {'transformer_layer_config': layers} | more


_DSPARK = {'markov_rank': RANK, 'markov_head_type': 'vanilla'}
_DSPARK |= {'enable_confidence_head': True, 'confidence_head_with_markov': True}
_ZLAB2 = {
  'output_multiplier': 0.5,
  'final_logit_softcapping': 3.0,
  'input_embedding_scale': 2.0,
}
# A name tells the package; `CONFIGS` has what follows from it in config.json.
CONFIGS = {
  'z-lab': _z_lab(),
  'z-lab windows': _z_lab(_WINDOWS),
  'z-lab causal': _z_lab({'is_causal': True, 'attention_bias': True}),
  'z-lab both ways': _z_lab(_WINDOWS | {'is_causal': False}),
  'z-lab 2': _z_lab(
    _WINDOWS | {'is_causal': False, 'architectures': ['DFlash2DraftModel']},
    **(_CONVOLUTIONS | _SELECTOR | _ZLAB2),
  ),
  'speculators dspark': _speculators(
    'dspark', sample_from_anchor=True, **_DSPARK
  ),
  'speculators gated': _speculators(
    'dspark',
    _WINDOWS,
    **_DSPARK
    | {'markov_head_type': 'gated', 'draft_vocab_size': len(KEPT)}
    | {'confidence_head_with_markov': False},
  ),
  'speculators dflash': _speculators(
    'dflash', {'model_type': 'llama', 'rope_parameters': _LLAMA3}
  ),
  'speculators both ways': _speculators(
    'dflash', _WINDOWS, sliding_window_non_causal=True
  ),
  'speculators dflash2': _speculators(
    'dflash2', _WINDOWS, **_CONVOLUTIONS, **_SELECTOR
  ),
}
# The same drafter in layouts of others, which have no package.
CONFIGS['deepspec'] = (
  _LAYERS
  | {'block_size': BLOCK, 'mask_token_id': MASK, 'target_layer_ids': [0, 2]}
  | {'num_anchors': 8, 'architectures': ['Qwen3DSparkModel'], **_DSPARK}
)
CONFIGS['liquid'] = _z_lab(
  {
    'architectures': ['Lfm2DSparkDraftModel'],
    'markov_rank': RANK,
    'markov_head_type': 'vanilla',
    'enable_confidence_head': True,
    'rope_is_neox_style': False,
  }
)


def draw(name, shape):
  """Values of a tensor, by its name."""
  is_scale = 'norm' in name or name.endswith('base_kernel')
  # NumPy never changes what this old generator draws.
  rng = np.random.RandomState(zlib.crc32(name.encode()))
  return (0.3 * rng.standard_normal(shape) + is_scale).astype(np.float32)


def layer_shapes(width, inner, rows, kv_rows, inputs):
  """Shapes of a layer, without norms of its inputs, queries and keys."""
  return {
    'self_attn.q_proj.weight': (rows, inputs),
    'self_attn.k_proj.weight': (kv_rows, inputs),
    'self_attn.v_proj.weight': (kv_rows, inputs),
    'self_attn.o_proj.weight': (width, rows),
    'mlp.gate_proj.weight': (inner, width),
    'mlp.up_proj.weight': (inner, width),
    'mlp.down_proj.weight': (width, inner),
    'post_attention_layernorm.weight': (width,),
  }


def _layer(prefix, *, biased=False):
  rows, kv_rows = HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH
  shapes = layer_shapes(WIDTH, INNER, rows, kv_rows, WIDTH)
  shapes['input_layernorm.weight'] = (WIDTH,)
  shapes |= {
    f'self_attn.{letter}_norm.weight': (HEAD_WIDTH,) for letter in 'qk'
  }
  if biased:
    shapes |= {
      name.replace('.weight', '.bias'): shape[:1]
      for name, shape in shapes.items()
      if name.startswith('self_attn.') and 'proj' in name
    }
  return {prefix + name: shape for name, shape in shapes.items()}


def _all_keys(config):
  nested = ('dflash_config', 'transformer_layer_config')
  keys = dict(config)
  for name in nested:
    keys |= config.get(name) or {}
  return keys


def tensors(case):
  """The tensors of a case, by their stored names."""
  keys = _all_keys(CONFIGS[case])
  outputs = keys.get('draft_vocab_size', VOCAB)
  shapes = {'fc.weight': (WIDTH, 2 * WIDTH)}
  shapes |= {'hidden_norm.weight': (WIDTH,), 'norm.weight': (WIDTH,)}
  for layer in range(keys['num_hidden_layers']):
    biased = keys.get('attention_bias', False)
    shapes |= _layer(f'layers.{layer}.', biased=biased)
    if 'conv_kernel_size' in keys:
      numbers = 2 * keys['conv_kernel_size'] * WIDTH // keys['conv_group_size']
      for part in ('attention_conv', 'mlp_conv'):
        name = f'layers.{layer}.{part}'
        shapes[f'{name}.base_kernel'] = (2, keys['conv_kernel_size'], WIDTH)
        shapes[f'{name}.kernel_projection.weight'] = (numbers, WIDTH)
  if rank := keys.get('markov_rank'):
    shapes['markov_head.markov_w1.weight'] = (VOCAB, rank)
    shapes['markov_head.markov_w2.weight'] = (outputs, rank)
    if keys['markov_head_type'] == 'gated':
      shapes['markov_head.gate_proj.weight'] = (rank, WIDTH + rank)
      shapes['markov_head.gate_proj.bias'] = (rank,)
    inputs = WIDTH + rank * keys.get('confidence_head_with_markov', True)
    shapes['confidence_head.proj.weight'] = (1, inputs)
    shapes['confidence_head.proj.bias'] = (1,)
  if rank := keys.get('selector_rank'):
    for side in ('predecessor', 'successor'):
      shapes[f'candidate_selector.{side}_codebook'] = (VOCAB, rank)
    shapes['candidate_selector.hidden_projection.weight'] = (rank, WIDTH)
  # With these the target accepts some of what each drafter proposes.
  arrays = {name: draw(f'5.{name}', shape) for name, shape in shapes.items()}
  if outputs != VOCAB:
    arrays['embed_tokens.weight'] = draw('own embed_tokens', (VOCAB, WIDTH))
    arrays['lm_head.weight'] = draw('own lm_head', (outputs, WIDTH))
    arrays['d2t'] = KEPT - np.arange(len(KEPT))
  if case == 'liquid':
    arrays |= {
      name: neighbours(array)
      for name, array in arrays.items()
      if '.q_' in name or '.k_' in name
    }
  return arrays


def neighbours(array):
  """Rows of queries or keys in the order of formats that rotate neighbours."""
  halves = array.reshape(-1, 2, HEAD_WIDTH // 2, *array.shape[1:])
  return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def save(folder, config, tensors, metadata=None):
  """Writes a folder without the tensors that are None."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  stored = {name: array for name, array in tensors.items() if array is not None}
  safetensors_numpy.save_file(stored, folder / 'model.safetensors', metadata)
  return folder


def write(folder, case, *, keys=None, **changed):
  """Writes a folder; `changed` are tensors; None removes a tensor."""
  return save(folder, CONFIGS[case] | (keys or {}), tensors(case) | changed)


def target_tensors():
  """The tensors of the target, by the names of transformers."""
  shapes = {'embed_tokens.weight': (VOCAB, WIDTH), 'norm.weight': (WIDTH,)}
  for layer in range(LAYERS):
    shapes |= _layer(f'layers.{layer}.')
  arrays = {f'model.{name}': draw(f't.{name}', shapes[name]) for name in shapes}
  return arrays | {'lm_head.weight': draw('t.lm_head', (VOCAB, WIDTH))}


def write_target(folder):
  """Writes the target, a Qwen 3."""
  config = TARGET | {'architectures': ['Qwen3ForCausalLM']}
  return save(folder, config, target_tensors(), {'format': 'pt'})


def states():
  """`[2, TEXT, WIDTH]`, of the two layers that a forward reads."""
  return draw('states', (2, TEXT, WIDTH))
