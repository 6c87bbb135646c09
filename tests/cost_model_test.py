"""The cost model against enumeration, hand-counted and published figures."""

import dataclasses
import functools
import itertools
import json
import pathlib
from unittest import mock

import command_lines
import jax
import numpy as np
import pytest
import tiny

from models.bench import machine as machine_limits
from models.checkpoints.model_shape import model_shape
from models.nn.adapter import as_model
from models.nn.llama import LlamaConfig
from models.nn.mixtral import MixtralConfig
from specdec.cost_model import best_tree
from specdec.cost_model import break_even_batch_size
from specdec.cost_model import claims
from specdec.cost_model import Deployment
from specdec.cost_model import forward_cost
from specdec.cost_model import HARDWARE
from specdec.cost_model import Hardware
from specdec.cost_model import MODELS
from specdec.cost_model import ModelShape
from specdec.cost_model import predict
from specdec.cost_model import SpeculativeStep
from specdec.cost_model import tree_step
from specdec.tree import topology

_ROOT = pathlib.Path(__file__).parents[1]
_DEMO = _ROOT / 'models' / 'demo'

# 2 layers of width 8: 4 query heads, 2 KV heads of 3; SwiGLU of 10.
_HEADS = {'num_heads': 4, 'num_kv_heads': 2, 'head_width': 3}
_SMALL = ModelShape(
  name='small', num_layers=2, width=8, mlp_width=10, vocab_size=50, **_HEADS
)
_small = functools.partial(dataclasses.replace, _SMALL)
_MIXTURE = _small(num_experts=4, experts_per_token=2)
_ATTENTION = 8 * 12 + 2 * (8 * 6) + 12 * 8
_HEAD = 8 * 50
_MACHINE = Hardware(
  name='machine', bytes_per_second=100.0, flops_per_second={'bfloat16': 1e3}
)
_SERVER = Deployment(
  target=MODELS['llama-3-70b'],
  draft=MODELS['llama-3-8b'],
  hardware=HARDWARE['h200'].times(8),
)


def _chain(length, acceptance):
  return tree_step(topology.chain(length), [acceptance])


_CHAIN = _chain(4, 0.8)


# Published sizes: millions of parameters, bytes of a token in the cache, and
# billions of active parameters.
_PUBLISHED = {
  'gpt2': (124.4, 36_864, None),
  'gpt2-medium': (354.8, 98_304, None),
  'gpt2-large': (774.0, 184_320, None),
  'gpt2-xl': (1557.6, 307_200, None),
  'draft-40m': (40, 18_432, None),
  'llama-2-70b': (68_977, 327_680, None),
  'tinyllama-1.1b': (1_100, 22_528, None),
  'llama-3-8b': (8_030, 131_072, None),
  'llama-3-70b': (70_554, 327_680, None),
  'llama-3-405b': (405_853, 516_096, None),
  'mixtral-8x7b': (46_703, 131_072, 12.9),
  'mixtral-8x22b': (141_000, 229_376, 39),
  'qwen3-30b-a3b': (30_500, 98_304, 3.3),
}


@pytest.mark.parametrize('name', MODELS)
def test_presets_have_the_published_sizes(name):
  shape, (millions, kv_bytes, billions) = MODELS[name], _PUBLISHED[name]
  # Two are published to two digits.
  percent = 2 if name in ('draft-40m', 'qwen3-30b-a3b') else 1
  assert shape.parameters / 1e6 == pytest.approx(millions, rel=percent / 100)
  assert shape.kv_bytes_per_token == kv_bytes
  assert (billions is None) == (shape.num_experts == 1)
  if billions is not None:
    active = shape.active_parameters
    found = (active + shape.vocab_size * shape.width) / 1e9
    assert found == pytest.approx(billions, rel=percent / 100)
    baseline = shape.dense_baseline()
    assert baseline.num_experts == 1
    assert baseline.active_parameters == pytest.approx(active, rel=0.005)


@pytest.mark.parametrize('tied', [True, False])
def test_a_shape_and_a_real_model_count_what_a_forward_multiplies(tied):
  module = tiny.module(tie_embeddings=tied)
  size = machine_limits.model_size(as_model(module))
  shape = model_shape(module.config, name='tiny')
  # 2 layers of width 16: 4 matrices of attention, 8 of the MLP; the head.
  parameters = 2 * 12 * 16**2 + 40 * 16
  assert size.parameters == shape.active_parameters == parameters
  assert size.cache_per_slot == 2 * 2 * 16 == shape.kv_bytes_per_token / 2


def test_configs_give_shapes():
  heads = {'num_heads': 32, 'num_kv_heads': 8, 'head_width': 128}
  sizes = {'num_positions': 4096, 'width': 4096, 'num_layers': 32} | heads
  sizes['inner_width'] = 14336
  llama = LlamaConfig(**sizes, vocab_size=128256)
  assert model_shape(llama, name='llama-3-8b') == MODELS['llama-3-8b']
  experts = {'num_experts': 8, 'experts_per_token': 2}
  mixtral = MixtralConfig(**sizes, vocab_size=32000, **experts)
  assert model_shape(mixtral, name='mixtral-8x7b') == MODELS['mixtral-8x7b']


# One forward.


def test_forward_cost_by_hand():
  shape = _small(weight_bytes=0.5, cache_bytes=1, activation_bytes=4)
  cost = forward_cost(shape, batch_size=3, num_tokens=5, context=7)
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
    # Outputs of attention and MLP of two layers, 8 wide; float32 logits.
    reductions=4,
    reduced_bytes=4 * 15 * 8 * 4,
    gathered_bytes=15 * 50 * 4,
    dtype='bfloat16',
  )
  parts = dataclasses.astuple(cost)
  assert cost.flops == sum(parts[:2])
  assert cost.num_bytes == sum(parts[2:6])
  assert cost.read_bytes == cost.weight_bytes + cost.cache_read_bytes


def test_mixtures_read_only_the_experts_that_they_use():
  shape = dataclasses.replace(_MIXTURE, mlp_width=6)
  expert, router = 3 * 8 * 6, 8 * 4
  always = 2 * (_ATTENTION + router) + _HEAD
  assert shape.parameters == always + 2 * 4 * expert + 50 * 8
  assert shape.active_parameters == always + 2 * 2 * expert
  plain = forward_cost(shape)
  assert plain.weight_bytes == 2 * shape.active_parameters
  verify = forward_cost(shape, num_tokens=3)
  distinct = 4 * (1 - 0.5**3)
  assert verify.weight_bytes == pytest.approx(
    2 * (always + 2 * distinct * expert)
  )
  assert verify.matmul_flops == 3 * plain.matmul_flops
  sides = 20 + 14 + 14 + 20 + 12 + 2 * 3 * 14
  assert plain.activation_bytes == 2 * (2 * sides + 58)
  for num_tokens in (1, 2, 4):
    pairs = map(set, itertools.combinations(range(4), 2))
    texts = itertools.product(pairs, repeat=num_tokens)
    used = np.mean([len(set.union(*chosen)) for chosen in texts])
    assert shape.expected_experts(num_tokens) == pytest.approx(used)
    assert _SMALL.expected_experts(num_tokens) == 1


def test_every_kernel_has_its_own_roofline():
  cost = forward_cost(_SMALL, batch_size=2, context=1000)
  cache_bytes = cost.cache_read_bytes + cost.cache_write_bytes
  other_bytes = cost.weight_bytes + cost.activation_bytes
  # Seconds of memory and of arithmetic; the weights are limited by memory.
  weights = other_bytes / 100, cost.matmul_flops / 1e3
  attention = cache_bytes / 100, cost.attention_flops / 1e3
  seconds = max(weights) + max(attention)
  assert cost.seconds(_MACHINE) == pytest.approx(seconds)
  together = sum(weights + attention)
  assert cost.seconds(_MACHINE, overlap=False) == pytest.approx(together)
  four = _MACHINE.times(4)
  assert cost.seconds(four) == pytest.approx(seconds / 4)
  assert (four.name, _MACHINE.ridge('bfloat16')) == ('4 x machine', 10)


@pytest.mark.parametrize(
  ('num_tokens', 'latency', 'seconds'),
  [
    # 4 sums of 16 bytes, of which 3/4 cross a link of 8 bytes/s twice, then
    # logits of 200 bytes.
    (1, 0.0, 4 * 2 * 12 / 8 + 150 / 8),
    (3, 0.0, 3 * (4 * 2 * 12 / 8 + 150 / 8)),
    # The sums take a latency each; the logits take longer than one, then not.
    (1, 4.0, 4 * 4.0 + 150 / 8),
    (1, 20.0, 5 * 20.0),
  ],
)
def test_devices_wait_for_their_collectives(num_tokens, latency, seconds):
  cost = forward_cost(_SMALL, num_tokens=num_tokens)
  four = dataclasses.replace(
    _MACHINE.times(4), link_bytes_per_second=8.0, collective_seconds=latency
  )
  assert cost.communication_seconds(four) == pytest.approx(seconds)
  alone = dataclasses.replace(four, devices=1)
  assert cost.communication_seconds(alone) == 0.0
  apart = cost.seconds(alone) / 4 + seconds
  assert cost.seconds(four) == pytest.approx(apart)


def test_a_draft_is_shared_only_if_that_is_faster():
  step = SpeculativeStep(draft_forwards=1)
  for latency in (0.0, 1e3):
    four = dataclasses.replace(_MACHINE.times(4), collective_seconds=latency)
    pair = Deployment(target=_SMALL, draft=_SMALL, hardware=four)
    found = predict(pair, step)
    shared, whole = found.plain_seconds, forward_cost(_SMALL).seconds(_MACHINE)
    assert (shared < whole) == (latency == 0)
    drafting = found.seconds - found.plain_seconds
    assert drafting == pytest.approx(min(shared, whole))


# Speculation.


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
  paths = [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [2, 0]]
  irregular, acceptance = topology.from_paths(paths), [0.5, 0.2, 0.1]
  for shape in (topology.chain(5), topology.k_ary(2, 3), irregular):
    step = tree_step(shape, acceptance)
    assert step.tokens == pytest.approx(_mean_tokens(shape, acceptance))
    assert step.num_nodes == shape.num_nodes
    assert step.draft_forwards == shape.max_depth
    # The draft scores every node that has children.
    parents = {path[:-1] for path in shape.paths}
    assert step.draft_width * shape.max_depth == pytest.approx(len(parents))


def test_memory_bound_speedup_is_the_formula_of_leviathan():
  free = {'activation_bytes': 0, 'cache_bytes': 0}
  target = dataclasses.replace(MODELS['gpt2-xl'], **free)
  draft = dataclasses.replace(MODELS['gpt2'], **free)
  memory_bound = Hardware(
    name='memory', bytes_per_second=100.0, flops_per_second={'bfloat16': 1e12}
  )
  deployment = Deployment(target=target, draft=draft, hardware=memory_bound)
  ratio = draft.parameters / target.parameters
  for n, a in ((1, 0.6), (2, 0.0), (5, 0.9), (6, 0.3)):
    found = predict(deployment, _chain(n, a))
    tokens = (1 - a ** (n + 1)) / (1 - a)
    assert found.speedup == pytest.approx(tokens / (n * ratio + 1))
    assert found.relative_bandwidth == pytest.approx(1 / found.speedup)


def test_predictions_add_up():
  h200 = HARDWARE['h200']
  server = dataclasses.replace(_SERVER, overlap=False, hardware=h200)
  sizes = {'batch_size': 6, 'context': 100}
  step = SpeculativeStep(
    num_nodes=9, tokens=3, draft_forwards=2.5, draft_width=4
  )
  found, plain = predict(server, step, **sizes), SpeculativeStep()
  verify = forward_cost(server.target, num_tokens=9, **sizes)
  draft = forward_cost(server.draft, num_tokens=4, **sizes)
  total = lambda figure: pytest.approx(figure(verify) + 2.5 * figure(draft))
  assert found.seconds == total(lambda cost: cost.seconds(h200, overlap=False))
  assert found.num_bytes == total(lambda cost: cost.num_bytes)
  assert found.flops == total(lambda cost: cost.flops)
  before = forward_cost(server.target, **sizes)
  read = 3 * found.relative_bandwidth * before.read_bytes
  assert read == total(lambda cost: cost.read_bytes)
  assert found.plain_seconds == before.seconds(h200, overlap=False)
  ratio = 3 * found.plain_seconds / found.seconds
  assert found.speedup == pytest.approx(ratio)
  assert found.throughput == pytest.approx(6 / found.latency)
  assert found.latency == pytest.approx(found.seconds / 3)
  assert predict(server, plain, **sizes).speedup == 1
  assert predict(server, plain, **sizes).relative_bandwidth == 1


def test_memory_holds_weights_and_caches():
  resident = 2 * (_SERVER.target.parameters + _SERVER.draft.parameters)
  resident += 600 * (327_680 + 131_072)
  for size, fits in ((resident, True), (resident - 1, False)):
    small = dataclasses.replace(_SERVER.hardware, memory_bytes=size)
    server = dataclasses.replace(_SERVER, hardware=small)
    assert server.fits(batch_size=6, context=100) == fits


def test_break_even_is_the_last_crossing():
  speedup = lambda deployment, step, size, context=0: (
    predict(deployment, step, batch_size=size, context=context).speedup
  )
  found = break_even_batch_size(_SERVER, _CHAIN, context=2048)
  assert speedup(_SERVER, _CHAIN, found - 1, 2048) > 1
  assert speedup(_SERVER, _CHAIN, found, 2048) <= 1
  # Below 1 at few rows, which use most experts, and above it at many.
  mixture = Deployment(
    target=MODELS['qwen3-30b-a3b'], draft=None, hardware=HARDWARE['h200']
  )
  poor = dataclasses.replace(_CHAIN, tokens=2.8)
  assert speedup(mixture, poor, 2) < 1 < speedup(mixture, poor, 64)
  assert break_even_batch_size(mixture, poor, limit=64) is None
  hopeless = dataclasses.replace(_SERVER, draft=_SERVER.target)
  assert break_even_batch_size(hopeless, _chain(2, 0)) == 1


@pytest.mark.parametrize('batch_size', [1, 48, 96, 512])
def test_best_tree_finds_the_best_draft_length(batch_size):
  where = {'batch_size': batch_size, 'context': 2048}
  steps = [_chain(n, 0.8) for n in range(1, 11)]
  speeds = [predict(_SERVER, step, **where).speedup for step in steps]
  best = int(np.argmax([1.0, *speeds]))
  tree = best_tree(_SERVER, [0.8], num_nodes=11, max_depth=10, **where)
  assert tree == (topology.chain(best) if best else None)
  # It branches where drafting is free.
  free = dataclasses.replace(_SERVER, draft=None)
  tree = best_tree(free, [0.5, 0.2, 0.1], num_nodes=20, max_depth=6)
  assert tree.num_nodes == 20
  assert tree.branching > 1


# Claims, see docs/cost_model.md.


def test_counted_traffic_is_what_is_predicted_of_it():
  for row in claims.paper()['counted']:
    counted = row['counted relative bandwidth']
    assert row['relative bandwidth'] == pytest.approx(counted, rel=0.01)


def test_the_script_prints_every_claim_as_it_is_published(tmp_path):
  result = command_lines.run('cost_model.py', f'--out={tmp_path / "new"}')
  assert result.code == 0, result.errors
  for part in 'abcdefg':
    assert f'\n## ({part}) ' in result.output
  for cell in ('568.77', '0.836', '25,001', '| - '):
    assert cell in result.output
  found, published = (
    json.loads((folder / 'cost_model.json').read_text())
    for folder in (tmp_path / 'new', _ROOT / 'results' / 'cost_model')
  )
  del found['machine'], published['machine']
  assert jax.tree.structure(found) == jax.tree.structure(published)
  # Platforms differ in the last digits.
  assert jax.tree.leaves(found) == pytest.approx(jax.tree.leaves(published))


def test_the_script_takes_folders_and_presets():
  machine = '--hardware=rtx-4090', '--devices=2'
  models = f'--target={_DEMO / "target"}', '--draft=none'
  result = command_lines.run('cost_model.py', *models, *machine)
  assert result.code == 0, result.errors
  assert 'target on 2 x rtx-4090' in result.output
  record = json.loads((tmp_path / 'new' / 'cost_model.json').read_text())
  assert record['settings']['context'] == 2048
  claimed = ('options', 'by_batch_size', 'by_context', 'by_devices')
  assert {*claimed, 'paper', 'roofs'} < set(record)


def test_unknown_names_are_refused():
  for flag, message in (
    ('--target=llama-9', ' is neither a folder with'),
    ('--hardware=abacus', ' must be one of this, rtx-4090'),
  ):
    assert flag + message in command_lines.refusal('cost_model.py', flag)


def test_this_machine_is_measured(monkeypatch):
  rates = {'bytes_per_second': 3.0, 'flops_per_second': {'float32': 7.0}}
  limits = mock.Mock(**{'return_value.summary.return_value': rates})
  monkeypatch.setattr(machine_limits, 'MachineLimits', limits)
  found = machine_limits.this_machine(['float32'], samples=4)
  limits.assert_called_once_with(['float32'])
  assert limits.return_value.sample.call_count == 4
  assert dataclasses.asdict(found).items() >= rates.items()


_NAN = float('nan')


@pytest.mark.parametrize(
  ('message', 'call'),
  [
    (
      'must be between 1 and num_experts=1',
      lambda: _small(experts_per_token=5),
    ),
    ('must be a multiple of num_kv_heads=2', lambda: _small(num_heads=5)),
    ('got 1, 0 and 0', lambda: forward_cost(_SMALL, num_tokens=0)),
    ("dtype='int4' has no peak rate on machine", lambda: _MACHINE.peak('int4')),
    ('devices must be at least 1, got 0', lambda: _MACHINE.times(0)),
    ('must be at least 1', lambda: SpeculativeStep(tokens=0.5)),
    ('must be at least 1', lambda: SpeculativeStep(tokens=_NAN)),
    ('has 1 ranks', lambda: tree_step(topology.k_ary(2, 1), [0.5])),
    ('together at most 1', lambda: _chain(1, 1.2)),
    ('got .nan', lambda: _chain(1, _NAN)),
  ],
)
def test_bad_input_is_refused(message, call):
  with pytest.raises(ValueError, match=message):
    call()
