"""The cost model against enumeration, hand-counted and published figures."""

import dataclasses
import functools
import itertools
import pathlib
import re

import numpy as np
import pytest

from specdec.models.lab import cost_model
from specdec.tree import topology as topology_lib

_PAGE = pathlib.Path(__file__).parents[4] / 'docs' / 'cost_model.md'

# 4 query heads and 2 KV heads of width 3; SwiGLU of width 10.
_SIZES = {'num_layers': 2, 'width': 8, 'mlp_width': 10, 'vocab_size': 50}
_HEADS = {'num_heads': 4, 'num_kv_heads': 2, 'head_width': 3}
_SMALL = cost_model.ModelShape(name='small', **_SIZES, **_HEADS)
_small = functools.partial(dataclasses.replace, _SMALL)
_ATTENTION = 8 * 12 + 2 * (8 * 6) + 12 * 8
_HEAD = 8 * 50
_MACHINE = cost_model.Hardware(
  name='machine', bytes_per_second=100.0, flops_per_second={'bfloat16': 1e3}
)


# Millions of parameters, bytes of a token in the cache, and billions of active
# parameters. One is published to two digits.
_PUBLISHED = {
  'llama-2-70b': (68_977, 327_680),
  'tinyllama-1.1b': (1_100, 22_528),
  'llama-3-8b': (8_030, 131_072),
  'llama-3-70b': (70_554, 327_680),
  'mixtral-8x7b': (46_703, 131_072, 12.9),
  'qwen3-30b-a3b': (30_500, 98_304, 3.3),
}


@pytest.mark.parametrize('name', cost_model.MODELS)
def test_presets_have_the_published_sizes(name):
  shape = cost_model.MODELS[name]
  millions, kv_bytes, *billions = _PUBLISHED[name]
  coarse = name == 'qwen3-30b-a3b'
  near = functools.partial(pytest.approx, rel=0.02 if coarse else 0.01)
  assert shape.parameters / 1e6 == near(millions)
  assert shape.kv_bytes_per_token == kv_bytes
  assert bool(billions) == (shape.num_experts > 1)
  if billions:
    active = shape.active_parameters
    assert (active + shape.vocab_size * shape.width) / 1e9 == near(*billions)
    dense = shape.dense_baseline()
    assert dense.num_experts == 1
    assert dense.active_parameters == pytest.approx(active, rel=0.005)


def test_forward_cost_by_hand():
  shape = _small(weight_bytes=0.5, cache_bytes=1, activation_bytes=4)
  cost = cost_model.forward_cost(shape, batch_size=3, num_tokens=5, context=7)
  weights = 2 * (_ATTENTION + 3 * 8 * 10) + _HEAD
  assert shape.parameters == weights + 50 * 8
  # Inputs and outputs of the seven matrices of a layer, and of the head.
  sides = 2 * (20 + 14 + 14 + 20 + 18 + 18 + 18) + 58
  assert cost == cost_model.ForwardCost(
    matmul_flops=2 * 15 * weights,
    # 15 queries see 12 tokens in 4 heads of 3: scores, values.
    attention_flops=2 * (15 * 12 * 4 * 3 * 2 * 2),
    weight_bytes=0.5 * weights,
    cache_read_bytes=3 * 7 * 2 * (2 * 2 * 3),
    cache_write_bytes=15 * 2 * (2 * 2 * 3),
    activation_bytes=15 * sides * 4,
    # Embeddings, outputs of attention and MLP of two layers, 8 wide; logits.
    reductions=5,
    reduced_bytes=5 * 15 * 8 * 4,
    gathered_bytes=15 * 50 * 4,
    dtype='bfloat16',
  )
  parts = dataclasses.astuple(cost)
  assert cost.num_bytes == sum(parts[2:6])


def _mean_tokens(shape, acceptance):
  """The mean of emitted tokens over all texts of the target, by enumeration."""
  known = set(shape.paths)
  outcomes = [*enumerate(acceptance), (None, 1 - sum(acceptance))]
  mean = 0.0
  for text in itertools.product(outcomes, repeat=shape.max_depth):
    path = ()
    for rank, _ in text:
      if (*path, rank) not in known:
        break
      path = (*path, rank)
    mean += np.prod([chance for _, chance in text]) * (len(path) + 1)
  return mean


def test_expected_tokens_by_enumeration():
  acceptance = [0.5, 0.2, 0.1]
  ragged = [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [2, 0]]
  for shape in (
    topology_lib.chain(1),
    topology_lib.chain(5),
    topology_lib.k_ary(2, 3),
    topology_lib.from_paths(ragged),
  ):
    step = cost_model.tree_step(shape, acceptance)
    assert step.tokens == pytest.approx(_mean_tokens(shape, acceptance))
    assert step.num_nodes == shape.num_nodes
    assert step.draft_forwards == shape.max_depth
    # The draft scores every node that has children.
    parents = {path[:-1] for path in shape.paths}
    assert step.draft_width * shape.max_depth == pytest.approx(len(parents))


def test_the_page_has_the_figures_that_its_examples_print(capsys):
  page, scope = _PAGE.read_text('utf-8'), {}
  for example in re.findall(r'```python\n(.*?)```', page, re.DOTALL):
    exec(example, scope)
  figures = capsys.readouterr().out.split()
  assert len(figures) > 12
  prose = re.sub(r'```.*?```', '', page, flags=re.DOTALL)
  missing = {*figures} - {*re.findall(r'\d+(?:\.\d+)?', prose)}
  assert not missing, f'{_PAGE} lacks {sorted(missing)}'


def test_bad_input_is_refused():
  int4 = cost_model.forward_cost(_small(dtype='int4'))
  one = topology_lib.chain(1)
  for message, call in {
    'must be between 1 and num_exp': lambda: _small(experts_per_token=5),
    'must be a multiple of num_kv_heads=2': lambda: _small(num_heads=5),
    'got 1, 0 and 0': lambda: cost_model.forward_cost(_SMALL, num_tokens=0),
    "'int4' has no peak rate on machine": lambda: int4.seconds(_MACHINE),
    'devices must be at least 1, got 0': lambda: _MACHINE.times(0),
    'acceptance has 1 ranks, but the tree has 2': (
      lambda: cost_model.tree_step(topology_lib.k_ary(2, 1), [0.5])
    ),
    'together at most 1': lambda: cost_model.tree_step(one, [1.2]),
    'got .nan': lambda: cost_model.tree_step(one, [float('nan')]),
  }.items():
    with pytest.raises(ValueError, match=message):
      call()
