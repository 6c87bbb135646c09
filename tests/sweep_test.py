"""Sweeps: their arithmetic, on made-up measurements, and the script."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import types

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

from models import hub
from models.drafters import DraftSettings
from models.gpt2 import GPT2
from models.gpt2 import GPT2Config
from models.sweep import against_twin
from models.sweep import fitting
from models.sweep import long_context
from models.sweep import measuring
from models.sweep import mixture
from models.sweep import overlay
from models.sweep import pictures
from models.sweep import routing
from models.sweep import run
from models.sweep import studies
from models.sweep import tables
from models.training.corpus import Corpus
from models.training.tokenizer import train_tokenizer
import specdec
from specdec.benchmarking import Measurement
from specdec.cost_model import Experts
from specdec.cost_model import forward_seconds
from specdec.cost_model import Hardware
from specdec.cost_model import MODELS
from specdec.generation import Generation

_ROOT = pathlib.Path(__file__).parents[1]
_TEXT = 'def add(first, second):\n  return first + second\n' * 20
_BEST = Hardware(
  name='machine',
  bytes_per_second=20e9,
  flops_per_second={'bfloat16': 400e9},
)
_TRUE = dataclasses.replace(
  _BEST,
  bytes_per_second=15e9,
  flops_per_second={'bfloat16': 150e9},
  layer_seconds=40e-6,
)


def _measurement(seconds, *, rows, steps, tokens, drafts=0):
  stats = {
    'new_tokens': tokens,
    'reads': {'target': {'forwards': steps}, 'draft': {'forwards': drafts}},
  }
  generation = Generation(
    tokens=[[0] * 8] * rows,
    origins=[],
    labels=(),
    log_probs=None,
    finish_reasons=[],
    errors=[],
    stats=stats,
  )
  return Measurement(seconds, generation)


def _forward_times(hardware, *, overlap):
  times = []
  for name, batch_size, node_counts in (
    ('gpt2', 1, (1, 2, 5, 9, 17, 33, 65)),
    ('gpt2', 8, (1, 5, 17)),
    ('draft-40m', 1, (1, 9)),
  ):
    for num_tokens in node_counts:
      made = fitting.ForwardTime(
        shape=MODELS[name],
        batch_size=batch_size,
        num_tokens=num_tokens,
        slots=128 * batch_size,
        seconds=1.0,
      )
      seconds = made.predicted(hardware, overlap=overlap)
      times.append(dataclasses.replace(made, seconds=seconds))
  return times


@pytest.mark.parametrize('overlap', [True, False])
def test_a_machine_is_found_again_from_its_forwards(overlap):
  found = fitting.fit(_forward_times(_TRUE, overlap=overlap), _BEST)
  assert found.overlap == overlap
  assert found.typical_error < 1e-3
  hardware = found.hardware
  assert hardware.bytes_per_second == pytest.approx(15e9, rel=0.01)
  assert hardware.peak('bfloat16') == pytest.approx(150e9, rel=0.01)
  assert hardware.layer_seconds == pytest.approx(40e-6, rel=0.01)


def test_what_cannot_be_fitted_is_refused():
  times = _forward_times(_TRUE, overlap=True)
  with pytest.raises(ValueError, match='at least 4 forwards'):
    fitting.fit(times[:3], _BEST)
  other = dataclasses.replace(
    times[0], shape=dataclasses.replace(times[0].shape, dtype='float32')
  )
  with pytest.raises(ValueError, match='of one dtype'):
    fitting.fit([*times, other], _BEST)


@pytest.mark.parametrize(
  ('ys', 'expected'),
  [
    # Halfway between 2 and 8 on a log scale.
    ((1.5, 0.5), 4.0),
    ((1.25, 0.25), 2 * 4**0.25),
    ((2.0, 1.1), None),
    ((0.9, 0.5), 2.0),
    ((0.5, 1.5, 0.5), 16.0),  # the last crossing counts
    ((1.5, None, 0.5), 8.0),
  ],
)
def test_where_a_line_falls_below_one(ys, expected):
  found = overlay.crossing((2, 8, 32)[: len(ys)], ys)
  assert found == (None if expected is None else pytest.approx(expected))


def test_steps_are_counted_over_all_decodes():
  drafter = mixture.free_chain(mixture.Mixture(), 4)
  found = overlay.counted_step(
    [
      _measurement(1.0, rows=2, steps=10, tokens=50, drafts=40),
      _measurement(1.0, rows=2, steps=15, tokens=50, drafts=60),
    ],
    drafter,
    draft='draft',
  )
  # Two rows of 25 steps share 100 tokens.
  assert found.tokens == 2.0
  assert (found.num_nodes, found.draft_forwards) == (5, 4.0)
  assert found.draft_width == drafter.config.width
  free = overlay.counted_step(
    [_measurement(1.0, rows=1, steps=10, tokens=30)], drafter, draft=None
  )
  assert (free.tokens, free.draft_forwards) == (3.0, 0.0)
  assert overlay.counted_step([], None, draft=None) == specdec.cost_model.Step()


def test_speedups_are_those_of_seconds_per_token():
  plain = [_measurement(4.0, rows=1, steps=8, tokens=8)]
  arm = [_measurement(2.0, rows=1, steps=4, tokens=16)]
  assert overlay.speedups(arm, plain) == [4.0]
  assert overlay.step_seconds(arm) == 0.5


def test_reading_prompts_is_not_timed(monkeypatch):
  events = []

  class Watched(specdec.Decoding):
    def step(self, num_steps=1):
      events.append('step' if num_steps else 'prompts read')
      return super().step(num_steps)

  monkeypatch.setattr(specdec, 'Decoding', Watched)
  clock = iter(range(100))
  read_clock = lambda: events.append('clock') or next(clock)
  monkeypatch.setattr(
    measuring, 'time', types.SimpleNamespace(perf_counter=read_clock)
  )
  sizes = mixture.mixture_of((64, 1, 4, 2, 32), 'float32')
  target = mixture.free_draft(sizes)
  subject = mixture.subject('table', target, sizes.shape(), 1.0)
  (batch,) = subject.batches(batch_size=2, length=8, count=1)
  effort = measuring.Effort(max_new_tokens=4)
  found = measuring.measure_decodes(subject, {'plain': None}, [batch], effort)
  assert [one.seconds for one in found['plain']] == [1]
  one_decode = ['prompts read', 'clock', 'step', 'clock']
  assert events == one_decode * 2  # The first compiles.


def test_lines_do_not_fall_below_zero():
  line = overlay.line_through((1, 2.0), (5, 1.0))
  assert [line(1), line(3), line(5), line(100)] == [2.0, 1.5, 1.0, 0.0]
  assert overlay.line_through((1, 2.0), (1, 2.0))(7) == 2.0


def test_distinct_experts_by_hand():
  # One layer, two rows of four tokens, two experts each.
  chosen = np.array(
    [[[[0, 1], [1, 2], [0, 1], [0, 1]], [[3, 4], [3, 4], [5, 6], [0, 1]]]]
  )
  # Windows of two: {0,1,2}, {0,1}, {3,4}, {0,1,5,6}.
  assert mixture.distinct_experts(chosen, 2, 1) == (3 + 2 + 2 + 4) / 4
  # Of both rows together: {0,1,2,3,4}, {0,1,5,6}.
  assert mixture.distinct_experts(chosen, 2, 2) == (5 + 4) / 2
  (found,) = mixture.chances(chosen, 8)
  assert found == (4 / 8, 5 / 8, 1 / 8, 2 / 8, 2 / 8, 1 / 8, 1 / 8, 0)
  experts = Experts(count=8, per_token=2, width=4, routing=(found,))
  row = mixture.experts_row(chosen, experts, num_nodes=2, batch_size=1)
  assert row['counted'] == 11 / 4
  assert row['formula'] == pytest.approx(
    sum(1 - (1 - chance) ** 2 for chance in found)
  )
  assert row['independent'] == row['formula']
  plain = mixture.experts_row(chosen, experts, num_nodes=1, batch_size=1)
  assert plain['counted'] == 2
  assert plain['formula'] == pytest.approx(2)


def test_correlation_by_hand():
  # One of two experts each; at distance 1 both rows stay once in two times, at
  # distance 2 never: (2/3) (1/2) + (1/3) 0 of the pairs agree, half would.
  chosen = np.array([[[[0], [0], [1]], [[1], [0], [0]]]])
  chances = np.array([4 / 6, 2 / 6])
  # Pairs that both use expert 0: 1 and 1 of 4, none of 2; expert 1: none.
  both = np.array([2 / 3 * 2 / 4, 0])
  by_hand = np.sum(both - chances**2) / np.sum(chances * (1 - chances))
  assert by_hand < 0
  assert mixture.correlation(chosen, 2, 3) == 0
  # A single token has no neighbours.
  assert mixture.correlation(chosen, 2, 1) == 0
  with pytest.raises(ValueError, match='4 neighbours cannot be counted in tex'):
    mixture.correlation(chosen, 2, 4)
  # Where all tokens agree, chances say everything.
  assert mixture.correlation(np.zeros_like(chosen), 2, 3) == 0
  same = np.array([[[[0]] * 4, [[1]] * 4]])
  assert mixture.correlation(same, 2, 3) == 1


def test_correlation_is_found_again():
  # Rows with chances of their own, from the distribution of the formula.
  rng = np.random.default_rng(0)
  chance = rng.beta(0.25 * 3, 0.75 * 3, 60_000)
  used = rng.random((60_000, 5)) < chance[:, None]
  # Expert 1 or 0; "used" is of expert 1, and expert 0 mirrors it.
  chosen = used.astype(int)[None, ..., None]
  found = mixture.correlation(chosen, 2, 5)
  assert found == pytest.approx(1 / 4, abs=0.01)


def test_routing_is_that_of_the_modules_own_router():
  sizes = mixture.mixture_of((64, 2, 4, 2, 32), 'float32')
  module = sizes.mixture()
  texts = np.arange(12, dtype=np.int32).reshape(2, 6)
  chosen = mixture.chosen_experts(module, texts)
  assert chosen.shape == (2, 2, 6, 2)
  embedded, _ = module.embed(jnp.asarray(texts), jnp.zeros((2, 6), jnp.int32))
  block = module.layers[0]
  mask = jnp.tril(jnp.ones((6, 6), bool))[None].repeat(2, 0)
  positions = jnp.arange(6)[None].repeat(2, 0)
  _, rotation = module.embed(jnp.asarray(texts), positions)
  attended, _ = block.attend(embedded, rotation, mask, None)
  logits = block.mlp.gate(block.post_attention_layernorm(attended))
  expected = np.argsort(-np.asarray(logits), axis=-1)[..., :2]
  np.testing.assert_array_equal(chosen[0], expected)


def test_sizes_of_the_mixture_are_checked():
  sizes = mixture.mixture_of((128, 2, 4, 2, 96), 'bfloat16')
  variables = nnx.state(sizes.mixture(), nnx.Param)
  elements = sum(leaf.size for leaf in jax_leaves(variables))
  norms = 128 * (2 * 2 + 1)
  assert elements - norms == sizes.shape().parameters
  twin = nnx.state(sizes.twin(), nnx.Param)
  elements = sum(leaf.size for leaf in jax_leaves(twin))
  assert elements - norms == sizes.shape().dense_twin().parameters
  for bad in ((128, 2, 4, 5, 96), (128, 2, 4, 2), (128, 0, 4, 2, 96)):
    with pytest.raises(ValueError, match='--mixture='):
      mixture.mixture_of(bad, 'bfloat16')
  with pytest.raises(ValueError, match='multiple of 64'):
    mixture.mixture_of((100, 2, 4, 2, 96), 'bfloat16')


def test_experts_that_neighbours_share(tmp_path):
  pytest.importorskip('matplotlib')
  module = mixture.mixture_of((64, 2, 4, 2, 32), 'float32').mixture()
  # Runs of a token: what one needs its neighbour needs too.
  text = np.repeat(np.random.default_rng(0).integers(0, 1024, 100), 20)
  study = routing.over_nodes(
    module, text, node_counts=(1, 4), batch_sizes=(1, 32)
  )
  one, rows, four, many = study['rows']
  assert one['counted'] == 2
  assert one['formula'] == pytest.approx(2)
  assert rows['counted'] == many['counted'] == 4
  assert four['counted'] == pytest.approx(four['formula'], rel=0.1)
  assert four['counted'] < 0.9 * four['independent'] < four['uniform']
  assert study['correlation'][0] == 0 < study['correlation'][1] < 1
  assert np.sum(study['routing'], axis=1) == pytest.approx([2, 2])
  study = json.loads(json.dumps(study))
  assert pictures.draw('routing', {'study': study}, tmp_path) == [
    'sweep_routing.png'
  ]
  row = tables.to_markdown({'routing': study}).splitlines()[4]
  cells = [cell.strip() for cell in row.strip('|').split('|')]
  assert cells == ['1', '1', '2.00', '2.00', '2.00', '2.00', '1.00']
  for nodes, rows in ((129, 1), (1, 33)):
    with pytest.raises(ValueError, match='--routed_nodes goes up to 128'):
      routing.over_nodes(
        module, text, node_counts=(nodes,), batch_sizes=(rows,)
      )
  with pytest.raises(ValueError, match='needs 128 tokens, the text has 100'):
    routing.over_nodes(module, text[:100], node_counts=(1,), batch_sizes=(1,))


def test_what_has_no_experts_is_not_routed(pair):
  with pytest.raises(ValueError, match=r'--routed=.* has no experts'):
    run.run(_plan(pair, ('routing',)), _BEST)


def jax_leaves(tree):
  return [leaf for leaf in nnx.to_flat_state(tree).leaves]


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  folders = []
  for seed, width in ((0, 64), (1, 32)):
    tokenizer = train_tokenizer([_TEXT], vocab_size=280, context=256)
    config = GPT2Config(
      vocab_size=len(tokenizer),
      num_positions=256,
      width=width,
      num_layers=1,
      num_heads=2,
    )
    folders.append(tmp_path_factory.mktemp('model'))
    hub.save_pretrained(
      GPT2(config, rngs=nnx.Rngs(seed)), folders[-1], tokenizer=tokenizer
    )
  corpus = tmp_path_factory.mktemp('corpus')
  for number in range(60):  # some are held out
    (corpus / f'{number}.py').write_text(_TEXT)
  return (*folders, corpus)


def _plan(pair, names, **axes):
  target, draft, corpus = pair
  return run.Plan(
    target=str(target),
    draft=str(draft),
    dtype='bfloat16',
    corpus=Corpus(folder=str(corpus)),
    drafting=DraftSettings(inner='lookup'),
    axes=run.Axes(**axes),
    mixture=mixture.mixture_of((64, 1, 4, 2, 32), 'bfloat16'),
    routed=str(target),
    effort=measuring.Effort(max_new_tokens=8, repeats=1),
    studies=names,
  )


_OVERHEAD = 3e-3


@pytest.fixture
def simulated(monkeypatch):
  """A machine that does what the cost model says, and nothing is run."""

  def forwards(model, shape, texts, *, node_counts, **_):
    del model
    slots = sum(measuring.padded_shape(texts, 8))
    made = [
      fitting.ForwardTime(
        shape=shape,
        batch_size=len(texts),
        num_tokens=size,
        slots=slots,
        seconds=1.0,
      )
      for size in node_counts
    ]
    return [
      dataclasses.replace(one, seconds=one.predicted(_TRUE, overlap=False))
      for one in made
    ]

  def forward(shape, batch_size, num_tokens, batch):
    return forward_seconds(
      shape,
      _TRUE,
      batch_size=batch_size,
      num_tokens=num_tokens,
      context=sum(measuring.padded_shape(batch, 8)),
      overlap=False,
    )

  def step(subject, drafter, batch, *, with_target):
    rows, config = len(batch), drafter.config
    seconds = _OVERHEAD * rows
    if subject.draft is not None:
      seconds += 4 * forward(subject.draft, rows, config.width, batch)
    if with_target:
      seconds += forward(subject.shape, rows, config.num_nodes, batch)
    return _measurement(
      5 * seconds, rows=rows, steps=5, tokens=15 * rows, drafts=20
    )

  def decodes(subject, drafters, batches, effort):
    del effort
    return {
      name: [
        _measurement(
          8 * forward(subject.shape, len(batch), 1, batch),
          rows=len(batch),
          steps=8,
          tokens=8 * len(batch),
        )
        if drafter is None
        else step(subject, drafter, batch, with_target=True)
        for batch in batches
      ]
      for name, drafter in drafters.items()
    }

  def drafting(subject, drafter, batch, effort):
    del effort
    return [step(subject, drafter, batch, with_target=False)]

  for module in (studies, long_context):
    monkeypatch.setattr(module, 'measure_forwards', forwards)
  for module in (studies, against_twin):
    monkeypatch.setattr(module, 'measure_decodes', decodes)
  monkeypatch.setattr(studies, 'measure_drafting', drafting)


def _check_prediction(arm):
  assert arm['step']['tokens'] == 3.0
  assert arm['predicted'] == pytest.approx(arm['speedup'], rel=0.02)
  assert arm['predicted_step_seconds'] == pytest.approx(
    arm['step_seconds'], rel=0.02
  )


def test_what_the_model_describes_is_predicted(pair, simulated, tmp_path):
  pytest.importorskip('matplotlib')
  plan = _plan(
    pair,
    ('batch', 'context', 'nodes', 'long', 'experts'),
    batch_sizes=(1, 4, 16),
    contexts=(32, 96),
    long_contexts=(32, 200),
    context_batch_size=2,
    chain_nodes=(2, 5),
    tree_nodes=(8,),
    expert_batch_sizes=(1, 2),
  )
  saved = {}
  figures = run.run(dataclasses.replace(plan, save=saved.__setitem__), _BEST)
  for name in ('batch', 'context', 'nodes', 'long', 'experts'):
    for point in figures[name]['points']:
      for arm in point['arms'].values():
        _check_prediction(arm)
  assert list(figures['nodes']['points'][0]['arms']) == [
    'chain: 2',
    'chain: 5',
    'staged: 8',
  ]
  for factor in figures['experts']['factors']:
    assert factor['predicted'] == pytest.approx(factor['measured'], rel=0.02)
  text = tables.to_markdown(figures)
  assert 'Fitted: 15.0 GB/s, 150 GFLOP/s in bfloat16' in text
  assert sorted(saved) == ['batch', 'context', 'experts', 'long', 'nodes']
  for name, record in saved.items():
    again = json.loads(json.dumps(record))
    for file in pictures.draw(name, again, tmp_path):
      assert (tmp_path / file).read_bytes().startswith(b'\x89PNG')
  assert len(list(tmp_path.glob('*.png'))) == 7


def test_ranges_of_arms_lie_beside_each_other():
  pytest.importorskip('matplotlib')
  arm = {'speedup': 2.0, 'predicted': 1.5, 'speedups': [1.0, 2.0, 4.0]}
  study = {
    'axis': 'rows',
    'x': [1, 8],
    'arms': ['chain', 'staged'],
    'points': [{'arms': {'chain': arm, 'staged': arm}}] * 2,
  }
  figure = pictures.speedups(study, 'A title')
  (axes,) = figure.axes
  chain, staged = [bars.lines[0].get_xdata() for bars in axes.containers]
  assert chain == pytest.approx([1 / 1.03, 8 / 1.03])
  assert staged == pytest.approx([1.03, 8.24])
  assert 'range of n = 3 decodes' in figure.get_suptitle()
  lines = {
    one.get_label(): list(one.get_xdata())
    for one in axes.lines
    if 'predicted' in one.get_label()
  }
  assert lines == {'chain, predicted': [1, 8], 'staged, predicted': [1, 8]}


def test_prompts_are_cut_from_all_over_the_text(pair):
  subject = mixture.subject('one', None, None, 1.0)
  subject = dataclasses.replace(subject, text=np.arange(110))
  batches = subject.batches(batch_size=2, length=10, count=3)
  firsts = [[row[0] for row in batch] for batch in batches]
  assert firsts == [[0, 60], [20, 80], [40, 100]]
  assert batches[0][1] == list(range(60, 70))
  with pytest.raises(ValueError, match='larger --corpus or smaller --contexts'):
    subject.batches(batch_size=1, length=111, count=1)


def test_bad_axes_are_named(pair):
  for axes in (
    {'batch_sizes': (4, 2)},
    {'chain_nodes': (1, 2)},
    {'tree_nodes': ()},
    {'contexts': (0,)},
    {'nodes_batch_size': 0},
  ):
    (name,) = axes
    with pytest.raises(ValueError, match=f'--{name} must be rising'):
      run.Axes(**axes)
  with pytest.raises(ValueError, match='--studies=else: choose from batch'):
    _plan(pair, ('else',))
  with pytest.raises(ValueError, match='exceed the context of the target'):
    run.run(_plan(pair, ('batch',), contexts=(250,)), _BEST)


def _run(*flags):
  return subprocess.run(
    [sys.executable, _ROOT / 'scripts' / 'sweep.py', *flags],
    capture_output=True,
    text=True,
    check=False,
  )


def test_bad_flags_are_one_line(tmp_path):
  for flags, message in (
    ((), '--output is needed'),
    ((f'--output={tmp_path}', '--dtype=int8'), 'one of the dtypes'),
    ((f'--output={tmp_path}', '--batch_sizes=1,x'), '--batch_sizes=1,x'),
  ):
    result = _run(*flags)
    assert result.returncode == 2
    assert message in result.stderr
    assert 'Traceback' not in result.stderr


def test_the_script_measures_and_draws(tmp_path, monkeypatch):
  pytest.importorskip('matplotlib')
  # What is compiled runs for moments, here.
  monkeypatch.setenv('XLA_FLAGS', '--xla_backend_optimization_level=0')
  result = _run(
    '--studies=long,routing',
    '--dtype=float32',
    '--long_contexts=32,80',
    '--routed_nodes=1,5',
    '--mixture=64,1,4,2,32',
    '--num_draft_tokens=2',
    '--max_new_tokens=6',
    '--repeats=1',
    f'--output={tmp_path}',
  )
  assert result.returncode == 0, result.stderr
  assert '## Long contexts' in result.stdout
  record = json.loads((tmp_path / 'sweep_long.json').read_text())
  assert record['settings']['max_new_tokens'] == 6
  assert record['study']['x'] == [32, 80]
  # Of the embedded mixture: two experts of eight for each token.
  study = json.loads((tmp_path / 'sweep_routing.json').read_text())['study']
  for row in study['rows']:
    assert (
      2 <= row['counted'] <= min(8, 2 * row['num_nodes'] * row['batch_size'])
    )
    assert row['formula'] == pytest.approx(row['counted'], rel=0.1)
  for name in ('long', 'routing'):
    assert (tmp_path / f'sweep_{name}.png').stat().st_size > 10_000
