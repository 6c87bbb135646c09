"""MTP layers that targets bring along: their formulas, files and acceptance."""

import functools
import json
import pathlib
import tempfile

import by_heart
import gguf
import gguf_files
import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
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

_SOME = ('qwen_0', 'qwen_5', 'mimo_5', 'gemma_0', 'gemma_5')
_SHAPES = [
  pytest.param(
    *name.split('_'), marks=[] if name in _SOME else [pytest.mark.long]
  )
  for name in variants.OWN_HEADS
]


def load(name, head=None, *, hidden=(), **options):
  """A target and its head, by default from the same folder or file.

  `hidden` are further states of the target that are kept.
  """
  checkpoint = hub.locate(name)
  stored = heads.locate(head or name, checkpoint.config)
  module = hub.read_module(checkpoint, **options)
  target = adapter.as_model(module, hidden=(*stored.config.reads, *hidden))
  return target, heads.load(stored, target, **options)


def _assistant(parent, number, **options):
  """A Gemma 4 and its assistant."""
  described = variants.FAMILIES[f'gemma4_{number}']
  target = variants.write(described, parent / 'target')
  described = variants.OWN_HEADS[f'gemma_{number}']
  return load(target, variants.write(described, parent / 'head'), **options)


def check_logits(family, number):
  """The logits of a folder are equal to the logits in the golden file."""
  name, text = f'{family}_{number}', variants.LONG
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    if family == 'gemma':
      target, head = _assistant(folder, number)
    else:
      target, head = load(
        variants.write(variants.OWN_HEADS[name], folder / 'model')
      )
  _, of_layers = by_heart.hidden(text[None], target)
  drafted, logits = tiny_heads.drafted(
    head, text, of_layers, depths=variants.DEPTHS
  )
  of_words = np.asarray(logits)[1:, variants.SOME_WORDS]
  with np.load(variants.OWN_HEAD_RESULTS) as golden:
    np.testing.assert_array_equal(drafted, golden[f'{name}_drafted'])
    np.testing.assert_allclose(of_words, golden[name], atol=2e-4, rtol=0)


@pytest.mark.parametrize(('family', 'number'), _SHAPES)
def test_logits_are_those_of_programs_in_torch(family, number):
  check_logits(family, number)


# A layer that knows some texts by heart. Some coordinates are much larger after
# the final norm than before it.
_SCALE = np.exp(np.random.RandomState(0).standard_normal(32))
_BEFORE_NORM = 4  # The state that the final norm reads.
_OF_FOLDER = {'enorm': 'pre_fc_norm_embedding', 'hnorm': 'pre_fc_norm_hidden'}


def _write(folder, **changed):
  described = variants.OWN_HEADS['qwen_3']
  changed |= {
    name: None for name in described['tensors'] if name.endswith('proj.bias')
  }
  changed['model.norm.weight'] = np.float32(_SCALE - 1)
  keys = {'attention_bias': False}
  return variants.write(described, folder, keys=keys, **changed)


@functools.cache
def _learned():
  """A folder whose MTP layer knows texts of its target, the texts, states."""
  parent = pathlib.Path(tempfile.mkdtemp())
  folder = _write(parent / 'drawn')
  target, head = load(folder, hidden=(_BEFORE_NORM,))
  texts = by_heart.written(target, variants.VOCAB_SIZE)
  matrices = head.params['embedding'], head.params['lm_head']
  learned = by_heart.fitted_head(
    heads.own(hub.locate(folder)).config,
    norm=np.float32(_SCALE),
    target=(target, texts, *matrices),
  )
  stored = {}
  for path, leaf in hub.flat_params(learned)[1].items():
    first, _, rest = families.parameter_name(path).partition('.')
    name = f'mtp.{_OF_FOLDER.get(first, first)}.{rest}'
    # It has the scales of norms minus one.
    stored[name] = np.asarray(leaf) - np.float32('norm' in name)
  folder = _write(parent / 'learned', **stored)
  return folder, texts, by_heart.hidden(texts, target)[1]


@functools.cache
def _file(kind):
  """A GGUF file of the same target, and of the MTP layer in a type."""
  folder, *_ = _learned()
  module = hub.load_module(folder)
  layers = module.config.num_layers

  def add(tensors):
    for name, tensor in heads.own(hub.locate(folder)).tensors():
      array = np.concatenate([rows for _, rows in tensor.row_batches()])
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


@pytest.mark.parametrize(
  'topology',
  [
    topology_lib.chain(by_heart.DEPTHS),
    topology_lib.k_ary(2, by_heart.DEPTHS),
  ],
)
def test_an_overfitted_layer_drafts_its_text(topology):
  folder, texts, _ = _learned()
  target, head = load(folder, hidden=(_BEFORE_NORM,))
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


def test_a_file_and_the_folder_of_a_model_that_sees_have_the_same_layer(
  tmp_path,
):
  folder = _learned()[0]
  described = json.loads((folder / 'config.json').read_text())
  tensors = safetensors_numpy.load_file(folder / 'model.safetensors')
  variants.save(
    tmp_path,
    {'model_type': 'qwen3_5', 'text_config': described},
    {
      name.replace('model.', 'model.language_model.'): tensors[name]
      for name in tensors
    },
  )
  expected, *others = (
    [tiny.parameters(hub.load_module(name)), load(name)[1].params]
    for name in (folder, _file('F32'), tmp_path)
  )
  for parameters in others:
    jax.tree.map(np.testing.assert_array_equal, parameters, expected)


def _opened(name, **options):
  """The kind of head that a choice of a target opens, None without one."""
  choice = choice_lib.ModelChoice(str(name), **options)
  head = sources_lib.open_sources(choice).head
  return None if head is None else head.name


def test_what_has_no_such_layer_says_what_it_has(tmp_path):
  described = variants.OWN_HEADS['qwen_0']
  write = lambda name, **changed: variants.write(
    described, tmp_path / name, **changed
  )
  removed = {name: None for name in described['tensors'] if 'mtp.' in name}
  bare = write('bare', **removed)
  for name in (bare, 'demo'):
    said = r'has \d+ layers of the family .* no MTP layer .*, so head=own'
    with pytest.raises(ValueError, match=said):
      _opened(name, head='own')
  assert _opened(bare) is None
  # A layer that lacks a tensor, and two layers.
  for folder, message in (
    (write('a', **{'mtp.norm.weight': None}), 'lacks 1 ten.* first is norm'),
    (
      write('b', **{'mtp.layers.1.a.weight': np.float32([1])}),
      'has 2 MTP layers',
    ),
  ):
    with pytest.raises(ValueError, match=f'^{folder}.*{message}'):
      load(folder)


def test_a_model_drafts_by_its_own_layer_unless_told_otherwise(tmp_path):
  folder = variants.write(variants.OWN_HEADS['mimo_0'], tmp_path / 'a')
  hub.save_in_four_bits(str(folder), tmp_path / 'b')
  for name, options, kind in (
    (folder, {}, 'MTP layer'),
    (folder, {'head': 'own'}, 'MTP layer'),
    (folder, {'head': str(folder)}, 'MTP layer'),
    (folder, {'head': None}, None),
    (folder, {'draft': str(folder)}, None),
    ('demo', {}, None),
    (tmp_path / 'b', {}, None),
    (tmp_path / 'b', {'head': str(folder)}, 'MTP layer'),
  ):
    assert _opened(name, **options) == kind


def test_an_assistant_changes_no_token(tmp_path):
  """In trees, of texts of different lengths, also beyond a window."""
  target, head = _assistant(tmp_path, 4, packed=build.is_available())
  drafter = specdec.fixed_drafter(
    head_lib.HeadScorer(head), topology_lib.k_ary(2, 2)
  )
  prompts = [variants.LONG[:size].tolist() for size in (1, 7, 12)]
  plain, drafted = (
    by_heart.generate(each_drafter, prompts, target)
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
  target = variants.write(variants.FAMILIES['gemma4_4'], tmp_path / 'target')
  described = variants.OWN_HEADS[f'gemma_{number}']
  folder = variants.write(described, tmp_path / 'head', keys=changed)
  with pytest.raises(ValueError, match=f'^{folder}: {message}'):
    heads.locate(folder, hub.locate(target).config)
