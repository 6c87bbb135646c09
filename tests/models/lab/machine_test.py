"""Measurements of a machine, and where the time of a call goes."""

import time

import jax
import jax.numpy as jnp
import pytest
import tiny

from specdec.models.lab import forward_times
from specdec.models.lab import machine

_COSTS = machine.StepCosts(verification={1: 0.1, 4: 0.13, 8: 0.21})


def test_v_is_linear_between_the_measured_sizes():
  assert _COSTS.of_nodes(1) == 0.1
  assert _COSTS.of_nodes(4) == 0.13
  assert _COSTS.of_nodes(6) == pytest.approx(0.17)
  for outside in (0, 9):
    with pytest.raises(ValueError, match='num_nodes must be 1 to 8'):
      _COSTS.of_nodes(outside)
  with pytest.raises(ValueError, match='1 node'):
    machine.StepCosts(verification={4: 1.0})


def _measure(target=None, texts=((1, 2, 3), (4,)), context=40, **effort):
  return machine.measure_step_costs(
    tiny.gpt2(num_layers=1) if target is None else target,
    texts,
    prompt_slots=32,
    max_new_tokens=64,
    context=context,
    node_counts=(2, 4, 8),
    effort=machine.Effort(**{'num_steps': 1, 'repeats': 1} | effort),
  )


def test_costs_are_measured_for_every_size_that_can_pay_until_it_is_late():
  costs = _measure()
  assert costs.verification.keys() == {1, 2, 4, 8}
  assert min(costs.verification.values()) > 0
  # No forward is as fast as a limit of 0; two sizes are always measured.
  assert _measure(most_tokens=0).verification.keys() == {1, 2}
  assert _measure(is_late=lambda: True).verification.keys() == {1, 2}
  answers = iter([False, True, True])
  costs = _measure(is_late=lambda: next(answers), most_tokens=1e9)
  assert costs.verification.keys() == {1, 2, 4}
  with pytest.raises(ValueError, match='context must be 2 to 96 tokens'):
    _measure(context=97)
  with pytest.raises(ValueError, match='at least one token in every row'):
    _measure(texts=[[1], []])


def test_bandwidth_is_the_median_of_samples(monkeypatch):
  monkeypatch.setattr(machine, '_READ_BYTES', {'default': 1 << 20})
  bandwidth = machine.Bandwidth()
  for _ in range(3):
    bandwidth.sample()
  found = bandwidth.summary()
  samples = found['bytes_per_second_samples']
  assert len(samples) == 3
  assert found['bytes_per_second'] == sorted(samples)[1] > 0


_PROGRAM = """
ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %call.1 = (f32[1,3]{1,0}, s8[4]{0}) custom-call(%a), \
custom_call_target="mul", operand_layout_constraints={f32[1,2]{1,0}, u32[7]{0}}
  %add_fusion = f32[2]{0} fusion(%a), metadata={op_name="f/while/add"}
  %while.2 = (s32[]) while(%a), condition=%c, body=%b
  ROOT %copy = f32[2]{0} copy(%add_fusion)
"""


def test_operations_are_named_by_what_they_compute():
  assert forward_times.labels(_PROGRAM) == {
    'call.1': 'mul f32[1,2] -> f32[1,3]',
    'add_fusion': 'fusion add -> f32[2]',
    'copy': 'copy -> f32[2]',
  }


def test_the_times_of_a_call_add_up():
  size, repeats = 256, 3
  x = jnp.ones((size, size))
  compiled = jax.jit(lambda x: jnp.sin(x @ x)).lower(x).compile()

  def call():
    begin = time.perf_counter()
    for _ in range(repeats):
      jax.block_until_ready(compiled(x))
    return (time.perf_counter() - begin) / repeats

  rows = forward_times.operations(call, repeats, compiled.as_text())
  by_name = {row['operation']: row for row in rows}
  (product,) = (row for name, row in by_name.items() if 'dot' in name)
  assert product['calls'] == 1
  assert product['operation'].endswith(f'-> f32[{size},{size}]')
  *parts, whole, alone = rows
  assert sum(row['ms'] for row in parts) == pytest.approx(whole['ms'])
  assert (whole['operation'], alone['calls']) == ('all', 1)
  assert min(product['ms'], alone['ms']) > 0
