"""Where the time of a call goes, for a program whose operations are known."""

import time

import jax
import jax.numpy as jnp
import pytest

from models.lab import operations

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
  assert operations.labels(_PROGRAM) == {
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

  rows = operations.table(call, repeats, compiled.as_text())
  by_name = {row['operation']: row for row in rows}
  (product,) = (row for name, row in by_name.items() if 'dot' in name)
  assert product['calls'] == 1
  assert product['operation'].endswith(f'-> f32[{size},{size}]')
  *parts, whole, alone = rows
  assert sum(row['ms'] for row in parts) == pytest.approx(whole['ms'])
  assert (whole['operation'], alone['calls']) == ('all', 1)
  assert min(product['ms'], alone['ms']) > 0
