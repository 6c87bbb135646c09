"""Work that is counted, not timed, must not grow unnoticed.

The limits are what was counted when they were last updated:

    python -m pytest tests/specdec/counted_work_test.py --update_limits

Other compilers fuse otherwise, and on CPU also for another instruction set; so
compiled programs are compared only where these are the same.

`generation_test` counts how often programs are compiled; `export_test` shows
that a decode never waits for the host.
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
import tiny_blocks
import tiny_drafters

import specdec
from specdec.models.checkpoints import hub
from specdec.models.lab import cost_model
from specdec.models.lab.compiled import hlo
from specdec.models.lab.compiled import programs
from specdec.models.nn import llama as nn_llama
from specdec.models.text import settings as settings_lib

_LIMITS = pathlib.Path(__file__).parents[1] / 'golden' / 'counted_work.json'
_TASK = programs.CompiledTask(
  target=hub.locate('demo').config,
  draft=hub.locate(hub.draft_name('demo')).config,
  prompt_tokens=64,
  max_new_tokens=64,
)
# By these XLA's CPU backend chooses its products.
_INSTRUCTIONS = ('amx_bf16', 'avx2', 'avx512_bf16', 'avx512_vnni', 'avx512f')


_long = functools.partial(pytest.param, marks=pytest.mark.long)


def _versions():
  """Versions that the counts depend on, as far as they can be known."""
  cpuinfo, libtpu = pathlib.Path('/proc/cpuinfo'), programs.LIBTPU
  flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
  folders = [*libtpu.parents[1].glob('libtpu-*.dist-info')]
  return {
    'jaxlib': importlib.metadata.version('jaxlib'),
    'libtpu': folders[0].name.removesuffix('.dist-info') if folders else None,
    'cpu': ' '.join(name for name in _INSTRUCTIONS if name in flags),
  }


def _check(name, counted, update, *, compiler=()):
  """Compares with the limits of a program, or makes them the new limits.

  They can be compared if the `_versions` named in `compiler` are the same.
  """
  limits, here = json.loads(_LIMITS.read_text()), _versions()
  versions = limits['versions']
  if update:
    limits[name] = counted
    versions |= {key: version for key, version in here.items() if version}
    _LIMITS.write_text(json.dumps(limits, indent=1, sort_keys=True) + '\n')
    return
  if any(here[package] != versions[package] for package in compiler):
    pytest.skip(f'limits were counted with {versions}, this is {here}')
  assert counted.keys() == limits[name].keys()
  grown = [
    f'{what}: {counted[what]}, limit {limit}'
    for what, limit in limits[name].items()
    if counted[what] > limit
  ]
  assert not grown, (
    f'{name} has more to do than before: {"; ".join(grown)}. If that is'
    ' intended, say why in the commit and run python -m pytest'
    ' tests/specdec/counted_work_test.py --update_limits. The limits were'
    f' counted with {versions}, this is {here}'
  )


def _compile(method, task, device, *mesh):
  if device.startswith('v5e') and not programs.LIBTPU.exists():
    pytest.skip('no libtpu; run python scripts/install_libtpu.py')
  with mock.patch.dict(programs._OPTIONS['cpu'], quick.AS_FOR_USERS):
    return programs.compile_program(method, task, device, *mesh)


@functools.cache
def _compiled(device, method):
  return _compile(method, _TASK, device)


@pytest.fixture
def update(request):
  return request.config.getoption('--update_limits')


@pytest.mark.parametrize(
  ('device', 'method'),
  [
    ('cpu', 'plain'),
    ('cpu', 'staged'),
    ('v5e', 'plain'),
    _long('v5e', 'staged'),
  ],
)
def test_the_compiled_loops_of_the_demo_pair(device, method, update):
  compiled = _compiled(device, method)
  # As XLA would where only a part of a top-k is used.
  for instructions in hlo.parse(compiled.text).computations.values():
    for instruction in instructions.values() if device == 'cpu' else ():
      sorts = instruction.opcode == 'sort' and instruction.arrays[0].dims
      assert max(sorts or (0,)) < _TASK.target.vocab_size
  counted = {
    'temporary bytes': compiled.memory['temporary'],
    'accessed bytes': compiled.memory['accessed'],
  }
  for loop in compiled.loops():
    assert loop['host_transfers'] == 0
    counted |= {
      f'{loop["loop"]}, {what}': number
      for what, number in {
        'kernels per layer': loop['kernels_per_layer'],
        'other kernels': loop['bookkeeping'],
        'large copies': sum(loop['copies'].values()),
        'branches': loop['branches'],
      }.items()
    }
  compiler = ('jaxlib', 'cpu' if device == 'cpu' else 'libtpu')
  _check(f'{device} {method}', counted, update, compiler=compiler)


# Qwen2.5 1.5B and 0.5B with one layer each: 467 and 272 MB of embeddings.
_VOCABULARY = {
  name: nn_llama.LlamaConfig(
    vocab_size=151_936,
    num_positions=4096,
    width=width,
    num_heads=width // head_width,
    head_width=head_width,
    num_layers=1,
    num_kv_heads=2,
    inner_width=inner_width,
    qkv_bias=True,
    tie_embeddings=True,
  )
  for name, width, head_width, inner_width in (
    ('1.5b', 1536, 128, 8960),
    ('0.5b', 896, 64, 4864),
  )
}


@pytest.mark.parametrize(
  ('method', 'topology', 'verify', 'megabytes'),
  [
    ('tree', 'k_ary:2x5', 'rejection', 128),
    _long('plain', None, 'match', 64),
    _long('staged', None, 'match', 256),
  ],
)
@pytest.mark.parametrize('device', ['cpu', _long('v5e')])
def test_memory_with_a_large_vocabulary(
  device, method, topology, verify, megabytes
):
  """No method holds a float32 embedding (545 MB) next to weights and caches."""
  drafting = settings_lib.DraftSettings(
    topology=topology and settings_lib.parse_topology(topology)
  )
  task = programs.CompiledTask(
    target=_VOCABULARY['1.5b'],
    draft=_VOCABULARY['0.5b'],
    drafting=drafting,
    verify=verify,
  )
  compiled = _compile(method, task, device)
  assert compiled.memory['temporary'] < megabytes * 1e6


@pytest.mark.parametrize('kind', ['Q4_K', _long('Q6_K')])
def test_weights_of_few_bits_are_computed_within_a_product(kind):
  """A TPU writes neither the matrix nor words of it."""
  if not programs.LIBTPU.exists():
    pytest.skip('no libtpu; run python scripts/install_libtpu.py')
  shape = 8960, 1536
  (device, *_) = programs.abstract_devices('v5e')
  matrix = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      shape[:1] + leaf.shape[1:],
      leaf.dtype,
      sharding=jax.sharding.SingleDeviceSharding(device),
    ),
    tiny_blocks.matrix(np.random.default_rng(0), kind, (1, shape[1])).grouped(),
  )

  def rounds(matrix, rows, count):
    product = lambda _, rows: matrix.product(rows)[:, : shape[1]]
    return jax.lax.fori_loop(0, count, product, rows)

  traced = jax.jit(rounds).trace(matrix, jnp.ones((8, shape[1])), 3)
  compiled = traced.lower(lowering_platforms=('tpu',)).compile()
  expanded = 2 * math.prod(shape)  # Bytes, in bfloat16.
  assert compiled.memory_analysis().temp_size_in_bytes < expanded / 3


@pytest.mark.parametrize('method', ['plain', _long('staged')])
def test_the_collectives_of_eight_devices(method, update):
  """A target that one device cannot hold is counted by its shape alone."""
  target = dataclasses.replace(cost_model.MODELS['llama-2-70b'], num_layers=2)
  task = dataclasses.replace(_TASK, target=target)
  compiled = _compile(method, task, 'v5e:2x4', {'model': 8})
  assert compiled.memory['held'] < 1.03 * compiled.memory['least_held']
  counted = {}
  for loop in compiled.loops():
    assert loop['whole_tensors'] == 0
    counted |= {
      f'{loop["loop"]}, collectives': sum(loop['collectives'].values()),
      f'{loop["loop"]}, collectives per layer': loop['collectives_per_layer'],
      f'{loop["loop"]}, bytes of collectives': loop['collective_bytes'],
    }
  assert counted['decode step, collectives per layer'] <= 2
  name = f'v5e:2x4 {method}'
  _check(name, counted, update, compiler=('jaxlib', 'libtpu'))


# XLA's CPU backend computes this number of sums of a product rightly in one
# fusion; jaxlib 0.10.2 adds zeros to the sums after them (jax#39103).
_RIGHT_SUMS = 32_768


def _large_sums_of_products(program):
  """The computations that have more sums than that, and a product."""
  names = []
  for name, instructions in program.computations.items():
    sums = [
      math.prod(instruction.arrays[0].dims)
      for instruction in instructions.values()
      if instruction.opcode == 'reduce'
    ]
    if any(
      instruction.opcode == 'dot' for instruction in instructions.values()
    ):
      names += [name] if max(sums, default=0) > _RIGHT_SUMS else []
  return names


def test_no_program_has_what_a_release_of_jaxlib_compiles_wrongly():
  """Nor arctan: 0.10.2 gets it wrong on some processors (jax#39352)."""
  for method in ('plain', 'staged'):
    program = hlo.parse(_compiled('cpu', method).text)
    assert not _large_sums_of_products(program)
    opcodes = {
      instruction.opcode
      for instructions in program.computations.values()
      for instruction in instructions.values()
    }
    assert {'dot', 'reduce'} < opcodes
    assert not {'atan', 'atan2'} & opcodes
  rows = np.ones((_RIGHT_SUMS + 64, 3), np.float32)
  sums = jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))
  compiled = jax.jit(sums).lower(rows).compile()
  if not np.array_equal(compiled(rows), np.full(len(rows), 3)):
    assert _large_sums_of_products(hlo.parse(compiled.as_text()))
    version = importlib.metadata.version('jaxlib')
    pytest.xfail(
      f'jaxlib {version} computes sums of small products wrongly on CPU from'
      f' the {_RIGHT_SUMS + 1}th on (jax#39103); all programs here have fewer'
    )


def test_forwards_of_a_decode(update):
  """The draft is the target, so how many forwards it takes is up to us."""
  model = tiny.gpt2()
  tree = tiny_drafters.Settings(
    num_nodes=8, width=4, branching=2, rounds=3, capacity=32, cost_ratio=0.0
  )
  drafter = specdec.staged(
    tiny_drafters.model(model, tree),
    tiny_drafters.candidates(specdec.PromptLookup(), config=tree),
  )
  options = {'drafter': drafter, 'max_new_tokens': 40}
  key, prompts = jax.random.key(0), tiny.prompts(2)
  stats = specdec.generate(model, key, prompts, **options).stats
  counted = {'target': stats.target_forwards, **stats.stage_forwards}
  _check('forwards', counted, update)
