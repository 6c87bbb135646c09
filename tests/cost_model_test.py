"""The cost model against enumeration, figures by hand and published sizes."""

import dataclasses
import itertools

import numpy as np
import pytest
import tiny_modules
from transformers import DeepseekV3Config
from transformers import MixtralConfig

from models.bench.machine import model_size
from models.cost_report import paper
from models.cost_report import studies
from models.nn.adapter import as_model
from specdec.cost_model import best_tree
from specdec.cost_model import break_even_batch_size
from specdec.cost_model import Deployment
from specdec.cost_model import Experts
from specdec.cost_model import forward_cost
from specdec.cost_model import forward_seconds
from specdec.cost_model import ForwardCost
from specdec.cost_model import HARDWARE
from specdec.cost_model import Hardware
from specdec.cost_model import LatentAttention
from specdec.cost_model import MODELS
from specdec.cost_model import ModelShape
from specdec.cost_model import predict
from specdec.cost_model import shape_from_config
from specdec.cost_model import Step
from specdec.cost_model import tree_step
from specdec.tree import topology

# 2 layers of width 8: 4 query heads, 2 KV heads of 3; SwiGLU of 10.
_SMALL = ModelShape(
  name='small',
  num_layers=2,
  width=8,
  num_heads=4,
  num_kv_heads=2,
  head_width=3,
  mlp_width=10,
  vocab_size=50,
)
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
_CHAIN = tree_step(topology.chain(4), [0.8])


# Sizes that are published.


@pytest.mark.parametrize(
  ('name', 'millions'),
  [
    ('gpt2', 124.4),
    ('gpt2-medium', 354.8),
    ('gpt2-large', 774.0),
    ('gpt2-xl', 1557.6),
    ('draft-40m', 40),
    ('llama-2-70b', 68_977),
    ('llama-3-8b', 8_030),
    ('llama-3-70b', 70_554),
    ('llama-3-405b', 405_853),
    ('mixtral-8x7b', 46_703),
    ('mixtral-8x22b', 141_000),
    ('qwen3-30b-a3b', 30_500),
    ('deepseek-v3', 671_000),
  ],
)
def test_presets_have_the_published_size(name, millions):
  tolerance = 0.02 if name == 'draft-40m' else 0.01
  assert MODELS[name].parameters / 1e6 == pytest.approx(millions, rel=tolerance)


@pytest.mark.parametrize(
  ('name', 'billions', 'with_embeddings', 'tolerance'),
  [
    ('mixtral-8x7b', 12.9, True, 0.01),
    ('mixtral-8x22b', 39, True, 0.01),
    ('deepseek-v3', 36.7, False, 0.01),  # README_WEIGHTS.md of the checkpoint
    ('qwen3-30b-a3b', 3.3, True, 0.02),  # published to two digits
  ],
)
def test_mixtures_have_the_published_active_size(
  name, billions, with_embeddings, tolerance
):
  shape = MODELS[name]
  active = shape.active_parameters
  active += shape.embedding_parameters if with_embeddings else 0
  assert active / 1e9 == pytest.approx(billions, rel=tolerance)


@pytest.mark.parametrize(
  ('name', 'count'),
  [
    ('llama-2-70b', 327_680),
    ('llama-3-70b', 327_680),
    ('llama-3-8b', 131_072),
    ('gpt2-large', 184_320),
    ('deepseek-v3', 61 * (512 + 64) * 2),
  ],
)
def test_the_cache_of_a_token_has_its_known_size(name, count):
  assert MODELS[name].kv_bytes_per_token == count


@pytest.mark.parametrize('tied', [True, False])
def test_a_shape_counts_what_a_real_model_has(tied):
  model = as_model(
    tiny_modules.make(
      width=16, num_layers=2, vocab_size=40, tie_embeddings=tied
    )
  )
  size = model_size(model)
  shape = ModelShape(
    name='tiny',
    num_layers=2,
    width=16,
    num_heads=2,
    num_kv_heads=2,
    head_width=8,
    mlp_width=64,
    vocab_size=40,
    gated=False,
    tied=tied,
  )
  assert shape.active_parameters == size.parameters
  assert shape.kv_width * shape.num_layers == size.cache_per_slot


@pytest.mark.parametrize(
  ('config', 'name'),
  [(MixtralConfig(), 'mixtral-8x7b'), (DeepseekV3Config(), 'deepseek-v3')],
)
def test_configs_give_the_presets(config, name):
  # transformers' defaults of a family are its best known model.
  preset = MODELS[name]
  found = shape_from_config(config.to_dict(), name=name)
  found = dataclasses.replace(
    found, weight_bytes=preset.weight_bytes, dtype=preset.dtype
  )
  # Not used with latent attention, where configs name other widths.
  if preset.latent is not None:
    found = dataclasses.replace(found, head_width=preset.head_width)
  assert found == preset


def test_configs_of_other_families():
  gpt2 = {
    'model_type': 'gpt2',
    'n_embd': 1280,
    'n_layer': 36,
    'n_head': 20,
    'n_inner': None,
    'vocab_size': 50257,
  }
  assert shape_from_config(gpt2, name='gpt2-large') == MODELS['gpt2-large']
  qwen = {
    'model_type': 'qwen3_moe',
    'hidden_size': 2048,
    'intermediate_size': 6144,
    'num_hidden_layers': 48,
    'num_attention_heads': 32,
    'num_key_value_heads': 4,
    'head_dim': 128,
    'vocab_size': 151936,
    'num_experts': 128,
    'num_experts_per_tok': 8,
    'moe_intermediate_size': 768,
  }
  name = 'qwen3-30b-a3b'
  assert shape_from_config(qwen, name=name) == MODELS[name]
  with pytest.raises(ValueError, match='mlp_only_layers'):
    shape_from_config(qwen | {'mlp_only_layers': [0]}, name=name)
  with pytest.raises(ValueError, match="has no 'num_experts'"):
    shape_from_config(
      {key: qwen[key] for key in qwen if key != 'num_experts'}, name=name
    )
  with pytest.raises(ValueError, match="model_type='mamba' is none of gpt2"):
    shape_from_config({'model_type': 'mamba'}, name='other')


# One forward.


def test_a_forward_by_hand():
  cost = forward_cost(_SMALL, batch_size=3, num_tokens=5, context=7)
  weights = 2 * (_ATTENTION + 3 * 8 * 10) + _HEAD
  assert _SMALL.parameters == weights + 50 * 8
  # Inputs and outputs of the seven matrices of a layer, and of the head.
  sides = 2 * (20 + 14 + 14 + 20 + 18 + 18 + 18) + 58
  assert cost == ForwardCost(
    matmul_flops=2 * 15 * weights,
    # 15 queries see 12 tokens in 4 heads of 3: scores, values.
    attention_flops=2 * (15 * 12 * 4 * 3 * 2 * 2),
    weight_bytes=2 * weights,
    cache_read_bytes=3 * 7 * 2 * (2 * 2 * 3) * 2,
    cache_write_bytes=15 * 2 * (2 * 2 * 3) * 2,
    activation_bytes=15 * sides * 2,
  )
  parts = dataclasses.astuple(cost)
  assert cost.bytes == sum(parts[2:])
  assert cost.read_bytes == cost.weight_bytes + cost.cache_read_bytes
  assert cost.arithmetic_intensity == sum(parts[:2]) / sum(parts[2:])


def test_bytes_per_element_scale_their_part_alone():
  usual = forward_cost(_SMALL, context=7)
  changed = dataclasses.replace(
    _SMALL, weight_bytes=0.5, cache_bytes=1, activation_bytes=4
  )
  assert forward_cost(changed, context=7) == dataclasses.replace(
    usual,
    weight_bytes=usual.weight_bytes / 4,
    cache_read_bytes=usual.cache_read_bytes / 2,
    cache_write_bytes=usual.cache_write_bytes / 2,
    activation_bytes=usual.activation_bytes * 2,
  )


def test_mixtures_read_the_experts_they_need():
  shape = dataclasses.replace(
    _SMALL,
    num_layers=3,
    experts=Experts(count=4, per_token=2, width=6, shared=1, dense_layers=1),
  )
  expert, router = 3 * 8 * 6, 8 * 4
  always = 3 * _ATTENTION + 3 * 8 * 10 + 2 * (router + expert) + _HEAD
  assert shape.parameters == always + 2 * 4 * expert + 50 * 8
  assert shape.active_parameters == always + 2 * 2 * expert
  one = forward_cost(shape)
  assert one.weight_bytes == 2 * shape.active_parameters
  three = forward_cost(shape, num_tokens=3)
  distinct = 4 * (1 - 0.5**3)
  assert three.weight_bytes == pytest.approx(
    2 * (always + 2 * distinct * expert)
  )
  assert three.matmul_flops == 3 * one.matmul_flops


def test_latent_attention_by_hand():
  shape = dataclasses.replace(
    _SMALL,
    latent=LatentAttention(
      query_rank=5, kv_rank=6, rope_width=2, nope_width=3, value_width=4
    ),
  )
  attention = 8 * 5 + 5 * 4 * 5 + 8 * 8 + 6 * 4 * 7 + 16 * 8
  assert shape.active_parameters == 2 * (attention + 240) + _HEAD
  assert shape.kv_bytes_per_token == 2 * (6 + 2) * 2
  # Scores over 8 columns, values of 6, in 4 heads; a multiply and an add.
  assert shape.flops_per_pair == 2 * 4 * (8 + 6)


def test_a_dense_twin_has_the_active_size():
  for name in ('mixtral-8x7b', 'qwen3-30b-a3b', 'deepseek-v3'):
    twin = MODELS[name].dense_twin()
    assert twin.experts is None
    assert twin.active_parameters == pytest.approx(
      MODELS[name].active_parameters, rel=0.005
    )
  with pytest.raises(ValueError, match='small has no experts'):
    _SMALL.dense_twin()


# Experts.


@pytest.mark.parametrize('weights', [[1] * 6, [9, 1, 1, 4, 1, 0]])
@pytest.mark.parametrize('num_tokens', [1, 2, 4])
def test_expected_experts_by_enumeration(weights, num_tokens):
  choices = list(itertools.combinations(range(4), 2))
  chances = np.array(weights) / sum(weights)
  included = tuple(
    float(sum(chances[i] for i, pair in enumerate(choices) if one in pair))
    for one in range(4)
  )
  by_hand = sum(
    np.prod([chances[i] for i in drawn])
    * len({one for i in drawn for one in choices[i]})
    for drawn in itertools.product(range(6), repeat=num_tokens)
  )
  routed = Experts(count=4, per_token=2, width=1, routing=(included,))
  assert routed.expected_distinct(num_tokens) == pytest.approx(by_hand)
  uniform = Experts(count=4, per_token=2, width=1)
  assert uniform.expected_distinct(num_tokens) >= by_hand - 1e-12


def test_expected_experts_by_simulation():
  rng = np.random.default_rng(0)
  draws = rng.random((2000, 12, 128)).argsort(axis=-1)[..., :8]
  counts = [len(np.unique(one)) for one in draws]
  error = np.std(counts) / len(counts) ** 0.5
  found = Experts(count=128, per_token=8, width=1).expected_distinct(12)
  assert abs(found - np.mean(counts)) < 4 * error
  assert found == pytest.approx(128 * (1 - (1 - 8 / 128) ** 12))


def test_correlated_experts_by_simulation():
  # Each row has chances of its own for two experts that mirror each other.
  rng = np.random.default_rng(0)
  chance, correlation = 0.3, 0.4
  size = 1 / correlation - 1
  own = rng.beta(chance * size, (1 - chance) * size, (20_000, 3, 1))
  first = rng.random((20_000, 3, 5)) < own  # 3 rows of 5 tokens
  distinct = first.any(axis=(1, 2)) * 1.0 + (~first).any(axis=(1, 2))
  experts = Experts(
    count=2,
    per_token=1,
    width=1,
    routing=((chance, 1 - chance),),
    correlation=correlation,
  )
  error = np.std(distinct) / len(distinct) ** 0.5
  found = experts.expected_distinct(5, batch_size=3)
  assert abs(found - np.mean(distinct)) < 4 * error
  independent = dataclasses.replace(experts, correlation=0.0)
  assert independent.expected_distinct(5, batch_size=3) > found + 10 * error


def test_correlation_lies_between_its_ends():
  of = lambda correlation: dataclasses.replace(
    Experts(count=8, per_token=2, width=1), correlation=correlation
  )
  independent, alike = of(0.0), of(1.0)
  assert independent.expected_distinct(5) == pytest.approx(8 * (1 - 0.75**5))
  assert alike.expected_distinct(5) == pytest.approx(2)
  assert alike.expected_distinct(5, batch_size=2) == pytest.approx(3.5)
  assert of(1e-6).expected_distinct(5) == pytest.approx(
    independent.expected_distinct(5), rel=1e-5
  )
  assert of(1 - 1e-6).expected_distinct(5) == pytest.approx(2, rel=1e-5)
  found = [of(one).expected_distinct(5) for one in (0, 0.1, 0.5, 0.9)]
  assert found == sorted(found, reverse=True)
  # One token of a row has nothing to be like.
  assert of(0.5).expected_distinct(1) == pytest.approx(2)
  always = Experts(
    count=2, per_token=1, width=1, routing=((1.0, 0.0),), correlation=0.5
  )
  assert always.expected_distinct(5) == 1
  with pytest.raises(ValueError, match='correlation must be from 0 to 1'):
    of(1.5)


def test_layers_may_be_routed_differently():
  even, one_sided = (0.5, 0.5), (1.0, 0.0)
  experts = Experts(count=2, per_token=1, width=6, routing=(even, one_sided))
  assert experts.expected_distinct(2) == (1.5 + 1) / 2
  dataclasses.replace(_SMALL, experts=experts)
  with pytest.raises(ValueError, match='of 3 layers with experts, got 2'):
    dataclasses.replace(_SMALL, num_layers=3, experts=experts)


# Seconds.


def test_every_kernel_is_under_its_own_roof():
  cost = forward_cost(_SMALL, batch_size=2, context=1000)
  work = (
    (cost.matmul_bytes / 100, cost.matmul_flops / 1e3),
    (cost.attention_bytes / 100, cost.attention_flops / 1e3),
  )
  seconds = lambda machine, **options: forward_seconds(
    _SMALL, machine, batch_size=2, context=1000, **options
  )
  assert seconds(_MACHINE) == pytest.approx(sum(map(max, work)))
  assert seconds(_MACHINE, overlap=False) == pytest.approx(sum(map(sum, work)))
  slower = dataclasses.replace(_MACHINE, layer_seconds=3.0)
  assert seconds(slower) == pytest.approx(sum(map(max, work)) + 2 * 3.0)
  assert seconds(_MACHINE.times(4)) == pytest.approx(seconds(_MACHINE) / 4)
  assert _MACHINE.ridge('bfloat16') == 10


# Speculation.


def _walks(shape, acceptance):
  """The mean of tokens over all that the target may say, level by level."""
  known = set(shape.paths)
  other = 1 - sum(acceptance)
  outcomes = [*enumerate(acceptance), (None, other)]
  mean = 0.0
  for said in itertools.product(outcomes, repeat=shape.depth):
    path = ()
    for rank, _ in said:
      if (*path, rank) not in known:
        break
      path = (*path, rank)
    mean += np.prod([chance for _, chance in said]) * (len(path) + 1)
  return mean


@pytest.mark.parametrize(
  'shape',
  [
    topology.chain(1),
    topology.chain(5),
    topology.k_ary(2, 3),
    topology.from_paths([[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [2, 0]]),
  ],
)
def test_expected_tokens_by_enumeration(shape):
  acceptance = [0.5, 0.2, 0.1]
  step = tree_step(shape, acceptance)
  assert step.tokens == pytest.approx(_walks(shape, acceptance))
  assert step.num_nodes == shape.num_nodes
  assert step.draft_forwards == shape.depth


@pytest.mark.parametrize('acceptance', [0.0, 0.3, 0.8])
def test_chains_have_a_closed_form(acceptance):
  for n in (1, 2, 6):
    step = tree_step(topology.chain(n), [acceptance])
    closed = (1 - acceptance ** (n + 1)) / (1 - acceptance)
    assert step.tokens == pytest.approx(closed)
    assert (step.num_nodes, step.draft_width) == (n + 1, 1)


def test_every_node_with_children_is_drafted_from():
  step = tree_step(topology.k_ary(2, 3), [0.5, 0.2])
  assert step.draft_width == pytest.approx((1 + 2 + 4) / 3)


def test_where_only_weights_count_the_formula_is_leviathans():
  shapes = [
    dataclasses.replace(one, activation_bytes=0, cache_bytes=0)
    for one in (MODELS['gpt2-xl'], MODELS['gpt2'])
  ]
  memory_bound = Hardware(
    name='endless', bytes_per_second=1.0, flops_per_second={'bfloat16': 1e9}
  )
  deployment = Deployment(
    target=shapes[0], draft=shapes[1], hardware=memory_bound
  )
  ratio = shapes[1].parameters / shapes[0].parameters
  for n, a in ((1, 0.6), (5, 0.9)):
    step = tree_step(topology.chain(n), [a])
    found = predict(deployment, step)
    tokens = (1 - a ** (n + 1)) / (1 - a)
    assert found.speedup == pytest.approx(tokens / (n * ratio + 1))
    assert found.relative_bandwidth == pytest.approx(1 / found.speedup)


def test_a_prediction_adds_up():
  deployment = dataclasses.replace(
    _SERVER, step_overhead=1e-3, overlap=False, hardware=HARDWARE['h200']
  )
  step = Step(num_nodes=9, tokens=3, draft_forwards=2.5, draft_width=4)
  found = predict(deployment, step, batch_size=6, context=100)
  options = {'batch_size': 6, 'context': 100}
  seconds = lambda shape, tokens: forward_seconds(
    shape, HARDWARE['h200'], num_tokens=tokens, overlap=False, **options
  )
  target, draft = deployment.target, deployment.draft
  took = seconds(target, 9) + 2.5 * seconds(draft, 4) + 1e-3
  assert found.seconds == pytest.approx(took)
  assert found.plain_seconds == pytest.approx(seconds(target, 1))
  assert found.speedup == pytest.approx(3 * seconds(target, 1) / took)
  assert found.latency == pytest.approx(took / 3)
  assert found.throughput == pytest.approx(6 * 3 / took)
  counted = forward_cost(target, num_tokens=9, **options)
  drafted = forward_cost(draft, num_tokens=4, **options)
  assert found.bytes == pytest.approx(counted.bytes + 2.5 * drafted.bytes)
  assert found.flops == pytest.approx(counted.flops + 2.5 * drafted.flops)
  assert deployment.resident_bytes(**options) == 2 * (
    target.parameters + draft.parameters
  ) + 600 * (327_680 + 131_072)


def test_plain_decoding_is_plain_decoding():
  found = predict(_SERVER, Step(), batch_size=3, context=50)
  assert found.speedup == found.relative_bandwidth == 1


def test_break_even_is_the_last_crossing():
  speed = lambda deployment, batch_size: (
    predict(deployment, _CHAIN, batch_size=batch_size, context=2048).speedup
  )
  found = break_even_batch_size(_SERVER, _CHAIN, context=2048)
  assert speed(_SERVER, found) <= 1 < speed(_SERVER, found - 1)
  # Below, above, below: a few rows need most experts, as many rows do.
  mixture = dataclasses.replace(
    _SERVER, target=MODELS['deepseek-v3'], draft=None
  )
  assert speed(mixture, 3) < 1 < speed(mixture, 64)
  found = break_even_batch_size(mixture, _CHAIN, context=2048, limit=64)
  assert found is None
  hopeless = dataclasses.replace(_SERVER, draft=_SERVER.target)
  assert break_even_batch_size(hopeless, tree_step(topology.chain(2), [0])) == 1


@pytest.mark.parametrize('batch_size', [1, 48, 96, 512])
def test_the_best_draft_length_is_the_best(batch_size):
  where = {'batch_size': batch_size, 'context': 2048}
  speeds = [1.0] + [
    predict(_SERVER, tree_step(topology.chain(n), [0.8]), **where).speedup
    for n in range(1, 11)
  ]
  tree = best_tree(_SERVER, [0.8], num_nodes=11, max_depth=10, **where)
  assert (tree.depth if tree else 0) == int(np.argmax(speeds))
  assert tree is None or tree == topology.chain(tree.depth)


def test_the_best_tree_branches_where_that_is_free():
  free = dataclasses.replace(_SERVER, draft=None)
  tree = best_tree(free, [0.5, 0.2, 0.1], num_nodes=20, max_depth=6)
  assert tree.num_nodes == 20
  assert tree.branching > 1


# What the notes claim, see docs/cost_model.md.


@pytest.mark.parametrize('name', ['llama-2-70b', 'llama-3-70b'])
def test_ten_queries_read_ten_caches(name):
  study = studies.options(MODELS[name])
  short, long = study['rows']
  assert [row['cache_ratio'] for row in study['rows']] == [10, 10]
  assert short['total_ratio'] == pytest.approx(1.04, abs=0.005)
  assert long['total_ratio'] == pytest.approx(3.13, abs=0.01)
  assert long['option_1']['cache_read_bytes'] == 131072 * 327_680
  for part in ('weight', 'activation', 'cache_write'):
    one, two = (long[f'option_{n}'][f'{part}_bytes'] for n in (1, 2))
    assert one == two
  for ratio, context in study['contexts_for'].items():
    found = studies.options(MODELS[name], contexts=[context])['rows'][0]
    assert found['total_ratio'] == pytest.approx(float(ratio))
  assert studies.options(MODELS[name], ratios=[10])['contexts_for'] == {
    '10': None
  }


def test_mixtures_gain_less_at_batch_1_and_more_at_64():
  study = studies.by_experts(
    [MODELS['mixtral-8x7b']],
    dataclasses.replace(_SERVER, hardware=HARDWARE['h200']),
    0.8,
    context=512,
  )
  (row,) = study['rows']
  assert row['verified_experts'] == pytest.approx(8 * (1 - 0.75**5))
  assert row['speedup'][0] < 0.4 * row['speedup'][1]
  mixture, twin = study['lines'].values()
  at_64 = study['x'].index(64)
  assert mixture[at_64] > 1.2 * twin[at_64]


def test_the_paper_gains_what_its_bytes_say_less_a_constant():
  study = paper.compare()
  parts = [row['attained'] for row in study['published']]
  assert max(parts) / min(parts) < 1.06
  for row in study['counted']:
    assert row['relative_bandwidth'] == pytest.approx(
      row['counted_relative_bandwidth'], rel=0.01
    )


def test_what_does_not_fit_has_no_speedup():
  small = dataclasses.replace(_SERVER, hardware=HARDWARE['h200'].times(2))
  study = studies.by_context(small, 0.8, batch_sizes=(1, 64))
  assert None not in study['lines']['batch 1']
  fits = [one is not None for one in study['lines']['batch 64']]
  assert fits == sorted(fits, reverse=True)
  assert fits[0]
  assert not fits[-1]


# Bad input.


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: Experts(count=4, per_token=5, width=1), 'per_token=5'),
    (
      lambda: Experts(count=2, per_token=1, width=1, routing=((0.5, 0.6),)),
      'layer 0 must be 2 chances',
    ),
    (
      lambda: dataclasses.replace(_SMALL, num_heads=5),
      'num_heads=5 must be a multiple of num_kv_heads=2',
    ),
    (lambda: forward_cost(_SMALL, num_tokens=0), 'got 1, 0 and 0'),
    (
      lambda: forward_seconds(
        dataclasses.replace(_SMALL, dtype='int4'), _MACHINE
      ),
      "dtype='int4': machine has figures for bfloat16",
    ),
    (lambda: _MACHINE.times(0), 'devices must be at least 1, got 0'),
    (lambda: Step(tokens=0.5), 'must be at least 1'),
    (
      lambda: tree_step(topology.k_ary(2, 1), [0.5]),
      'acceptance has 1 ranks, the tree 2',
    ),
    (lambda: tree_step(topology.chain(1), [1.2]), 'together at most 1'),
    (lambda: tree_step(topology.chain(1), [float('nan')]), 'got .nan'),
  ],
)
def test_bad_input_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
