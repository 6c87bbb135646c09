"""Drafting heads: their formulas, and how decoding feeds them.

A head that is fed wrongly changes no output, so equality with plain decoding
proves nothing here. What it drafts in every step is compared with a slow head
that reads the whole text again (`slow_head`).
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import tempfile

import by_heart
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import slow_head
import tiny
import tiny_drafters
import tiny_heads

import specdec
from specdec import cache as cache_lib
from specdec import step as step_lib
from specdec.draft import head as head_lib
from specdec.models.checkpoints.heads import heads
from specdec.models.nn import adapter
from specdec.models.nn import eagle
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.models.nn import rope as rope_lib
from specdec.tree import topology as topology_lib

# How a head is stored, what it is and what the oracle is told. Keys of
# config.json are among it, and some that change nothing there.
_KINDS = {
  'sglang': ('eagle3', {'rope_theta': 30.0}),
  'speculators': (
    'eagle3',
    {'norm_before_residual': True, 'norm_output': True},
  ),
  'speculators norms': (
    'eagle3',
    {'fc_norm': True, 'num_layers': 2, 'rms_norm_eps': 0.3},
  ),
  'sglang norm': ('eagle3', {'norm_before_fc': True, 'reduced': True}),
  'eagle': ('eagle', {'rms_norm_eps': 0.3}),
  'eagle without': ('eagle', {'bias': False}),
  'eagle window': ('eagle', {'sliding_window': 3, 'model_type': 'mistral'}),
}
_TOLD = {'num_layers', 'reduced'}  # By the tensors.
# SpecForge means another norm than speculators do.
_UNTOLD = {'sglang': {'norm_output': True}, 'speculators': {'rope_theta': 1e4}}


@pytest.mark.parametrize('name', _KINDS)
def test_logits_are_those_of_the_formulas(name):
  """From a folder of a naming, against the formulas."""
  kind, flags = _KINDS[name]
  reduced = flags.get('reduced', False)
  values = tiny_heads.tensors(kind, **flags)
  naming = name if name in tiny_heads.NAMINGS else name.rpartition(' ')[0]
  stated = {key: flags[key] for key in flags if key not in _TOLD}
  stated |= _UNTOLD.get(name, {})
  with tempfile.TemporaryDirectory() as folder:
    options = {'reduced': reduced, 'keys': stated}
    tiny_heads.write(pathlib.Path(folder), naming, values, **options)
    head = tiny_heads.load(pathlib.Path(folder))
  assert head.spec.reads == (tiny_heads.READS if kind == 'eagle3' else (-1,))
  text = np.array(tiny.prompts(3)[2][:9])
  _, hidden = jax.device_get(by_heart.hidden(text[None]))
  slow = slow_head.SlowHead(
    values, heads=tiny_heads.HEADS, head_width=tiny_heads.HEAD_WIDTH, **flags
  )
  of_layers = np.stack([hidden[layer][0, 0] for layer in head.spec.reads], 1)
  index = tiny_heads.IDS if reduced else None
  drafted, expected = slow.draft(text.tolist(), of_layers, 4, index)
  tokens, logits = tiny_heads.drafted(head, text, hidden, depths=3)
  assert tokens.tolist() == drafted[:-1]
  computed = np.asarray(logits)[len(text) - 1 :]
  if reduced:
    assert np.isneginf(np.delete(computed, index, axis=1)).all()
    computed = computed[:, index]
  np.testing.assert_allclose(computed, expected, atol=1e-4, rtol=1e-4)


def test_pickled_weights_are_refused_with_the_remedy(tmp_path):
  folder = _write(tmp_path, 'eagle')
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
  with pytest.raises(ValueError, match='torch'):
    tiny_heads.load(folder)


_KIND_OF = {'sglang': 'eagle3', 'speculators': 'eagle3', 'eagle': 'eagle'}


def _write(folder, naming, **changed):
  values = tiny_heads.tensors(_KIND_OF[naming])
  return tiny_heads.write(folder, naming, values, **changed)


_AUX = 'eagle_aux_hidden_state_layer_ids'
_IDS = {'d2t': 0 * tiny_heads.IDS, 't2d': np.arange(48) > 9}


# Keys that trainers of heads write and that change nothing.
_FILE = pathlib.Path(__file__).parents[2] / 'golden' / 'head_keys.json'
_KEYS = json.loads(_FILE.read_text())
_SPECFORGE, _OPTIMIZER = _KEYS['SpecForge'], _KEYS['eagle_config']
_SPECULATORS = _KEYS['speculators']


@pytest.mark.parametrize(
  ('naming', 'keys'),
  [
    ('sglang', _SPECFORGE),
    ('sglang', {'model_type': 'gpt_oss', 'layer_types': None}),
    ('sglang', _SPECFORGE | {'model_type': 'qwen2'}),
    ('eagle', {'num_nextn_predict_layers': 1, 'use_mrope': False}),
    ('eagle', {'layer_types': ['full_attention'] * 40}),
    ('eagle', {'bias': True, 'qkv_bias': False}),
    ('speculators', _SPECULATORS),
    ('sglang', {'eagle_config': _OPTIMIZER | {_AUX: [-1, 0, 1]}}),
  ],
)
def test_keys_that_change_nothing(naming, keys, tmp_path):
  plain, other = (
    _write(tmp_path / str(len(stated)), naming, keys=stated)
    for stated in ({}, keys)
  )
  config = lambda folder: heads.locate(folder, tiny_heads.TARGET).config
  assert config(plain) == config(other)


@pytest.mark.parametrize(
  ('naming', 'name', 'theta'),
  [
    ('sglang', 'Qwen3-1.7B', 1e6),
    ('speculators', 'gpt-oss-20b', 1e4),
    ('sglang', 'Llama-3.2', 5e5),
  ],
)
def test_published_heads_are_read(naming, name, theta, tmp_path):
  """An own matrix counts more than a claim that it is the embedding."""
  keys = _KEYS[name] | {'draft_vocab_size': len(tiny_heads.IDS)}
  by_fc = keys.get('norm_before_fc', False)
  values = tiny_heads.tensors('eagle3', reduced=True, norm_before_fc=by_fc)
  if naming == 'sglang':
    del values['embed_tokens.weight']
  options = {'reduced': True, 'keys': keys}
  folder = tiny_heads.write(tmp_path, naming, values, **options)
  deep = dataclasses.replace(tiny_heads.TARGET, num_layers=32)
  stored, target = heads.locate(folder, deep), tiny_heads.target()
  head = heads.load(stored, target.replace(params=target.params['gpt2']))
  config = stored.config
  assert (config.rope.theta, config.reads) == (theta, (2, 16, 29))
  assert config.norm_before_fc == by_fc
  assert head.params['lm_head'].outputs.shape[0] == len(tiny_heads.IDS)


# A naming; keys, or shapes of tensors that are others, None if they are gone.
@pytest.mark.parametrize(
  ('naming', 'changes', 'message'),
  [
    ('sglang', {'d2t': tiny_heads.IDS}, 'd2t: ids must differ and lie below'),
    ('sglang', _IDS, 'd2t .* and t2d .* do not say the same'),
    *refusals.of('models/nn', 'head'),
  ],
)
def test_what_is_no_head_for_the_target_is_refused(
  naming, changes, message, tmp_path
):
  keys = {name: changes[name] for name in changes if '.' not in name}
  tensors = {
    name: shape and np.ones(shape, np.float32)
    for name, shape in changes.items()
    if '.' in name
  }
  if 'd2t' in changes:
    keys, tensors = {}, changes
  folder = _write(tmp_path, naming, keys=keys, **tensors)
  with pytest.raises(ValueError, match=f'^{folder}.*{message}'):
    tiny_heads.load(folder)


# Keys that nobody reads, by their beginnings, or that may have such a value.
_IDLE = ('architectures', 'auto_map', 'base_', 'decoder_', 'dtype', 'embed_')
_IDLE += ('has_', 'model_type', 'next_', 'num_hidden_layers', 'parallel_')
_IDLE += ('speculators_', 'target_model', 'torch_', 'transformers_')
_GOOD = (('hidden_act', 'a'), ('rope_scaling', {'a': 1}))


@pytest.mark.parametrize('naming', ['sglang', 'speculators'])
def test_a_wrong_type_is_an_error_that_names_the_key(naming, tmp_path):
  config = _SPECFORGE | _OPTIMIZER | _SPECULATORS | tiny_heads.CONFIG
  keys = [key for key in config if not key.startswith(_IDLE)]
  wrong = ({'a': 1}, ['a'], 'a', float('nan'))
  for key, value in itertools.product(keys, wrong):
    if (key, value) not in _GOOD:
      folder = _write(tmp_path, naming, keys={key: value})
      with pytest.raises(ValueError, match=f'^{folder}: {key} must be'):
        heads.locate(folder, tiny_heads.TARGET)


def test_a_head_rotates_as_its_own_config_says(tmp_path):
  """Without a key by the base of its model_type, as all who read it do."""
  target = tiny.llama_module('llama').config
  target = dataclasses.replace(target, rope=rope_lib.Rope(theta=5e5))
  for theta, keys in ((1e4, {}), (30.0, {'rope_theta': 30.0})):
    folder = _write(tmp_path, 'sglang', keys=keys)
    rope = heads.locate(folder, target).config.rope
    assert rope == rope_lib.Rope(theta=theta)


@pytest.mark.parametrize(
  ('keys', 'reads'),
  [
    ({_AUX: [1, 16, 29]}, (1, 16, 29)),  # the layers that read a state
    ({'eagle_config': {_AUX: [1, 15, 28]}}, (2, 16, 29)),  # that write it
    ({'eagle_config': {_AUX: [2, 16, 28]}}, (3, 17, 29)),
    ({_AUX: [2, 16, 29], 'eagle_config': {_AUX: [1, 15, 28]}}, (2, 16, 29)),
    ({_AUX: [], 'eagle_config': {_AUX: None}}, (2, 16, 29)),
    ({}, (2, 16, 29)),
  ],
)
def test_the_states_that_are_read(keys, reads, tmp_path):
  folder = _write(tmp_path, 'sglang', keys={'eagle_config': None} | keys)
  deep = dataclasses.replace(tiny_heads.TARGET, num_layers=32)
  assert heads.locate(folder, deep).config.reads == reads


def _states(module, tokens):
  """The embedding, what each layer gives, and the last after the final norm."""
  positions = jnp.arange(tokens.shape[1])[None]
  if isinstance(module, nn_gpt2.GPT2):
    states = [module.wte(tokens) + module.wpe(positions)]
    layers, norm, rope = module.h, module.ln_f, ()
  else:
    states = [module.embed_tokens(tokens)]
    layers, norm = module.layers, module.norm
    rope = (module.config.rope.rotation(positions, module.config.head_width),)
  causal = jnp.tri(tokens.shape[1], dtype=bool)[None]
  for layer in layers:
    states.append(layer(states[-1], *rope, causal, None)[0])
  return [*states, norm(states[-1])]


@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_what_a_state_is(family):
  """State i goes into layer i, and the last one through the final norm."""
  module = tiny.module() if family == 'gpt2' else tiny.llama_module('llama')
  tokens, layers = np.array([[1, 5, 3, 2]]), (0, 1, 2, cache_lib.AFTER_NORM)
  _, hidden = by_heart.hidden(tokens, adapter.as_model(module, hidden=layers))
  expected = jax.jit(lambda: _states(module, tokens))()
  for layer, states in zip(layers, expected, strict=True):
    close = {'atol': 1e-5, 'rtol': 1e-4}
    np.testing.assert_allclose(hidden[layer][:, 0], states, **close)


@pytest.mark.parametrize('is_tied', [False, True])
def test_whose_output_matrix_it_is(is_tied, tmp_path):
  values = tiny_heads.tensors('eagle3')
  del values['lm_head.weight']
  keys = {'tie_word_embeddings': is_tied}
  folder = tiny_heads.write(tmp_path, 'sglang', values, keys=keys)
  params = tiny_heads.load(folder).params
  target = tiny_heads.target().params['gpt2']
  embedding = values['embed_tokens.weight']
  np.testing.assert_array_equal(params['embedding'], embedding)
  expected = embedding if is_tied else target['lm_head']
  np.testing.assert_array_equal(params['lm_head'], expected)


def test_a_gguf_file_is_the_same_head(tmp_path):
  values = tiny_heads.tensors('eagle3', reduced=True)
  folder = tiny_heads.write(tmp_path / 'folder', 'sglang', values, reduced=True)
  tiny_heads.write_gguf(tmp_path / 'head.gguf', values)
  expected = tiny_heads.load(folder)
  loaded = tiny_heads.load(tmp_path / 'head.gguf')
  assert loaded.spec.reads == tiny_heads.READS
  jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)
  # Keys that others write.
  keys = {'block_count': 1, 'attention.head_count_kv': [2], 'vocab_size': 48}
  keys |= {'target_hidden_size': 16, 'rope.dimension_count': 8}
  keys |= {'rope.scaling.type': 'none', 'rope.freq_base': 30.0}
  tiny_heads.write_gguf(tmp_path / 'more.gguf', values, keys=keys)
  config = heads.locate(tmp_path / 'more.gguf', tiny_heads.TARGET).config
  assert config.rope == rope_lib.Rope(theta=30.0)
  tiny_heads.write_gguf(tmp_path / 'other.gguf', values, arch='llama')
  with pytest.raises(ValueError, match="'llama' is not a drafting head"):
    tiny_heads.load(tmp_path / 'other.gguf')


@pytest.mark.parametrize(
  ('keys', 'message'), refusals.of('models/nn', 'head.gguf')
)
def test_keys_of_a_gguf_file(keys, message, tmp_path):
  path = tmp_path / 'head.gguf'
  tiny_heads.write_gguf(path, tiny_heads.tensors('eagle3'), keys=keys)
  with pytest.raises(ValueError, match=f'^{path}: .*{message}'):
    heads.locate(path, tiny_heads.TARGET)


_BRANCHING = tiny_drafters.TREE.branching
# They are so few that a random head drafts some of the target's tokens.
_POSSIBLE = tiny_heads.IDS[: 2 * _BRANCHING]


def _drafter(folder, kind, values):
  folder = tiny_heads.write(folder, 'sglang', values, reduced=True)
  scorer = head_lib.HeadScorer(tiny_heads.load(folder))
  if kind == 'fixed':
    return specdec.fixed_drafter(scorer, topology_lib.k_ary(_BRANCHING, 2))
  inner = tiny_drafters.candidates(
    specdec.PromptLookup((0.5,)), config=tiny_drafters.INNER
  )
  # All nodes have room: texts of few tokens repeat themselves.
  outer = dataclasses.replace(tiny_drafters.TREE, capacity=96)
  return specdec.staged(outer.drafter(scorer), inner)


def _check_tree(tree, likely):
  """The children of every node that the head scored are its most likely."""
  checked = 0
  for node in range(int(tree.size)):
    children = np.flatnonzero(tree.parent == node)
    if not np.any(tree.origin[children] == 1):
      continue
    path, above = [], node
    while above > 0:
      path.append(int(tree.token[above]))
      above = int(tree.parent[above])
    assert {*likely(path[::-1])} <= {*tree.token[children].tolist()}
    checked += 1
  return checked


def _likely(slow, text, states, path):
  """The most likely of the possible tokens."""
  logits = slow.after(text, states, path)[: len(_POSSIBLE)]
  return _POSSIBLE[np.argsort(-logits)[:_BRANCHING]].tolist()


def _recorded(decoding, prompts):
  """Texts after two turns; rows, ends of texts and trees of all steps."""
  texts = lambda: [
    prompt + new
    for prompt, new in zip(prompts, decoding.result().tokens, strict=True)
  ]
  recorded = []
  for step in range(8):
    if step == 5:  # Every row goes on a few tokens later.
      prompts = [text + [8, 2] for text in texts()]
      decoding.extend(prompts, max_new_tokens=5)
    fallback = decoding._state.fallback
    speculating = jnp.array(step not in (1, 2))
    decoding._state = decoding._state.replace(
      fallback=fallback.replace(speculating=speculating)
    )
    active = np.asarray(decoding._reasons) == 0
    record = decoding.step_recorded()
    trees = jax.device_get(record.record.tree)
    for row in np.flatnonzero(active & (step not in (1, 2))):
      tree = jax.tree.map(lambda array, row=row: array[row], trees)
      recorded.append((row, record.starts[row], tree))
  return texts(), recorded


@pytest.mark.parametrize('kind', ['fixed', 'staged'])
def test_trees_of_every_step_with_plain_steps_and_turns(kind):
  """A slow head that reads all of the text drafts the same trees.

  It does not matter how the text before a step was decoded or given.
  """
  values = tiny_heads.tensors('eagle3', reduced=True)
  with tempfile.TemporaryDirectory() as folder:
    drafter = _drafter(pathlib.Path(folder), kind, values)
  others = {*range(tiny.VOCAB_SIZE)} - {*_POSSIBLE.tolist()}
  bias = dict.fromkeys(others, -np.inf)
  target, rng = tiny_heads.target(), np.random.default_rng(10)
  prompts = [rng.integers(tiny.TABOO, size=size).tolist() for size in (7, 1, 3)]
  decoding = specdec.Decoding(
    target,
    jax.random.key(0),
    prompts,
    max_new_tokens=9,
    room_for_new_tokens=20,
    drafter=drafter,
    sampling=specdec.Sampling(temperature=0.0, logit_bias=bias),
    break_even=0.01,
  )
  texts, recorded = _recorded(decoding, prompts)
  _, hidden = by_heart.hidden(
    np.array([[*text, *[0] * 40][:40] for text in texts])
  )
  states = np.stack([hidden[layer][:, 0] for layer in tiny_heads.READS], 2)
  shape = {'heads': tiny_heads.HEADS, 'head_width': tiny_heads.HEAD_WIDTH}
  slow = [slow_head.SlowHead(values, **shape) for _ in texts]
  checked = 0
  for row, end, tree in recorded:
    read = slow[row], texts[row][:end], states[row]
    checked += _check_tree(tree, functools.partial(_likely, *read))
  assert checked > 25
  stats = decoding.result().stats  # These are of the second turn.
  assert stats.plain_steps == 0
  assert stats.block_efficiency > 1.2
  # A smaller tree may follow a larger one, whose path is longer.
  ctx = jax.eval_shape(
    functools.partial(step_lib.step_context, config=decoding._config),
    target,
    specdec.PLAIN,
    decoding._request,
    decoding._state,
  )
  longest = decoding._drafter.max_depth + 1
  assert {array.shape[2] for array in ctx.hidden.states.values()} == {longest}


def test_an_overfitted_head_drafts_its_text(tmp_path):
  """Alone, and in slots whose rows come and go."""
  config = eagle.HeadConfig(
    vocab_size=tiny.VOCAB_SIZE,
    num_positions=tiny.MAX_POSITIONS,
    width=tiny_heads.WIDTH,
    num_layers=1,
    inner_width=128,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    target_width=tiny_heads.WIDTH,
    reads=tiny_heads.READS,
  )
  heads.save(by_heart.fitted_head(config), tmp_path)
  texts, target = by_heart.texts(), tiny_heads.target()
  drafter = specdec.fixed_drafter(
    head_lib.HeadScorer(tiny_heads.load(tmp_path)),
    topology_lib.chain(by_heart.DEPTHS),
  )
  prompts = texts[:, : by_heart.PROMPT].tolist()
  result = by_heart.generate(drafter, prompts)
  assert result.tokens == texts[:, by_heart.PROMPT :].tolist()
  assert (by_heart.by_position(result.stats.accepted_histogram) >= 0.95).all()
  slots = specdec.Slots(
    target, num_slots=2, context=texts.shape[1], drafter=drafter
  )
  insert = {'rng_key': jax.random.key(1), 'max_new_tokens': by_heart.NEW}
  jobs = [{'prompt': prompt} | insert for prompt in prompts]
  generations, _ = tiny.in_slots(slots, jobs)
  assert [one.tokens[0] for one in generations] == result.tokens
  histograms = [one.stats.accepted_histogram for one in generations]
  assert np.sum(histograms, 0).tolist() == result.stats.accepted_histogram


def test_a_target_whose_states_are_not_kept_is_refused():
  scorer = head_lib.HeadScorer(tiny_heads.random_head())
  drafter = specdec.fixed_drafter(scorer, topology_lib.chain(1))
  with pytest.raises(ValueError, match=r'reads the hidden states \(0, 1, 2\)'):
    specdec.generate(
      tiny.gpt2(),
      jax.random.key(0),
      [[1]],
      max_new_tokens=1,
      drafter=drafter,
    )
