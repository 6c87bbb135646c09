"""Several devices: where tensors lie, and that tokens stay the same."""

import contextlib
import pathlib
import subprocess
import sys

import command_lines
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import Mesh
import numpy as np
import pytest
import quick

import specdec
from specdec import memory
from specdec.models.checkpoints import hub
from specdec.models.lab import cost_model
from specdec.models.nn import adapter
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib

_ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize(
  'marks', ['not long', pytest.param('long', marks=pytest.mark.long)]
)
def test_on_eight_devices(marks):
  environment = quick.environment(
    JAX_NUM_CPU_DEVICES='8', JAX_PLATFORMS='cpu', PYTHONPATH=str(_ROOT)
  )
  # Programs are counted without this option.
  command = [sys.executable, '-m', 'pytest', '--long', '-m', marks]
  ended = subprocess.run(
    [*command, 'tests/on_devices.py'],
    capture_output=True,
    text=True,
    cwd=_ROOT,
    env=environment,
  )
  assert ended.returncode == 0, ended.stdout


def test_each_of_eight_devices_has_an_eighth_of_a_model_of_70b():
  layout = sharding_lib.Layout(AbstractMesh((1, 8), sharding_lib.AXES))
  config = cost_model.MODELS['llama-2-70b']
  module = hub.shape_module(config, jnp.dtype('bfloat16'), layout)
  model = adapter.as_model(module, layout)
  leaves = jax.tree.leaves(model.params)
  size = lambda leaf: leaf.size * leaf.dtype.itemsize
  assert 137e9 < sum(map(size, leaves)) < 139e9
  norms = sum(size(leaf) for leaf in leaves if leaf.ndim == 1)
  ideal = sum(size(leaf) for leaf in leaves if leaf.ndim == 2) / 8 + norms
  held = sum(map(memory.bytes_on_device, leaves))
  assert ideal <= held < 1.001 * ideal
  assert model.spec.slot_shards == 8


def test_the_lookup_of_one_row_on_a_mesh_is_of_two():
  """Or XLA makes it a slice, and a GPU gathers the whole matrix for it."""
  matrix, index = jnp.arange(64.0).reshape(16, 4), jnp.array([3])
  mesh = AbstractMesh((1, 8), sharding_lib.AXES)
  for context, result in (
    (contextlib.nullcontext(), 'f32[1,4] = gather'),
    (jax.sharding.use_abstract_mesh(mesh), 'f32[2,4] = gather'),
  ):
    with context:
      traced = jax.make_jaxpr(matrices_lib.take_rows)(matrix, index)
    assert result in str(traced)
    assert [output.shape for output in traced.out_avals] == [(1, 4)]


def test_a_mesh_that_cannot_be_is_refused_by_scripts():
  for text, reason in (
    ('rows:2', 'expected the sizes of the axes data (rows) and model'),
    ('data:2,data:4', 'such as data:2,model:4'),
    ('', 'such as data:2,model:4'),
    ('data:0', 'the size of data must be a positive integer'),
    ('data:2,model:4', '8 devices, but there are 1; give sizes whose product'),
  ):
    error = command_lines.refusal('generate.py', f'--mesh={text}')
    assert f'--mesh={text}' in error
    assert reason in error


def test_any_mesh_gets_the_axes_and_types_that_are_needed():
  given = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('model', 'data'))
  made = sharding_lib.make_mesh(given)
  assert made == sharding_lib.make_mesh({'data': 1})
  assert made.axis_names == sharding_lib.AXES
  with pytest.raises(ValueError, match="mesh=rows:2: there is no axis 'rows'"):
    specdec.load('demo', None, method='plain', mesh={'rows': 2})


def test_a_draft_is_divided_only_if_it_is_large():
  small, large = (lambda: 1 << 23), (lambda: 1 << 28)  # bytes of a layer
  layout = sharding_lib.Layout(AbstractMesh((2, 4), sharding_lib.AXES))
  divides = lambda *args: (
    sharding_lib.draft_layout(layout, *args).divides_weights
  )
  assert not divides('auto', small)
  assert divides('auto', large)
  assert divides('sharded', small)
  assert not divides('replicated', large)
  with pytest.raises(ValueError, match="draft_mesh='half' is not known"):
    sharding_lib.draft_layout(layout, 'half', small)
