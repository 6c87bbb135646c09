"""Reading compiled programs, on programs written by hand."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from specdec.models.lab import hlo
from specdec.models.lab.bench import record
from specdec.models.lab.compiled import counts
from specdec.models.lab.compiled import programs
from specdec.models.lab.compiled import report as report_lib

# Written by hand. A decode step of a model of two layers, with a growth round
# of unknown length, a table look-up of three steps and a branch. The array
# that is turned has 65,664 bytes, just above 64 KB.
_GOLDEN = pathlib.Path(__file__).parents[3] / 'golden'
_PROGRAM = (_GOLDEN / 'compiled_step.txt').read_text()


def _step(program=_PROGRAM):
  return counts.count(hlo.parse(program)).loops[0]


def test_shapes_are_read_with_their_layout():
  arrays = hlo.parse_arrays(
    '(f32[2,3]{1,0}, bf16[4,2]{0,1:T(8,128)S(1)}, s32[])'
  )
  assert arrays == (
    hlo.Array('f32', (2, 3), '1,0'),
    hlo.Array('bf16', (4, 2), '0,1:T(8,128)S(1)'),
    hlo.Array('s32', ()),
  )
  assert [one.memory_space for one in arrays] == [0, 1, 0]
  assert [one.num_bytes for one in arrays] == [24, 16, 4]
  bits = hlo.parse_arrays('(pred[7], s4[8], token[])')
  assert [one.num_bytes for one in bits] == [7, 4, 0]
  assert str(arrays[1]) == 'bf16[4,2]'


def test_kernels_of_a_step_by_layer_and_beside_the_model():
  step = _step()
  # gemm, write, row, turn, noise, send; single numbers are no kernels, and of
  # the branches the longer one counts.
  assert step.kernels == 6
  assert step.forward_kernels == 3
  assert step.layer_kernels == {0: 1, 1: 1}
  assert step.kernels_per_layer == 1.0
  assert step.other_kernels == 3
  assert step.branches == 2
  assert step.name == 'jit(advance)/while'


def test_loops_of_unknown_length_are_apart_and_others_are_rolled_out():
  (growth,) = _step().loops
  assert growth.name.endswith('grow_draft/while')
  # The condition's call, and three sorts of the look-up.
  assert growth.kernels == 4
  assert growth.branches == 1
  assert not growth.loops
  # A stated trip count comes first.
  stated = 'condition=%three, backend_config={"known_trip_count":{"n":"5"}},'
  (growth,) = _step(_PROGRAM.replace('condition=%three,', stated)).loops
  assert growth.kernels == 6


def test_large_copies_and_talk_with_the_host():
  assert _step().copies == {'f32[96,171]': 1}
  assert _step().host_transfers == ['sent']
  # One row less is 64 KB exactly at most.
  assert not _step(_PROGRAM.replace('171', '170')).copies


def test_exchanges_between_devices():
  text = (_GOLDEN / 'compiled_collectives.txt').read_text()
  (step,) = counts.count(hlo.parse(text)).loops
  found = {str(one): number for one, number in step.collectives.items()}
  assert found == {
    'all-reduce f32[1,64]': 1,
    'all-gather f32[8,1,64]': 1,
    'all-gather bf16[8,64,8]': 1,
  }
  assert step.collectives_per_layer == 1.0  # Only the sum is in a layer.


def test_whole_weights_are_found_however_they_are_gathered():
  text = (_GOLDEN / 'compiled_collectives.txt').read_text()
  # The weight, of which each device has [64, 8].
  for divided, number in (((8, 512), 1), ((8, 8, 64), 1), ((16, 256), 0)):
    compiled = programs.Compiled(
      text, 0, 0, (1, 1.0), frozenset({divided}), (), None
    )
    (step,) = report_lib.analyse(compiled)
    assert step['whole_tensors'] == number, divided
    assert step['collective_bytes'] == 4 * 64 + 4 * 8 * 64 + 2 * 8 * 64 * 8


def test_a_report_names_the_loops():
  stages = ('draft', 'lookup')
  expected = 'to_apply=%less, backend_config={"estimated_cycles":"7"}'
  program = _PROGRAM.replace('to_apply=%less', expected)
  compiled = programs.Compiled(
    program, 0, 0, (1, 1.0), frozenset(), stages, None
  )
  step, growth = report_lib.analyse(compiled)
  assert step['loop'] == 'decode step'
  assert (step['bookkeeping'], step['host_transfers']) == (3, 1)
  assert growth['loop'] == 'growth round of draft, before'
  assert growth['kernels'] == 4
  # It sorts three times.
  assert (step['cycles'], growth['cycles']) == (0, 3 * 7)
  assert '1 f32[96,171] |' in record.rows_to_table([step, growth])


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match='no ENTRY'):
    hlo.parse('module @jit_advance { func.func public @main() }')
  empty = 'ENTRY %main (a: s32[]) -> s32[] {\n}\n'
  none = programs.Compiled(empty, 0, 0, (0, 0.0), frozenset(), (), None)
  with pytest.raises(ValueError, match='one decode loop'):
    report_lib.analyse(none)
  for method, verify, message in (
    ('beam', 'match', "'beam' is not known"),
    ('tree', 'block', 'verify=block is for chains'),
  ):
    task = programs.CompiledTask(verify=verify)
    with pytest.raises(ValueError, match=message):
      programs.compile_program(method, task, programs.DEVICES['cpu'])


def _loop(name, kernels, bookkeeping, keeping=0, conditions=0):
  return {
    'loop': name,
    'kernels': kernels,
    'bookkeeping': bookkeeping,
    'keeping': keeping,
    'conditions': conditions,
  }


def test_loops_count_as_often_as_they_run():
  loops = (
    _loop('decode step', 500, 60, keeping=6, conditions=1),
    _loop('growth round of table, before', 30, 30),
    _loop('growth round of draft, before', 100, 20),
    _loop('growth round of table, within', 32, 32),
  )
  assert report_lib.per_step(loops, {'draft': 2.0, 'table': 4.5}) == {
    'kernels': 500 + 2 * 100 + 4.5 * 31,
    'bookkeeping': 60 + 2 * 20 + 4.5 * 31,
    'keeping': 6,
    # A step waits once, for a conditional, in the draft's loop and in three of
    # the table's.
    'waits': 1 + 1 + (1 + 2) + (3 + 4.5),
    'rounds': {'draft': 2.0, 'table': 4.5},
  }


@pytest.mark.parametrize('rounds', [{}, {'draft': 4.0}])
def test_a_loop_of_known_length_is_part_of_the_step(rounds):
  step = report_lib.per_step([_loop('decode step', 700, 90)], rounds)
  assert (step['kernels'], step['waits'], step['rounds']) == (700, 1.0, {})


def test_what_a_compiler_does_not_say_is_left_out(monkeypatch):
  """As of GPUs, where none is present."""
  program = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
  as_compiled = lambda: programs.Compiled(
    text='',
    held=(8, 8.0),
    divided=frozenset(),
    stages=(),
    cost_ratio=None,
    **programs.analyses(program),
  )
  held = {'held_bytes': 8, 'ideal_held_bytes': 8.0}
  found = report_lib.memory_figures(as_compiled())
  assert found.keys() == held.keys() | {'temporary_bytes', 'accessed_bytes'}
  assert found['accessed_bytes'] >= 2 * 4 * 64
  monkeypatch.setattr(jax.stages.Compiled, 'cost_analysis', lambda self: None)
  found.pop('accessed_bytes')
  assert report_lib.memory_figures(as_compiled()) == found
  monkeypatch.setattr(jax.stages.Compiled, 'memory_analysis', lambda self: None)
  assert report_lib.memory_figures(as_compiled()) == held
