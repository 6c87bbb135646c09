"""MTP layers that targets bring along: their formulas, files and acceptance."""

import dataclasses
import functools
import pathlib
import tempfile

import by_heart
import gguf
import gguf_files
import jax
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
from specdec.models.nn import adapter
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


def load(name, *, hidden=(), **options):
  """A target and the head in its folder or file; `hidden`: see `as_model`."""
  checkpoint = hub.locate(name)
  stored = heads.own(checkpoint)
  module = hub.read_module(checkpoint, **options)
  target = adapter.as_model(module, hidden=(*stored.config.reads, *hidden))
  return target, heads.load(stored, target, **options)


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
    if family == 'gemma':
      target, head = _assistant(folder, number)
    else:
      nested = family == 'qwen' and number % 2 == 1
      own_heads.write(folder, family, number, nested=nested)
      target, head = load(folder)
  text, depths = own_heads.TEXT, own_heads.DEPTHS
  _, of_layers = by_heart.hidden(text[None], target)
  drafted, logits = tiny_heads.drafted(head, text, of_layers, depths=depths)
  of_words = np.asarray(logits)[1:, own_heads.WORDS]
  with np.load(own_heads.GOLDEN) as golden:
    name = f'{family}_{number}'
    np.testing.assert_array_equal(drafted, golden[f'{name}_drafted'])
    np.testing.assert_allclose(of_words, golden[name], atol=2e-4, rtol=0)


@pytest.mark.parametrize(('family', 'number'), _SHAPES)
def test_logits_are_those_of_programs_in_torch(family, number):
  check_logits(family, number)


# A layer that knows some texts by heart.

# Some coordinates are much larger after the final norm than before it.
_SCALE = np.exp(np.random.RandomState(0).standard_normal(32))
_BEFORE_NORM = 4  # The state that the final norm reads.


def _write(folder, **changed):
  keys, norm = {'attention_bias': False}, np.float32(_SCALE - 1)
  changed['model.norm.weight'] = norm
  return own_heads.write(folder, 'qwen', 3, keys=keys, **changed)


@functools.cache
def _learned():
  """A folder whose MTP layer knows texts of its target, the texts, states."""
  folder = pathlib.Path(tempfile.mkdtemp())
  target, head = load(_write(folder), hidden=(_BEFORE_NORM,))
  texts = by_heart.written(target, own_heads.VOCAB)
  matrices = head.params['embedding'], head.params['lm_head']
  learned = by_heart.fitted_head(
    heads.own(hub.locate(folder)).config,
    norm=np.float32(_SCALE),
    target=(target, texts, *matrices),
  )
  stored = {}
  for path, leaf in hub.flat_params(learned)[1].items():
    name = own_heads.stored_name(families.parameter_name(path))
    stored[name] = np.asarray(leaf) - np.float32(own_heads.is_norm(name))
  return _write(folder, **stored), texts, by_heart.hidden(texts, target)[1]


@functools.cache
def _file(kind):
  """A GGUF file of the same target, and of the MTP layer in a type."""
  folder, *_ = _learned()
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


@pytest.mark.parametrize('kind', ['chain', 'tree'])
def test_an_overfitted_layer_drafts_its_text(kind):
  folder, texts, _ = _learned()
  target, head = load(folder, hidden=(_BEFORE_NORM,))
  topology = topology_lib.chain(by_heart.DEPTHS)
  if kind == 'tree':
    topology = topology_lib.k_ary(2, by_heart.DEPTHS)
  drafter = specdec.fixed_drafter(head_lib.HeadScorer(head), topology)
  prompts = texts[:, : by_heart.PROMPT].tolist()
  result = by_heart.generate(drafter, prompts, target)
  assert result.tokens == texts[:, by_heart.PROMPT :].tolist()
  assert min(by_heart.by_position(result.stats.accepted_histogram)) >= 0.95


@pytest.mark.parametrize('form', ['int8', 'int4', 'stored'])
def test_few_bits_draft_the_text_too(form):
  """Next to a target in float32, with the kernels for CPU if there are any."""
  folder, texts, of_layers = _learned()
  target, _ = load(folder)
  name = _file('Q8_0') if form == 'stored' else folder
  stored = heads.locate(name, hub.locate(folder).config)
  head = heads.load(stored, target, dtype=form, packed=build.is_available())
  assert min(by_heart.right(head, texts, of_layers)) >= 0.95


def test_states_before_a_norm_cost_acceptance():
  """The states of the target, and the layer's own states that it reads."""
  folder, texts, of_layers = _learned()
  _, head = load(folder)
  assert min(by_heart.right(head, texts, of_layers)) >= 0.95
  before = of_layers | {cache_lib.AFTER_NORM: of_layers[_BEFORE_NORM]}
  assert min(by_heart.right(head, texts, before)) < 0.8
  # A norm does not see by what a state was divided before.
  params = jax.tree.map(np.asarray, head.params)
  scale = params['head']['norm']['scale']
  params['head']['norm']['scale'] = np.ones_like(scale)
  params['lm_head'] = params['lm_head'] * scale
  own = by_heart.right(head.replace(params=params), texts, of_layers)
  assert own[0] >= 0.95
  assert min(own) < 0.9


def test_a_gguf_file_has_the_same_layer():
  folder, path = _learned()[0], _file('F32')
  both = [
    [tiny.parameters(hub.load_module(source))] for source in (folder, path)
  ]
  for name, parameters in zip((folder, path), both, strict=True):
    parameters.append(load(name)[1].params)
  jax.tree.map(np.testing.assert_array_equal, *both)


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


def test_an_assistant_changes_no_token(tmp_path):
  """In trees, of texts of different lengths, also beyond a window."""
  target, head = _assistant(tmp_path, 4, packed=build.is_available())
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
