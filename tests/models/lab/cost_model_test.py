"""The cost model against enumeration, hand-counted and published figures."""

import dataclasses
import functools
import itertools
import pathlib
import re

import numpy as np
import pytest

from specdec.models.lab import cost_model
from specdec.models.nn import llama as nn_llama
from specdec.tree import topology as topology_lib

_PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'cost_model.md'

# 4 query heads and 2 KV heads of width 4; SwiGLU of width 10.
_SMALL = nn_llama.LlamaConfig(
  vocab_size=50,
  num_positions=64,
  width=8,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_width=4,
  inner_width=10,
)
_MACHINE = cost_model.Hardware(bytes_per_second=100.0, flops_per_second=1e3)

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
def test_models_have_the_published_sizes(name):
  config = cost_model.MODELS[name]
  millions, kv_bytes, *billions = _PUBLISHED[name]
  near = functools.partial(
    pytest.approx, rel=0.02 if name == 'qwen3-30b-a3b' else 0.01
  )
  every = cost_model.forward_cost(config, batch_size=100_000)  # All experts.
  embedding = config.vocab_size * config.width
  assert (every.weight_bytes / 2 + embedding) / 1e6 == near(millions)
  read = [
    cost_model.forward_cost(config, context=n).cache_bytes for n in (0, 1)
  ]
  assert read[1] - read[0] == kv_bytes
  assert bool(billions) == (config.num_experts > 1)
  if billions:
    cost = cost_model.forward_cost(config)
    assert (cost.matmul_flops / 2 + embedding) / 1e9 == near(*billions)
    dense = cost_model.forward_cost(cost_model.dense_baseline(config))
    assert dense.matmul_flops == pytest.approx(cost.matmul_flops, rel=0.005)


def test_forward_cost_by_hand():
  cost = cost_model.forward_cost(_SMALL, batch_size=3, num_tokens=5, context=7)
  attention = 8 * 16 + 2 * (8 * 8) + 16 * 8
  weights = 2 * (attention + 3 * 8 * 10) + 8 * 50
  # Inputs and outputs of the seven matrices of a layer, and of the head.
  sides = 2 * (24 + 16 + 16 + 24 + 18 + 18 + 18) + 58
  assert cost == cost_model.ForwardCost(
    matmul_flops=2 * 15 * weights,
    # 15 queries see 12 tokens in 4 heads of 4: scores, values.
    attention_flops=2 * (15 * 12 * 4 * 4 * 2 * 2),
    weight_bytes=2 * weights,
    cache_bytes=(3 * 7 + 15) * 2 * (2 * 2 * 4 * 2),
    activation_bytes=15 * sides * 2,
    # Embeddings, outputs of attention and MLP of two layers, 8 wide; logits.
    reductions=5,
    reduced_bytes=5 * 15 * 8 * 4,
    gathered_bytes=15 * 50 * 4,
  )
  assert cost.num_bytes == 2 * weights + cost.cache_bytes + 30 * sides
  # Products wait for arithmetic, attention does, too: 10 FLOP per byte.
  bound = [cost.num_bytes - cost.cache_bytes, cost.cache_bytes]
  assert cost.seconds(_MACHINE) == pytest.approx(
    max(bound[0] / 100, cost.matmul_flops / 1e3)
    + max(bound[1] / 100, cost.attention_flops / 1e3)
  )
  linked = dataclasses.replace(
    _MACHINE, link_bytes_per_second=10.0, collective_seconds=1.0, devices=2
  )
  exchanged = 2 * 0.05 * cost.reduced_bytes + 0.05 * cost.gathered_bytes
  assert cost.seconds(linked) == pytest.approx(
    cost.seconds(_MACHINE) / 2 + exchanged
  )


def _speculation(shape, acceptance, **changes):
  models = {'target': _SMALL, 'draft': _SMALL, 'hardware': _MACHINE} | changes
  return cost_model.Speculation(topology=shape, acceptance=acceptance, **models)


def _mean_tokens(shape, acceptance):
  """The mean of emitted tokens over all texts of the target, by enumeration."""
  paths = set(shape.paths)
  outcomes = [*enumerate(acceptance), (None, 1 - sum(acceptance))]
  mean = 0.0
  for text in itertools.product(outcomes, repeat=shape.max_depth):
    path = ()
    for rank, _ in text:
      if (*path, rank) not in paths:
        break
      path = (*path, rank)
    mean += np.prod([chance for _, chance in text]) * (len(path) + 1)
  return mean


def test_expected_tokens_and_seconds_of_a_step():
  acceptance = [0.5, 0.2, 0.1]
  ragged = [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [2, 0]]
  for shape in (
    topology_lib.chain(1),
    topology_lib.chain(5),
    topology_lib.k_ary(2, 3),
    topology_lib.Topology(ragged),
  ):
    step = _speculation(shape, acceptance)
    assert step.tokens == pytest.approx(_mean_tokens(shape, acceptance))
    # The draft scores every node that has children.
    parents = {path[:-1] for path in shape.paths}
    assert step.draft_width * shape.max_depth == pytest.approx(len(parents))
    cost = functools.partial(cost_model.forward_cost, _SMALL, context=9)
    verify = cost(num_tokens=shape.num_nodes).seconds(_MACHINE)
    draft = cost(num_tokens=step.draft_width).seconds(_MACHINE)
    seconds = verify + shape.max_depth * draft
    assert step.seconds(context=9) == pytest.approx(seconds)
    free = dataclasses.replace(step, draft=None)
    assert free.seconds(context=9) == verify
    plain = cost().seconds(_MACHINE)
    assert free.speedup(context=9) == pytest.approx(
      step.tokens * plain / verify
    )


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
  uneven = dataclasses.replace(_SMALL, inner_width=(10, 12))
  chain = topology_lib.chain(1)
  for message, call in {
    'layers of one shape': lambda: cost_model.forward_cost(uneven),
    'got 1, 0 and 0': lambda: cost_model.forward_cost(_SMALL, num_tokens=0),
    'devices must be at least 1, got 0': lambda: _MACHINE.times(0),
    'acceptance has 1 ranks, but the tree has 2': (
      lambda: _speculation(topology_lib.k_ary(2, 1), [0.5])
    ),
    'together at most 1': lambda: _speculation(chain, [1.2]),
    'got .nan': lambda: _speculation(chain, [float('nan')]),
  }.items():
    with pytest.raises(ValueError, match=message):
      call()
