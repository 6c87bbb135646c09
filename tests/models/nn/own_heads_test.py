"""MTP layers that targets bring along: their formulas, files and acceptance."""

import dataclasses
import functools
import pathlib
import tempfile

import by_heart
import equality_test
from flax import nnx
from flax import traverse_util
import gguf
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import own_heads
import pytest
import tiny
import tiny_heads
import variants

import specdec
from specdec import cache as cache_lib
from specdec.draft import head as head_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import heads
from specdec.models.lab.training import head_trainer
from specdec.models.nn import adapter
from specdec.models.nn import eagle
from specdec.models.nn.cpu import build
from specdec.models.text import choice as choice_lib
from specdec.models.text import sources as sources_lib
from specdec.tree import topology as topology_lib

_long = lambda *values, runs: pytest.param(
  *values, marks=[] if runs else [pytest.mark.long]
)
_SHAPES = [
  _long(family, number, runs=number in (0, 5))
  for family in ('qwen', 'mimo', 'gemma')
  for number in range(own_heads.NUM_SHAPES)
]


def load(name, **options):
  """A target and the head in its folder or file."""
  checkpoint = hub.locate(name)
  stored = heads.own(checkpoint)
  module = hub.read_module(checkpoint, **options)
  target = adapter.as_model(module, hidden=stored.config.reads)
  return target, heads.load(stored, target, **options)


@jax.jit
def _forward(head, tokens, positions, cache, states):
  mask = cache_lib.causal_mask(cache.length, tokens.shape[1], cache.num_slots)
  given, cache = head.forward(tokens, positions, mask, cache, states)
  cache = cache.replace(length=cache.length + tokens.shape[1])
  return head.spec.logits(head.params, given), given, cache


def _drafted(target, head):
  """The tokens that the head drafts after the text, and its logits."""
  text, slots = jnp.array(own_heads.TEXT)[None], own_heads.TEXT.size + 3
  cache = jax.jit(lambda: target.spec.init_cache(1, text.size))()
  _, cache = jax.jit(lambda cache: target.causal(text, cache))(cache)
  hidden = [cache.hidden[layer][:, 0] for layer in head.spec.reads]
  states = head.spec.fuse(head.params, *hidden)[:, :-1]
  cache = head.spec.init_cache(1, slots)
  positions = jnp.arange(1, text.size)[None]
  tokens, by_depth, drafted = text[:, 1:], [], []
  # Nothing is seen in the first slot, as in front of a text.
  cache = cache.replace(length=cache.length + 1)
  for _ in range(own_heads.DEPTHS + 1):
    logits, states, cache = _forward(head, tokens, positions, cache, states)
    by_depth.append(np.asarray(logits[0]))
    drafted.append(int(np.argmax(by_depth[-1][-1])))
    tokens, states = jnp.array([drafted[-1:]]), states[:, -1:]
    positions = positions[:, -1:] + 1
  return drafted[:-1], np.concatenate(by_depth)


def _assistant(parent, number, **options):
  """A Gemma 4 and its assistant."""
  described = variants.FAMILIES[f'gemma4_{number}']
  checkpoint = hub.locate(variants.write(described, parent / 'target'))
  folder = own_heads.write_assistant(parent / 'assistant', number)
  stored = heads.locate(folder, checkpoint.config)
  module = hub.read_module(checkpoint, **options)
  target = adapter.as_model(module, hidden=stored.config.reads)
  return target, heads.load(stored, target, **options)


def check_logits(family, number):
  """The logits of a folder are equal to the logits in the golden file."""
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    nested = family == 'qwen' and number % 2 == 1
    if family == 'gemma':
      drafted, logits = _drafted(*_assistant(folder, number))
    else:
      own_heads.write(folder, family, number, nested=nested)
      drafted, logits = _drafted(*load(folder))
  with np.load(own_heads.GOLDEN) as golden:
    name = f'{family}_{number}'
    assert drafted == golden[f'{name}_drafted'].tolist()
    of_words = logits[:, own_heads.WORDS]
    np.testing.assert_allclose(of_words, golden[name], atol=2e-4, rtol=0)


@pytest.mark.parametrize(('family', 'number'), _SHAPES)
def test_logits_are_those_of_programs_in_torch(family, number):
  check_logits(family, number)


# A head that knows some texts by heart.

_DRAFTED = 3


# Some coordinates are much larger after the final norm than before it.
_SCALE = np.exp(np.random.RandomState(0).standard_normal(32))


def _write(folder, **changed):
  keys, norm = {'attention_bias': False}, np.float32(_SCALE - 1)
  changed['model.norm.weight'] = norm
  return own_heads.write(folder, 'qwen', 3, keys=keys, **changed)


@functools.cache
def _learned():
  """The folder of a target, the texts, and an MTP layer trained on these."""
  folder = pathlib.Path(tempfile.mkdtemp())
  target, head = load(_write(folder))
  texts = by_heart.written(target, own_heads.VOCAB)
  config = heads.own(hub.locate(folder)).config
  made = eagle.Head(config, rngs=nnx.Rngs(0))
  made.norm.scale[...] = jnp.float32(_SCALE)
  graph, variables = nnx.split(made)
  function = head_trainer.loss_function(graph, config, _DRAFTED, 'float32')
  params = by_heart.fitted(
    function,
    nnx.to_pure_dict(variables),
    config.reads,
    steps=1200,
    target=(target, texts, head.params['embedding'], head.params['lm_head']),
  )
  learned = {
    families.parameter_name(path): np.asarray(leaf)
    for path, leaf in traverse_util.flatten_dict(params).items()
  }
  stored = {
    own_heads.stored_name(name): array - own_heads.is_norm(name)
    for name, array in learned.items()
  }
  return _write(folder, **stored), texts


@functools.cache
def _file(kind):
  """A GGUF file of the same target, and of the MTP layer in a type."""
  folder, _ = _learned()
  module = hub.load_module(folder)
  layers = module.config.num_layers
  canonical = heads.own(hub.locate(folder))

  def add(tensors):
    for name, tensor in canonical.tensors():
      array = np.concatenate([rows for _, rows in tensor.blocks()])
      in_blocks = array.ndim > 1 and array.shape[-1] % 32 == 0
      type_ = gguf_files.Kind[kind if in_blocks else 'F32']
      stored = gguf_files.nextn_name(name, 'qwen35', layers)
      tensors |= {stored: (gguf.quantize(array, type_), type_)}
    return tensors

  path = folder / f'{kind}.gguf'
  keys = {'block_count': layers + 1, 'nextn_predict_layers': 1}
  keys['full_attention_interval'] = 3
  gguf_files.write(path, module, 'qwen35', keys=keys, change=add)
  return path


def _accepted(target, head, kind='chain'):
  """How much of the texts is accepted at each depth; checks the tokens."""
  _, texts = _learned()
  topology = topology_lib.chain(_DRAFTED)
  if kind == 'tree':
    topology = topology_lib.k_ary(2, _DRAFTED)
  drafter = specdec.fixed_drafter(head_lib.HeadScorer(head), topology)
  prompts = texts[:, : by_heart.PROMPT].tolist()
  result = by_heart.generate(drafter, prompts, target)
  assert result.tokens == texts[:, by_heart.PROMPT :].tolist()
  return by_heart.by_position(result.stats.accepted_histogram)


@pytest.mark.parametrize('kind', ['chain', 'tree'])
def test_an_overfitted_layer_drafts_its_text(kind):
  assert min(_accepted(*load(_learned()[0]), kind)) >= 0.95


@pytest.mark.parametrize('form', ['int8', 'int4', 'stored'])
def test_so_does_one_of_few_bits(form):
  """Next to a target in float32, with the kernels for CPU if there are any."""
  folder, _ = _learned()
  target, _ = load(folder)
  name = _file('Q8_0') if form == 'stored' else folder
  stored = heads.locate(name, hub.locate(folder).config)
  packed = build.is_available()
  head = heads.load(stored, target, dtype=form, packed=packed)
  assert min(_accepted(target, head)) >= 0.95


def test_states_before_a_norm_cost_acceptance():
  """The states of the target, and the layer's own states that it reads."""
  folder, _ = _learned()
  target, head = load(folder)
  layers = hub.locate(folder).config.num_layers
  module = hub.load_module(folder)
  other = adapter.as_model(module, hidden=(layers,))
  spec = dataclasses.replace(head.spec, reads=(layers,))
  assert min(_accepted(other, head.replace(spec=spec))) < 0.8
  # A norm does not see by what a state was divided before.
  scale = head.params['head']['norm']['scale'][None, None]
  ones = jax.tree.map(lambda leaf: leaf, head.params)
  ones['head']['norm']['scale'] = jnp.ones_like(scale[0, 0])
  logits = lambda params, states: head.spec.logits(params, states * scale)
  spec = dataclasses.replace(head.spec, logits=logits)
  accepted = _accepted(target, head.replace(params=ones, spec=spec))
  assert accepted[0] >= 0.95
  assert min(accepted) < 0.9


def test_a_gguf_file_has_the_same_layer():
  folder, path = _learned()[0], _file('F32')
  both = [
    [tiny.parameters(hub.load_module(source))] for source in (folder, path)
  ]
  for name, parameters in zip((folder, path), both, strict=True):
    parameters.append(load(name)[1].params)
  jax.tree.map(np.testing.assert_array_equal, *both)


def test_slots_and_constraints_change_no_token():
  """One row, and rows that come and go, each with its own temperature."""
  folder, texts = _learned()
  target, head = load(folder)
  drafter = specdec.fixed_drafter(
    head_lib.HeadScorer(head), topology_lib.chain(_DRAFTED)
  )
  prompts = texts[:, : by_heart.PROMPT].tolist()
  ended = by_heart.in_slots(drafter, prompts, target)
  tokens = sorted(generation.tokens[0] for generation in ended)
  assert tokens == sorted(texts[:, by_heart.PROMPT :].tolist())
  drafted, plain = (
    specdec.generate(
      target,
      tiny.row_keys(2),
      [[2, 3, 4, 5], [6]],
      max_new_tokens=24,
      sampling=specdec.Sampling(temperature=[0.0, 0.8]),
      constraint=equality_test.Turns(),
      drafter=each_drafter,
    ).tokens
    for each_drafter in (drafter, specdec.PLAIN)
  )
  assert drafted == plain


_NORM = 'mtp.norm.weight'


def test_what_has_no_such_layer_says_what_it_has(tmp_path):
  names = own_heads.tensors(own_heads.config('qwen', 0))
  removed = {name: None for name in names if name.startswith('mtp.')}
  bare = own_heads.write(tmp_path / 'bare', 'qwen', 0, **removed)
  for name in (bare, 'demo'):
    choice = choice_lib.ModelChoice(str(name), head='own')
    said = 'has 4 layers of the family .* no MTP layer .*, so head=own'
    with pytest.raises(ValueError, match=said.replace('4', r'\d+')):
      sources_lib.open_sources(choice)
  assert heads_of(bare) is None
  # A layer of another shape, and one that lacks a tensor.
  lacks = own_heads.write(tmp_path / 'lacks', 'qwen', 0, **{_NORM: None})
  with pytest.raises(ValueError, match='lacks 1 tensors, the first is norm'):
    load(lacks)
  two = {'mtp.layers.1.a.weight': np.ones(1, np.float32)}
  two = own_heads.write(tmp_path / 'two', 'qwen', 0, **two)
  with pytest.raises(ValueError, match=f'^{two}: has 2 MTP layers'):
    load(two)


def heads_of(name, **options):
  """The kind of head that a choice of a target opens, None without one."""
  choice = choice_lib.ModelChoice(str(name), **options)
  head = sources_lib.open_sources(choice).head
  return None if head is None else head.name


def test_a_model_drafts_by_its_own_layer_unless_told_otherwise(tmp_path):
  folder = own_heads.write(tmp_path / 'a', 'mimo', 0)
  assert heads_of(folder) == heads_of(folder, head='own') == 'MTP layer'
  assert heads_of(folder, head=str(folder)) == 'MTP layer'
  assert heads_of(folder, head=None) is None
  assert heads_of(folder, draft=str(folder)) is None
  assert heads_of('demo') is None
  hub.save_in_four_bits(str(folder), tmp_path / 'b')
  assert heads_of(tmp_path / 'b') is None
  assert heads_of(tmp_path / 'b', head=str(folder)) == 'MTP layer'


@pytest.mark.parametrize('packed', [False, True])
def test_an_assistant_changes_no_token(packed, tmp_path):
  """In trees, of texts of different lengths, also beyond a window."""
  packed &= build.is_available()
  target, head = _assistant(tmp_path, 4, packed=packed)
  drafter = specdec.fixed_drafter(
    head_lib.HeadScorer(head), topology_lib.k_ary(2, 2)
  )
  prompts = [own_heads.TEXT[:size].tolist() for size in (1, 7, 12)]
  plain, drafted = (
    specdec.generate(
      target,
      jax.random.key(0),
      prompts,
      max_new_tokens=24,
      drafter=each_drafter,
    )
    for each_drafter in (specdec.PLAIN, drafter)
  )
  assert drafted.tokens == plain.tokens
  assert drafted.stats.target_forwards < plain.stats.target_forwards


@pytest.mark.parametrize(
  ('number', 'changed', 'message'),
  [
    (4, {'backbone_hidden_size': 8}, 'is an assistant .*size=8; the target is'),
    (2, {}, r'has 40 tokens and reads 1 heads of the widths \[.*, 1 and \['),
  ],
)
def test_an_assistant_of_another_target_is_refused(
  number, changed, message, tmp_path
):
  described = variants.FAMILIES['gemma4_4']
  config = hub.locate(variants.write(described, tmp_path / 'a')).config
  folder = own_heads.write_assistant(tmp_path / 'b', number, **changed)
  with pytest.raises(ValueError, match=f'^{folder}: {message}'):
    heads.locate(folder, config)


# EAGLE-3 heads of models that are supported. The keys are the keys of their
# config.json; values were not compared with the originals, and sizes are tiny.
_USUAL = {
  'attention_bias': False,
  'attention_dropout': 0.0,
  'hidden_act': 'silu',
  'initializer_range': 0.02,
  'mlp_bias': False,
  'pretraining_tp': 1,
  'rope_scaling': None,
  'torch_dtype': 'bfloat16',
  'use_cache': True,
}
_REDUCED = {'draft_vocab_size': len(tiny_heads.IDS)}
_ANGEL_SLIM = _USUAL | {
  'architectures': ['LlamaForCausalLMEagle3'],
  'bos_token_id': 151643,
  'eos_token_id': 151645,
  'max_window_layers': 28,
  'rope_theta': 1000000,
  'sliding_window': None,
  'tie_word_embeddings': True,
  'use_sliding_window': False,
  'eagle_config': None,
}
_RED_HAT = _USUAL | {
  'architectures': ['Eagle3DraftModel'],
  'auto_map': {'': 'eagle3.Eagle3SpeculatorConfig'},
  'base_model_ep_plan': None,
  'dtype': 'bfloat16',
  'eagle_aux_hidden_state_layer_ids': None,
  'embed_requires_grad': False,
  'has_no_defaults_at_init': False,
  'norm_before_fc': True,
  'norm_before_residual': True,
  'speculators_config': {'algorithm': 'eagle3'},
  'speculators_version': '0.3.0',
  'target_hidden_size': None,
  'tie_word_embeddings': False,
}
_LLAMA_3_2 = _USUAL | {
  'architectures': ['LlamaForCausalLMEagle3'],
  'rope_theta': 500000.0,
  'rope_scaling': {
    'factor': 32.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'eagle_config': None,
}


@pytest.mark.parametrize(
  ('naming', 'keys', 'theta'),
  [
    ('sglang', _ANGEL_SLIM, 1e6),  # Qwen3 1.7B
    ('speculators', _RED_HAT, 1e4),  # gpt-oss 20b
    ('sglang', _LLAMA_3_2, 5e5),
  ],
)
def test_published_heads_are_read(naming, keys, theta, tmp_path):
  """An own matrix counts more than a claim that it is the embedding."""
  by_fc = keys.get('norm_before_fc', False)
  values = tiny_heads.tensors('eagle3', reduced=True, norm_before_fc=by_fc)
  if naming == 'sglang':
    del values['embed_tokens.weight']
  folder = tiny_heads.write(
    tmp_path, naming, values, reduced=True, keys=keys | _REDUCED
  )
  stored = heads.locate(
    folder, dataclasses.replace(tiny_heads.TARGET, num_layers=32)
  )
  target = tiny_heads.target()
  head = heads.load(stored, target.replace(params=target.params['gpt2']))
  config = stored.config
  assert (config.rope.theta, config.reads) == (theta, (2, 16, 29))
  assert config.norm_before_fc == by_fc
  assert head.params['lm_head'].outputs.shape[0] == len(tiny_heads.IDS)
