"""Reading compiled programs, on programs written by hand."""

import dataclasses
import pathlib

import pytest

from specdec.models.lab import cost_model
from specdec.models.lab.compiled import hlo
from specdec.models.lab.compiled import programs

# Written by hand. A decode step of a model of two layers, with a growth round
# of unknown length, a table look-up of three steps and a branch. The array
# that is turned has 65,664 bytes, just above 64 KB.
_GOLDEN = pathlib.Path(__file__).parents[3] / 'golden'
_PROGRAM = (_GOLDEN / 'compiled_step.txt').read_text()


def _step(program=_PROGRAM):
  return hlo.count(hlo.parse(program)).loops[0]


def test_kernels_of_a_step_by_layer_and_next_to_the_model():
  step = _step()
  row = step.figures(frozenset())
  # gemm, write, row, turn, noise, send; single numbers are not counted as
  # kernels, and the longer branch counts.
  assert row['kernels'] == 6
  assert step.layers == {'0': 1, '1': 1}
  assert row['kernels_per_layer'] == 1.0
  assert row['bookkeeping'] == 3
  assert row['branches'] == 2
  assert step.name == 'jit(advance)/while'


def test_loops_of_unknown_length_are_apart_and_others_are_rolled_out():
  (growth,) = _step().loops
  assert growth.name.endswith('grow_draft/while')
  # The condition's call, and three sorts of the look-up.
  assert growth.counts['kernels'] == 4
  assert growth.counts['branches'] == 1
  assert not growth.loops
  (growth,) = _step(_PROGRAM.replace('{"n":"3"}', '{"n":"5"}')).loops
  assert growth.counts['kernels'] == 6
  (growth,) = _step(_PROGRAM.replace('known_trip_count', 'hint')).loops
  assert (growth.counts['kernels'], len(growth.loops)) == (1, 1)


def test_large_copies_and_talk_with_the_host():
  assert _step().copies == {'f32[96,171]': 1}
  assert _step().counts['host'] == 1
  # One row less is 64 KB exactly at most.
  assert not _step(_PROGRAM.replace('171', '170')).copies


# Written by hand, for the loops of `_PROGRAM`. The sort cannot be part of a
# graph, and the sum before it is too little for a graph of its own.
_LAUNCHES = """\
001: kCopy          [source       | next=002 (1)] kCopy
002: kWhile         [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel  [source | sink] less grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | next=006 (1)]
        004: kCublasLtMatmul [source | sink] kCublasLtMatmul
        005: kConditional    [source | sink]
          true_branch:
            006: kCustomKernel [source | sink] row grid: [1, 1, 1]
    007: kWhile         [prev=000 (1) | sink]
condition:
        008: kCustomKernel  [source | sink] less grid: [1, 1, 1]
      body:
        009: kWhile         [source | sink]
condition:
            010: kCustomKernel  [source | sink] three grid: [1, 1, 1]
          body:
            011: kCustomKernel  [source | sink] sum grid: [1, 1, 1]
            012: kSort          [source | sink] half
            000: kCommandBuffer [source | sink]
                013: kCustomKernel [source | sink] loop_add grid: [1, 1, 1]
    000: kCommandBuffer [prev=007 (1) | sink]
        014: kCopy [source | sink] kCopy
"""


def test_graphs_of_a_step_and_what_ends_them():
  step, growth = programs.Compiled(
    _PROGRAM, _LAUNCHES, {}, frozenset(), ('draft',)
  ).loops()
  assert (step['graphs'], step['breaks']) == (2, {'While': 1})
  # The look-up takes three rounds.
  assert growth['graphs'] == 3
  assert growth['breaks'] == {'While': 1, 'CustomKernel': 3, 'Sort': 3}
  (loop,) = hlo.parse_launches(
    _LAUNCHES.replace('007: kWhile', '007: kCopy')
  ).loops
  assert loop.breaks == {'Copy': 1, 'While': 1}
  with pytest.raises(ValueError, match='not a list of launches'):
    hlo.parse_launches(_PROGRAM)


_SHARED = (_GOLDEN / 'compiled_collectives.txt').read_text()


def test_exchanges_between_devices():
  (step,) = hlo.count(hlo.parse(_SHARED)).loops
  row = step.figures(frozenset())
  assert row['collectives'] == {
    'all-reduce f32[1,64]': 1,
    'all-gather f32[8,1,64]': 1,
    'all-gather bf16[8,64,8]': 1,
  }
  assert row['collectives_per_layer'] == 1.0  # Only the sum is in a layer.
  assert row['collective_bytes'] == 4 * 64 + 4 * 8 * 64 + 2 * 8 * 64 * 8
  # A weight of [8, 512]; each device has [64, 8] of it.
  for elements, count in ((8 * 512, 1), (8 * 511, 0)):
    assert step.figures(frozenset({elements}))['whole_tensors'] == count


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match='no ENTRY'):
    hlo.parse('module @jit_advance { func.func public @main() }')
  empty = 'ENTRY %main (a: s32[]) -> s32[] {\n}\n'
  with pytest.raises(ValueError, match='one decode loop'):
    programs.Compiled(empty, None, {}, frozenset(), ()).loops()
  tiny = dataclasses.replace(cost_model.MODELS['tinyllama-1.1b'], num_layers=1)
  task = programs.CompiledTask(target=tiny, draft=tiny, verify='block')
  with pytest.raises(ValueError, match='verify=block is for chains'):
    programs.compile_program('tree', task, 'cpu')
  with pytest.raises(ValueError, match='is for 8 devices, but cpu has 1'):
    programs.compile_program('plain', task, 'cpu', {'model': 8})
