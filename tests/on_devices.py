"""Tests on eight virtual devices; sharding_test.py runs them in one process."""

import ctypes
import dataclasses
import functools
import pathlib
import re
import tempfile

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import loop
from specdec import memory
from specdec.draft import block as block_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import heads
from specdec.models.lab.bench import exactness
from specdec.models.nn import adapter
from specdec.models.nn import block_drafter
from specdec.models.nn import eagle
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import sharding as sharding_lib
from specdec.tree import topology as topology_lib

_NEW_TOKENS, _MOST_ROWS = 24, 5
_TEMPERATURES = [0.9, 0.0] * _MOST_ROWS
# A margin for scores that rounding may put in another order.
_NEAR_TIE = 1e-3


def _module(family):
  """A module with as many heads as devices, and half as many KV heads.

  The mixture has half of both, and a vocabulary that nothing divides.
  """
  if family == 'gpt2':
    shape = {'num_heads': 8, 'num_layers': 1, 'tie_embeddings': False}
    shape |= {'num_positions': tiny.MAX_POSITIONS}
    made = tiny.module(vocab_size=tiny.VOCAB_SIZE, **shape)
    made.lm_head[...] *= 4
    return made
  if family == 'llama':
    return tiny.llama_module('llama', num_heads=8, num_kv_heads=4)
  if family == 'delta':
    heads = {'num_heads': 8, 'num_kv_heads': 4, 'key_heads': 4}
    return tiny.llama_module('delta', **heads)
  return tiny.llama_module('mixtral', vocab_size=45)


@functools.cache
def _stored(family, kind):
  """The weights of a target, or of a draft that is right now and then."""
  graph, params = hub.flat_params(_module(family))
  rng, noise = np.random.default_rng(1), 0.1 * (kind == 'draft')
  changed = {
    path: leaf * (1 + noise * rng.normal(size=leaf.shape)).astype(leaf.dtype)
    for path, leaf in params.items()
  }
  return tiny.Stored(nnx.merge(graph, traverse_util.unflatten_dict(changed)))


_FILES = tempfile.TemporaryDirectory()


@functools.cache
def _layout(mesh):
  """A layout of rows and parts of a model, such as 2x4, or of one device."""
  sizes = mesh and map(int, mesh.split('x'))
  return sharding_lib.make_layout(
    sizes and dict(zip(sharding_lib.AXES, sizes, strict=True))
  )


@functools.cache
def _load(family, kind, layout, **options):
  module = hub.read_module(_stored(family, kind), layout=layout, **options)
  return adapter.as_model(module, layout)


def _drafter(method, family, layout):
  kind, *_ = method.split()
  if kind == 'staged':  # Every device has the whole draft.
    layout = dataclasses.replace(layout, divides_weights=False)
  lookup = specdec.PromptLookup((0.0, 0.3, 0.6), num_matches=2)
  draft = _load(family, 'draft', layout)
  return tiny_drafters.simple(kind, draft, lookup, length=3)


def _arguments(family, batch_size):
  """Every other row of a batch is greedy."""
  vocab_size = _module(family).config.vocab_size
  prompts = tiny.prompts(batch_size)
  return {
    'rng_key': tiny.row_keys(batch_size),
    'prompts': [[token % vocab_size for token in row] for row in prompts],
    'sampling': tiny.sampling(*_TEMPERATURES[:batch_size]),
  }


@functools.cache
def _decode(mesh, family, batch_size, method):
  layout = _layout(mesh)
  return specdec.generate(
    _load(family, 'target', layout),
    **_arguments(family, batch_size),
    max_new_tokens=_NEW_TOKENS,
    drafter=_drafter(method, family, layout),
    verify=method.split()[-1] if ' ' in method else 'match',
  )


def _assert_alike(tokens, expected, family):
  """Equal, unless the two best scores are nearly equal where they part."""
  rows = _arguments(family, len(tokens))
  for row, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
    if ours == theirs:
      continue
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next(place for place, (token, other) in pairs if token != other)
    margin = exactness.choice_margin(
      _load(family, 'target', sharding_lib.Layout()),
      rows['rng_key'][row],
      [*rows['prompts'][row], *theirs[:at]],
      tiny.sampling(_TEMPERATURES[row]),
    )
    assert margin < _NEAR_TIE, (row, at, margin, ours, theirs)


_long = lambda *case: pytest.param(*case, marks=pytest.mark.long)


# Every family, batch size and drafter, and what divides and what does not.
@pytest.mark.parametrize(
  ('mesh', 'family', 'batch_size', 'method'),
  [
    _long('8x1', 'llama', 4, 'chain match'),
    _long('1x8', 'llama', 1, 'staged match'),
    ('2x4', 'llama', 4, 'staged match'),
    _long('2x4', 'gpt2', _MOST_ROWS, 'chain match'),
    ('2x4', 'mixtral', _MOST_ROWS, 'chain match'),
    _long('4x2', 'gpt2', 4, 'chain block'),
    ('4x2', 'llama', 4, 'staged rejection'),
    ('2x4', 'delta', 4, 'chain match'),
  ],
)
def test_drafted_tokens_are_those_of_plain_decoding_and_of_one_device(
  mesh, family, batch_size, method
):
  rule = method.split()[1]
  drafted = _decode(mesh, family, batch_size, method)
  assert drafted.stats.block_efficiency > 1.2, drafted.stats
  assert len(set(drafted.tokens[0])) > 3, drafted.tokens[0]
  reference = 'plain' if rule == 'match' else method
  # A row does not depend on the others, so the largest batch serves all.
  alone = _decode(None, family, _MOST_ROWS, reference)
  if method == 'staged match':  # The others are near one device.
    plain = _decode(mesh, family, batch_size, 'plain')
    assert drafted.tokens == plain.tokens
  _assert_alike(drafted.tokens, alone.tokens[:batch_size], family)


def _leaves(model):
  leaves, _ = jax.tree_util.tree_flatten_with_path(model.params)
  name = lambda key: str(getattr(key, 'key', key))
  return {tuple(map(name, path)): leaf for path, leaf in leaves}


def _part(array):
  """The shape that every device has, as it really is there."""
  shapes = {shard.data.shape for shard in array.addressable_shards}
  assert len(array.addressable_shards) == 8
  assert len(shapes) == 1, shapes
  return shapes.pop()


# Width 16, 8 heads and 4 KV heads of 8, 24 hidden units, vocabulary of 48.
_PARTS = {
  **dict.fromkeys(('embed_tokens', 'lm_head'), ((12, 16),)),
  **dict.fromkeys(('q_proj', 'o_proj'), ((16, 16),)),
  **dict.fromkeys(('k_proj', 'v_proj'), ((8, 16),)),
  **dict.fromkeys(('gate_proj', 'up_proj'), ((6, 16),)),
  'down_proj': ((16, 6),),
  'q_norm': ((8,),),
  'norm': ((16,),),
}
# Eight devices cannot divide 4 heads, 2 KV heads or a vocabulary of 45. They do
# divide features, and the hidden units of each expert.
_WHOLE = {
  'embed_tokens': ((45, 2),),
  'lm_head': ((45, 2),),
  'k_proj': ((16, 16),),
  'q_proj': ((32, 16),),
  'up_proj': ((3, 16),),
  'gate': ((4, 16),),
}


@pytest.mark.parametrize(
  ('mesh', 'family', 'dtype', 'expected'),
  [
    ('2x4', 'llama', 'float32', _PARTS),
    ('1x8', 'mixtral', 'float32', _WHOLE),
    # Scales go with what they scale, outputs or groups of inputs.
    ('2x4', 'llama', 'int8', {'gate_proj': ((6, 16), (6,))}),
    ('2x4', 'llama', 'int4', {'gate_proj': ((6, 128), (6, 4))}),
    ('2x4', 'llama', 'int4', {'down_proj': ((16, 32), (16, 1))}),
  ],
)
def test_tensors_lie_where_the_table_says(mesh, family, dtype, expected):
  """Parts have the right shapes, and together they are the checkpoint."""
  ours, alone = (
    _leaves(_load(family, 'target', layout, dtype=dtype))
    for layout in (_layout(mesh), sharding_lib.Layout())
  )
  for name, shapes in expected.items():
    parts = [_part(leaf) for path, leaf in ours.items() if name in path]
    assert {*parts} == {*shapes}, name
  for path, leaf in ours.items():
    np.testing.assert_array_equal(leaf, alone[path])


def test_what_was_divided_can_be_saved():
  """The files are the same as for a model on one device."""
  folder = pathlib.Path(_FILES.name)
  for family in ('gpt2', 'llama'):
    stored, files = _stored(family, 'target'), []
    for layout in (_layout('2x4'), sharding_lib.Layout()):
      module = hub.read_module(stored, layout=layout)
      hub.save_pretrained(module, folder)
      files.append((folder / 'model.safetensors').read_bytes())
    assert files[0] == files[1], family


def test_streams_keep_what_they_hold_where_it_was():
  """Caches by rows and heads from step to step, with one program for all.

  Another turn reads what is new, and decodes as if from the beginning.
  """
  decoding = specdec.Decoding(
    _load('llama', 'target', _layout('2x4')),
    **_arguments('llama', 4),
    max_new_tokens=_NEW_TOKENS,
    drafter=_drafter('staged', 'llama', _layout('2x4')),
  )
  compiled = None
  for _ in range(3):
    decoding.step()
    compiled = compiled or loop.advance._cache_size()
    state = decoding._state
    # 4 rows, 4 KV heads of 8; the draft is whole on each device.
    assert _part(state.target.cache.keys[0])[:2] == (2, 1)
    assert _part(state.stages[0].scorer.cache.values[0])[:2] == (2, 4)
    for of_rows in (state.tokens, state.counters.of_rows.wrapped):
      assert _part(of_rows)[0] == 2
  assert loop.advance._cache_size() == compiled
  decoding.run()
  expected = _decode('2x4', 'llama', 4, 'staged match')
  assert decoding.result().tokens == expected.tokens
  arguments = _arguments('llama', 4)
  rows = zip(arguments['prompts'], expected.tokens, strict=True)
  turns = [[*prompt, *new[:-1], 5, 6] for prompt, new in rows]
  decoding.extend(turns, max_new_tokens=8)
  assert min(decoding.num_kept) > 0
  decoding.run()
  arguments |= {'prompts': turns, 'max_new_tokens': 8}
  alone = specdec.generate(
    _load('llama', 'target', sharding_lib.Layout()), **arguments
  )
  assert decoding.result().tokens == alone.tokens


def test_prompts_take_turns_on_several_devices():
  """`Slots` gives rows to other prompts."""
  layout = _layout('2x4')
  slots = specdec.Slots(
    _load('llama', 'target', layout),
    num_slots=2,
    context=80,
    drafter=_drafter('chain', 'llama', layout),
    sampling=specdec.Sampling(
      temperature=0.9, top_k=20, top_p=0.95, min_p=0.01
    ),
  )
  arguments = _arguments('llama', 5)
  expected = _decode(None, 'llama', 5, 'plain')
  results, under_way = {}, {}
  for row in (0, 2, 4):  # Rows that are not greedy.
    if not slots.free:
      ended = slots.advance()
      results |= {under_way.pop(slot): result for slot, result in ended.items()}
    prompt, key = (arguments[name][row] for name in ('prompts', 'rng_key'))
    under_way[slots.insert(prompt, key, max_new_tokens=_NEW_TOKENS)] = row
  while under_way:
    ended = slots.advance()
    results |= {under_way.pop(slot): result for slot, result in ended.items()}
  for row, result in results.items():
    assert result.tokens == [expected.tokens[row]]


def test_a_head_drafts_on_several_devices():
  """Rows of hidden states are divided, and every device has the whole head."""
  layout, reads = _layout('2x4'), (0, 2)
  module = hub.read_module(_stored('llama', 'target'), layout=layout)
  target, config = adapter.as_model(module, layout, reads), module.config
  embedding, lm_head = heads.matrices_of(target, config)
  fields = dataclasses.asdict(config) | {'rope': config.rope, 'num_layers': 1}
  matrices = {
    'embedding': embedding,
    'lm_head': lm_head,
    'layout': dataclasses.replace(layout, divides_weights=False),
  }
  fields |= {'target_width': config.width, 'reads': reads}
  head = eagle.as_head(
    eagle.Head(eagle.HeadConfig(**fields), rngs=nnx.Rngs(0)), **matrices
  )
  block = block_drafter.BlockDrafterConfig(
    **fields, block_size=4, markov='vanilla', markov_rank=4, conv_size=2
  )
  drafter = block_drafter.as_drafter(
    block_drafter.BlockDrafter(block, rngs=nnx.Rngs(0)), **matrices
  )
  for scorer in specdec.HeadScorer(head), block_lib.BlockScorer(drafter):
    drafted = specdec.generate(
      target,
      **_arguments('llama', 4),
      max_new_tokens=_NEW_TOKENS,
      drafter=specdec.fixed_drafter(scorer, topology_lib.k_ary(4, 2)),
    )
    assert drafted.tokens == _decode('2x4', 'llama', 4, 'plain').tokens
    assert drafted.stats.block_efficiency > 1


# Two layers of Llama 3.2 1B.
_LARGE = nn_llama.LlamaConfig(
  vocab_size=128256,
  num_positions=4096,
  width=2048,
  num_layers=2,
  inner_width=8192,
  tie_embeddings=True,
  num_heads=32,
  num_kv_heads=8,
  head_width=64,
)


def _resident(key):
  """A size in `/proc/self/status`, in bytes."""
  status = pathlib.Path('/proc/self/status').read_text('utf-8')
  [size] = re.findall(rf'{key}:\s*(\d+) kB', status)
  return 1024 * int(size)


@pytest.mark.long
def test_the_host_holds_one_tensor():
  """Next to the parts of the devices; on CPU these are in the host's memory."""
  shaped = hub.shape_module(_LARGE, jnp.dtype('bfloat16'))
  graph, shapes = hub.flat_params(shaped)
  drawn = {
    path: np.ones(leaf.shape, leaf.dtype) for path, leaf in shapes.items()
  }
  folder = pathlib.Path(_FILES.name) / 'large'
  module = nnx.merge(graph, traverse_util.unflatten_dict(drawn))
  hub.save_pretrained(module, folder)
  # Memory that is free but resident would not be counted when it is reused.
  ctypes.CDLL(None).malloc_trim(0)
  # VmHWM is set to VmRSS, see `man 5 proc`.
  pathlib.Path('/proc/self/clear_refs').write_text('5')
  before = _resident('VmRSS')
  module = hub.load_module(folder, dtype='bfloat16', layout=_layout('1x8'))
  peak = _resident('VmHWM') - before
  leaves = jax.tree.leaves(hub.flat_params(module)[1])
  held = sum(8 * memory.bytes_on_device(leaf) for leaf in leaves)
  largest = max(leaf.nbytes for leaf in leaves)
  assert peak < held + 1.2 * largest, (peak, held, largest)
