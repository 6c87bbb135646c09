"""The cost model against enumeration, hand-counted and published figures."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re

import command_lines
import jax
import numpy as np
import pytest
import tiny

from models.lab import cost_model
from models.lab.bench import machine
from models.lab.cost_model import drafting_head
from models.lab.cost_model import model_shape
from models.nn import adapter
from models.nn import llama as nn_llama
from models.nn import mixtral as mixtral_lib
from specdec.tree import topology as topology_lib

_ROOT = pathlib.Path(__file__).parents[4]

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
# parameters. Two are published to two digits.
_PUBLISHED = {
  **{'gpt2': (124.4, 36_864), 'gpt2-medium': (354.8, 98_304)},
  **{'gpt2-large': (774.0, 184_320), 'gpt2-xl': (1557.6, 307_200)},
  **{'draft-40m': (40, 18_432), 'tinyllama-1.1b': (1_100, 22_528)},
  **{'llama-2-70b': (68_977, 327_680), 'llama-3-8b': (8_030, 131_072)},
  **{'llama-3-70b': (70_554, 327_680), 'llama-3-405b': (405_853, 516_096)},
  'mixtral-8x7b': (46_703, 131_072, 12.9),
  'mixtral-8x22b': (141_000, 229_376, 39),
  'qwen3-30b-a3b': (30_500, 98_304, 3.3),
}


@pytest.mark.parametrize('name', cost_model.MODELS)
def test_presets_have_the_published_sizes(name):
  shape = cost_model.MODELS[name]
  millions, kv_bytes, *billions = _PUBLISHED[name]
  coarse = name in ('draft-40m', 'qwen3-30b-a3b')
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


def test_shapes_of_configs():
  """Counts are those of real models, and of the presets of these names."""
  for tied in (True, False):
    module = tiny.module(
      width=16, num_layers=2, vocab_size=40, tie_embeddings=tied
    )
    size = machine.model_size(adapter.as_model(module))
    shape = model_shape.model_shape(module.config, name='tiny')
    assert shape.active_parameters == size.parameters
    assert shape.kv_bytes_per_token == 2 * size.cache_per_slot
  sizes = {'num_positions': 4096, 'width': 4096, 'num_layers': 32}
  sizes |= {'num_heads': 32, 'num_kv_heads': 8, 'head_width': 128}
  sizes |= {'inner_width': 14336}
  experts = {'num_experts': 8, 'experts_per_token': 2}
  for name, config in (
    ('llama-3-8b', nn_llama.LlamaConfig(**sizes, vocab_size=128256)),
    (
      'mixtral-8x7b',
      mixtral_lib.MixtralConfig(**sizes, **experts, vocab_size=32000),
    ),
  ):
    found = model_shape.model_shape(config, name=name)
    assert found == cost_model.MODELS[name]


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
  assert cost.flops == sum(parts[:2])
  assert cost.num_bytes == sum(parts[2:6])
  assert cost.read_bytes == cost.weight_bytes + cost.cache_read_bytes


def test_every_kernel_has_its_own_roofline():
  cost = cost_model.forward_cost(_SMALL, batch_size=2, context=1000)
  cache_bytes = cost.cache_read_bytes + cost.cache_write_bytes
  work = (
    ((cost.num_bytes - cache_bytes) / 100, cost.matmul_flops / 1e3),
    (cache_bytes / 100, cost.attention_flops / 1e3),
  )
  assert cost.seconds(_MACHINE) == pytest.approx(sum(map(max, work)))
  together = cost.seconds(_MACHINE, overlap=False)
  assert together == pytest.approx(sum(map(sum, work)))
  four = _MACHINE.times(4)
  assert cost.seconds(four) == pytest.approx(cost.seconds(_MACHINE) / 4)


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
    *(topology_lib.chain(1), topology_lib.chain(5), topology_lib.k_ary(2, 3)),
    topology_lib.from_paths(ragged),
  ):
    step = cost_model.tree_step(shape, acceptance)
    assert step.tokens == pytest.approx(_mean_tokens(shape, acceptance))
    assert step.num_nodes == shape.num_nodes
    assert step.draft_forwards == shape.max_depth
    # The draft scores every node that has children.
    parents = {path[:-1] for path in shape.paths}
    assert step.draft_width * shape.max_depth == pytest.approx(len(parents))


def test_the_script_prints_every_claim_as_it_is_documented(tmp_path):
  """The figures that the documentation cites are those of this version."""
  result = command_lines.run('cost_model.py', f'--out={tmp_path}')
  assert result.code == 0, result.errors
  for part in 'abcdefg':
    assert f'\n## ({part}) ' in result.output
  rows = [re.findall(r'[^| ]+', line) for line in result.output.splitlines()]
  for row in ('131072 all 182.22 568.77 3.12', '1.50 25,001', '131072 - -'):
    assert row.split() in rows
  found, documented = (
    json.loads((folder / 'cost_model.json').read_text())
    for folder in (tmp_path, _ROOT / 'results' / 'cost_model')
  )
  del found['machine'], documented['machine']
  assert jax.tree.structure(found) == jax.tree.structure(documented)
  assert jax.tree.leaves(found) == pytest.approx(jax.tree.leaves(documented))


def test_the_script_takes_folders_and_names(tmp_path):
  target, new = _ROOT / 'models/demo/target', tmp_path / 'new'
  result = command_lines.run(
    *('cost_model.py', f'--target={target}', f'--out={new}'),
    *('--draft=none', '--hardware=rtx-4090', '--devices=2'),
  )
  assert result.code == 0, result.errors
  assert 'target on 2 x rtx-4090' in result.output
  assert (new / 'cost_model.json').exists()
  for flag, message in (
    ('--target=llama-9', ' is neither a folder with'),
    ('--hardware=abacus', ' must be one of this, rtx-4090'),
  ):
    assert flag + message in command_lines.refusal('cost_model.py', flag)


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


def test_a_head_may_be_accepted_less_often_than_a_larger_draft():
  """Qwen2.5 1.5B, where a head of 32,000 tokens has 106 million parameters."""
  qwen = functools.partial(
    cost_model.ModelShape, vocab_size=151_936, num_kv_heads=2, tied=True
  )
  target = qwen(
    **{'name': '1.5b', 'num_layers': 28, 'width': 1536, 'num_heads': 12},
    **{'head_width': 128, 'mlp_width': 8960},
  )
  draft = qwen(
    **{'name': '0.5b', 'num_layers': 24, 'width': 896, 'num_heads': 14},
    **{'head_width': 64, 'mlp_width': 4864},
  )
  head = drafting_head.eagle3(target)
  assert head.active_parameters == pytest.approx(106e6, rel=0.01)
  needed = functools.partial(
    drafting_head.needed_acceptance,
    cost_model.Deployment(
      target=target, draft=draft, hardware=cost_model.HARDWARE['a100']
    ),
  )
  assert needed(draft, 0.7) == pytest.approx(0.7, abs=1e-6)
  assert needed(head, 0.7) == pytest.approx(0.377, abs=1e-3)
  assert needed(head, 0.6) < needed(head, 0.7) < needed(head, 0.8)
  assert needed(target, 0.7) is None
