"""Block drafters: what the packages that define the formats compute."""

import functools
import pathlib
import tempfile

import block_folders
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import tiny_blocks

import specdec
from specdec import tracing
from specdec.draft import block as block_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import heads
from specdec.models.nn import adapter
from specdec.models.nn import layers
from specdec.models.nn.cpu import build
from specdec.tree import topology as topology_lib

_GOLDEN = np.load(block_folders.GOLDEN)
_PACKAGES = [
  case for case in block_folders.CONFIGS if f'{case}: scores' in _GOLDEN
]
_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]  # As in `make_block_drafters.py`.
_BEFORE = [3, 7, 2, 5]
_BLOCK = block_folders.BLOCK


@functools.cache
def _target():
  """The module of the target."""
  with tempfile.TemporaryDirectory() as made:
    return hub.load_module(block_folders.write_target(pathlib.Path(made)))


def _load(path, **options):
  source = heads.locate(path, _target().config)
  assert source.config.reads == (1, 3)  # Layers 0 and 2 write them.
  return heads.load(source, adapter.as_model(_target()), **options)


@jax.jit
def _block(drafter):
  """Scores of a block after a text, edges, and confidence."""
  spec, length = drafter.spec, block_folders.TEXT
  states = tuple(jnp.asarray(array)[None] for array in block_folders.states())
  positions = jnp.arange(length)[None]
  cache = spec.init_cache(1, 24)
  cache = spec.read(drafter.params, states, positions, cache)
  cache = cache.replace(length=jnp.array([length]))
  tokens = jnp.full((1, _BLOCK), spec.mask_token).at[0, 0].set(3)
  positions = length + jnp.arange(_BLOCK)[None]
  sees = jnp.ones((1, _BLOCK, _BLOCK), bool)
  mask = cache.ops.mask(cache.length, sees, cache.num_slots)
  scores, states, _ = spec.propose(
    drafter.params, tokens, positions, mask, cache
  )
  before = jnp.array([_BEFORE[: spec.depth]])
  every = jnp.arange(spec.vocab_size)[None, None]
  every = jnp.broadcast_to(every, (*before.shape, spec.vocab_size))
  results = {'scores': scores}
  if spec.edges is not None:
    results['edges'] = spec.edges(drafter.params, states, before, every)
  if spec.confidence is not None:
    results['confidence'] = spec.confidence(drafter.params, states, before)
  return results


def _difference(case, results):
  """The largest difference from what a package computes."""
  differences = []
  for name, values in results.items():
    expected, values = _GOLDEN[f'{case}: {name}'], np.asarray(values)
    if values.shape[-1] > expected.shape[-1] == len(block_folders.KEPT):
      values = values[..., block_folders.KEPT]
    depth = min(expected.shape[1], values.shape[1])
    differences.append(np.abs(values[:, :depth] - expected[:, :depth]))
  return max(difference.max() for difference in differences)


@pytest.mark.parametrize('case', _PACKAGES)
def test_forwards_of_other_packages(case):
  with tempfile.TemporaryDirectory() as made:
    folder = block_folders.write(pathlib.Path(made), case)
    drafter = _load(folder)
  results = _block(drafter)
  names = {key.split(': ')[1] for key in _GOLDEN if key.startswith(f'{case}:')}
  assert results.keys() == names - {'text', 'fed'}
  for name, values in results.items():
    assert values.shape[1] == _GOLDEN[f'{case}: {name}'].shape[1]
  assert _difference(case, results) < 2e-4
  if case == 'speculators gated':
    ids = drafter.spec.outputs(drafter.params)
    np.testing.assert_array_equal(ids, block_folders.KEPT)


_ONE_SLIDES = ['sliding_attention', 'full_attention']
_STATED = {'sliding_window': 4, 'layer_types': _ONE_SLIDES}
_UNUSED = _STATED | {'use_sliding_window': False}
_LAYERS = 'transformer_layer_config'


def _with_layers(case, keys):
  return {_LAYERS: block_folders.CONFIGS[case][_LAYERS] | keys}


@pytest.mark.parametrize(
  ('keys', 'is_used'),
  [
    (_UNUSED, False),
    (_STATED, False),  # As the class of Qwen 3 has it.
    (_STATED | {'model_type': 'qwen2'}, False),
    (_STATED | {'use_sliding_window': True}, True),
    (_UNUSED | {'model_type': 'llama'}, True),  # Its class has no switch.
    (_STATED | {'model_type': 'mistral'}, True),
    ({'layer_types': _ONE_SLIDES}, False),
  ],
)
def test_only_a_window_that_is_used_hides_later_rows(keys, is_used, tmp_path):
  case = 'speculators dspark'
  folder = block_folders.write(tmp_path, case, keys=_with_layers(case, keys))
  config = heads.locate(folder, _target().config).config
  flags = config.of_layers('causal'), config.of_layers('window')
  windowed = (True, False), (4, None)
  assert flags == (windowed if is_used else ((False,) * 2, (None,) * 2))


def test_a_drafter_has_a_copy_of_some_outputs(tmp_path):
  kept = block_folders.KEPT
  folder = block_folders.write(tmp_path / 'all', 'deepspec')
  whole, few = _block(_load(folder)), _block(_load(folder, outputs=kept))
  np.testing.assert_allclose(few['scores'], whole['scores'][..., kept], 1e-5)
  np.testing.assert_array_equal(few['edges'], whole['edges'])
  reduced = block_folders.write(tmp_path / 'some', 'speculators gated')
  with pytest.raises(ValueError, match=r'draft_vocab: .* a vocabulary of its'):
    _load(reduced, outputs=kept)


_GGUF = {
  'hidden_norm.': 'enc.output_norm.',
  'markov_head.markov': 'markov',
  'confidence_head.proj': 'conf_proj',
  'attention_conv.base_kernel': 'attn_conv_base',
  'attention_conv.kernel_projection': 'attn_conv_proj',
  'mlp_conv.base_kernel': 'ffn_conv_base',
  'mlp_conv.kernel_projection': 'ffn_conv_proj',
  'candidate_selector.predecessor_codebook': 'selector_predecessor.weight',
  'candidate_selector.successor_codebook': 'selector_successor.weight',
  'candidate_selector.hidden_projection': 'selector_hidden',
  'layers.': 'blk.',
}
_OF_FILES = {
  'speculators dspark': {'sample_from_anchor': True},
  'z-lab 2': {
    'attention.causal': False,
    'logit_scale': 0.5,
    'embedding_scale': 2.0,
    'final_logit_softcapping': 3.0,
    'attention.sliding_window': 4,
    'attention.sliding_window_pattern': [True, False],
    'block_count': 2,
    'conv_kernel_size': 2,
    'conv_group_size': 8,
    'selector_rank': 8,
    'selector_top_k': 6,
  },
}


def _write_gguf(path, case, keys=None, kind=None):
  """Writes a drafter as llama.cpp does, with matrices in blocks of a kind."""
  common = {'block_size': _BLOCK, 'rope.freq_base': 100.0}
  common['target_layers'] = [1, 3]
  keys = _OF_FILES.get(case, {}) | common | (keys or {})
  writer = tiny_blocks.drafter_writer(path, 'dflash', block_folders.SIZES, keys)
  writer.add_uint32('tokenizer.ggml.mask_token_id', block_folders.MASK)
  for name, array in block_folders.tensors(case).items():
    name = tiny_blocks.stored_name(name, _GGUF)
    if kind is not None and array.ndim == 2 and array.shape[1] == 32:
      packed = gguf.quants.quantize(array, kind)
      writer.add_tensor(name, packed, raw_dtype=kind)
    else:
      writer.add_tensor(name, array)
  tiny_blocks.finish(writer)
  return path


@pytest.mark.parametrize(
  ('layout', 'case'),
  [
    ('deepspec', 'speculators dspark'),
    ('liquid', 'speculators dspark'),
    ('gguf', 'speculators dspark'),
    ('gguf', 'z-lab 2'),
  ],
)
def test_other_layouts_of_the_same_drafter(layout, case, tmp_path):
  if layout == 'gguf':
    path = _write_gguf(tmp_path / 'drafter.gguf', case)
  else:
    path = block_folders.write(tmp_path, layout)
  assert _difference(case, _block(_load(path))) < 2e-4


@pytest.mark.parametrize('case', ['z-lab windows', 'z-lab 2'])
def test_chains_of_another_package(case, tmp_path):
  text, fed = (_GOLDEN[f'{case}: {name}'].tolist() for name in ('text', 'fed'))
  drafter = _load(block_folders.write(tmp_path, case))
  chain = topology_lib.chain(drafter.spec.depth)
  decoding = specdec.Decoding(
    adapter.as_model(_target(), hidden=(1, 3)),
    jax.random.key(0),
    [[*_PROMPT, text[0]]],  # That package makes this token with the prompt.
    max_new_tokens=len(text) - 1,
    sampling=specdec.Sampling(temperature=0.0),
    drafter=specdec.fixed_drafter(block_lib.BlockScorer(drafter), chain),
  )
  [trace] = tracing.record(decoding)
  assert decoding.result().tokens[0] == text[1:]
  drafted = [list(block.tokens) for block in trace.blocks]
  assert drafted[: len(fed)] == fed  # Its last blocks are cut.
  assert len(fed) < len(text) - _BLOCK + 1  # Some were accepted.


@pytest.mark.parametrize(
  ('dtype', 'packed'),
  [
    ('int8', False),
    ('int4', True),
    ('stored', True),
  ],
)
def test_few_bits_score_almost_the_same(dtype, packed, tmp_path):
  if packed and not build.is_available():
    pytest.skip('the kernels cannot be built here')
  case = 'speculators dspark'
  path = tmp_path / 'drafter.gguf'
  if dtype == 'stored':
    _write_gguf(path, case, kind=gguf.GGMLQuantizationType.Q4_0)
  else:
    path = block_folders.write(tmp_path / 'folder', case)
  drafter = _load(path, dtype=dtype, packed=packed)
  # The scores lie between -11 and 11.
  assert 1e-4 < _difference(case, _block(drafter)) < 3
  if dtype == 'stored':
    _check_rows_are_alone(drafter)


def _check_rows_are_alone(drafter):
  """Text that is read in two parts leaves the same bits as at once."""
  spec, states = drafter.spec, block_folders.states()
  length = states.shape[1]

  def read(cache, start, end):
    some = tuple(jnp.asarray(array[start:end])[None] for array in states)
    positions = jnp.arange(start, end)[None]
    cache = jax.jit(spec.read)(drafter.params, some, positions, cache)
    return cache.replace(length=jnp.array([end]))

  whole = read(spec.init_cache(1, 24), 0, length)
  parts = read(read(spec.init_cache(1, 24), 0, 3), 3, length)
  jax.tree.map(np.testing.assert_array_equal, whole, parts)


# Keys of config.json, or shapes of tensors, None if they are gone.
@pytest.mark.parametrize(
  ('case', 'changes', 'message'), refusals.of('models/nn', 'block')
)
def test_what_cannot_be_used_is_refused(case, changes, message, tmp_path):
  is_tensor = lambda name: name.endswith(('.weight', '_kernel'))
  keys = {name: changes[name] for name in changes if not is_tensor(name)}
  tensors = {
    name: changes[name] and np.ones(changes[name], np.float32)
    for name in changes
    if is_tensor(name)
  }
  folder = block_folders.write(tmp_path, case, keys=keys, **tensors)
  with pytest.raises(ValueError, match=f'^{folder}.*{message}'):
    _load(folder)


def test_keys_of_a_gguf_file(tmp_path):
  path = tmp_path / 'drafter.gguf'
  locate = lambda **keys: heads.locate(
    _write_gguf(path, 'speculators dspark', keys), _target().config
  )
  assert locate().config.samples_root
  for keys, message in refusals.of('models/nn', 'block.gguf'):
    with pytest.raises(ValueError, match=f'^{path}: .*{message}'):
      locate(**keys)


def test_a_cap_leaves_out_what_is_not_computed():
  capped = layers.soft_cap(jnp.array([-jnp.inf, -50.0, 50.0]), 5.0)
  np.testing.assert_allclose(capped, [-np.inf, -5, 5], rtol=1e-4)
