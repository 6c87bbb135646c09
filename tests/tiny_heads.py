"""Tiny heads with random weights, in folders as their trainers write them."""

import functools
import pathlib
import tempfile

import block_folders
import jax
import jax.numpy as jnp
import numpy as np
import tiny
import tiny_blocks
import variants

import specdec
from specdec import cache as cache_lib
from specdec.models.checkpoints.heads import heads
from specdec.models.nn import gpt2 as nn_gpt2

HEADS, KV_HEADS, HEAD_WIDTH, INNER = 4, 2, 8, 24
WIDTH = tiny.MODULE_SHAPE['width']
READS = (0, 1, 2)
TARGET = nn_gpt2.GPT2Config(
  **tiny.MODULE_SHAPE
  | {'vocab_size': tiny.VOCAB_SIZE, 'num_positions': tiny.MAX_POSITIONS},
  tie_embeddings=False,
)
IDS = np.array([token for token in range(tiny.VOCAB_SIZE) if token % 3])


def target() -> specdec.LanguageModel:
  """The tiny target with all that a head may read."""
  return tiny.gpt2(hidden=(*READS, cache_lib.AFTER_NORM))


def _layer(inputs):
  """Shapes of a layer without the norms of its inputs."""
  rows, kv_rows = HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH
  return {
    'self_attn.q_proj.weight': (rows, inputs),
    'self_attn.k_proj.weight': (kv_rows, inputs),
    'self_attn.v_proj.weight': (kv_rows, inputs),
    'self_attn.o_proj.weight': (WIDTH, rows),
    'mlp.gate_proj.weight': (INNER, WIDTH),
    'mlp.up_proj.weight': (INNER, WIDTH),
    'mlp.down_proj.weight': (WIDTH, INNER),
    'post_attention_layernorm.weight': (WIDTH,),
  }


def tensors(kind: str, *, num_layers: int = 1, reduced=False, **flags):
  """Random tensors by the names of `slow_head`."""
  wide = kind == 'eagle3'
  vocabulary = len(IDS) if reduced else tiny.VOCAB_SIZE
  shapes = {
    'embed_tokens.weight': (tiny.VOCAB_SIZE, WIDTH),
    'lm_head.weight': (vocabulary, WIDTH),
    'fc.weight': (WIDTH, (len(READS) if wide else 2) * WIDTH),
  }
  for layer in range(num_layers):
    inputs = 2 * WIDTH if wide and not layer else WIDTH
    layer_shapes = _layer(inputs)
    if wide and not layer:
      layer_shapes['hidden_norm.weight'] = (WIDTH,)
    if layer or wide:
      layer_shapes['input_layernorm.weight'] = (WIDTH,)
    shapes |= {
      f'layers.{layer}.{name}': shape for name, shape in layer_shapes.items()
    }
  if kind == 'eagle' and flags.get('bias', True):
    shapes['fc.bias'] = (WIDTH,)
  if wide:
    shapes['norm.weight'] = (WIDTH,)
  if flags.get('fc_norm'):
    shapes |= {f'fc_norm.{number}.weight': (WIDTH,) for number in range(3)}
  if flags.get('norm_before_fc'):
    shapes['input_norm.weight'] = (3 * WIDTH,)
  rng = np.random.default_rng(0)
  return {
    name: (0.4 * rng.normal(size=shape) + (len(shape) == 1)).astype(np.float32)
    for name, shape in shapes.items()
  }


CONFIG = {
  'model_type': 'llama',
  'num_attention_heads': HEADS,
  'hidden_size': WIDTH,
  'num_key_value_heads': KV_HEADS,
  'head_dim': HEAD_WIDTH,
  'intermediate_size': INNER,
  'num_hidden_layers': 40,
  'max_position_embeddings': tiny.MAX_POSITIONS,
  'rms_norm_eps': 1e-6,
  'vocab_size': tiny.VOCAB_SIZE,
}
_AUX = 'eagle_aux_hidden_state_layer_ids'

# For each way to write heads: how a name of `slow_head` is stored, and keys of
# config.json that are its own.
NAMINGS = {
  'sglang': (
    lambda name: name.replace('layers.0.', 'midlayer.'),
    {'eagle_config': {_AUX: [layer - 1 for layer in READS]}},
  ),
  'speculators': (lambda name: name, {'speculators_model_type': 'eagle3'}),
  'eagle': (lambda name: name, {}),
}


def write(folder, naming, values, *, reduced=False, keys=None, **changed):
  """Writes a folder; `changed` are tensors; None removes a tensor."""
  rename, own_config = NAMINGS[naming]
  stored = {rename(name): array for name, array in values.items()}
  if reduced:
    stored['d2t'] = IDS - np.arange(len(IDS))
    stored['t2d'] = np.isin(np.arange(tiny.VOCAB_SIZE), IDS)
  keys = keys or {}
  if naming == 'speculators':
    layers = {key: keys.get(key, value) for key, value in CONFIG.items()}
    config = {'transformer_layer_config': layers, _AUX: list(READS)}
  else:
    config = dict(CONFIG)
  return variants.save(folder, config | own_config | keys, stored | changed)


def write_gguf(path, values, arch='eagle3', keys=None):
  """Writes an EAGLE-3 head of a reduced vocabulary as llama.cpp does."""
  sizes = tiny.MAX_POSITIONS, WIDTH, INNER, HEADS, KV_HEADS, HEAD_WIDTH
  keys = {'extract_layers': list(READS)} | (keys or {})
  writer = tiny_blocks.drafter_writer(path, arch, sizes, keys)
  writer.add_tensor('d2t', IDS.astype(np.int64))
  own_names = {'layers.0.hidden_norm': 'blk.0.attn_norm_2'}
  for name, array in values.items():
    if '.q_proj' in name or '.k_proj' in name:
      array = block_folders.neighbours(array)
    writer.add_tensor(tiny_blocks.stored_name(name, own_names), array)
  tiny_blocks.finish(writer)


def load(folder, **options):
  model = target()
  model = model.replace(params=model.params['gpt2'])
  return heads.load(heads.locate(folder, TARGET), model, **options)


def random_head():
  """An EAGLE-3 head with random weights."""
  with tempfile.TemporaryDirectory() as made:
    folder = write(pathlib.Path(made), 'sglang', tensors('eagle3'))
    return load(folder)


def before(head, of_layers):
  """`[B, T, H]`, the states before the tokens of texts, fused.

  `of_layers` are the target's states after the tokens, see `by_heart.hidden`.
  """
  shifted = [
    jnp.pad(of_layers[layer][:, 0], ((0, 0), (1, 0), (0, 0)))[:, :-1]
    for layer in head.spec.reads
  ]
  return head.spec.fuse(head.params, *shifted)


@functools.partial(jax.jit, static_argnames='depths')
def drafted(head, text, of_layers, *, depths):
  """Drafts after a text `[T]`, each time the most likely token of a head.

  Returns the tokens `[depths]`, and the logits `[T + depths, V]` after each
  token of the text and each drafted one. For `of_layers` see `before`.
  """

  def forward(tokens, cache, states):
    size = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(size)[None]
    mask = cache_lib.causal_mask(cache.length, size, cache.num_slots)
    given, cache = head.forward(tokens, positions, mask, cache, states)
    cache = cache.replace(length=cache.length + size)
    return head.spec.logits(head.params, given), given, cache

  def draft(carry, _):
    tokens, *others = carry
    logits, states, cache = forward(tokens, *others)
    return (best(logits), cache, states), (tokens[0, 0], logits[0, 0])

  best = lambda logits: jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32)
  cache = head.spec.init_cache(1, text.size + depths)
  logits, states, cache = forward(text[None], cache, before(head, of_layers))
  carry = best(logits), cache, states[:, -1:]
  _, (tokens, further) = jax.lax.scan(draft, carry, length=depths)
  return tokens, jnp.concatenate([logits[0], further])
