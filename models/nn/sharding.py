"""Where the tensors of a model lie on several devices.

    axis of the mesh   what is divided among its devices
    data               rows: their caches, texts and trees
    model              heads, hidden units (of every expert), vocabulary

A tensor has a name for each of its axes. Axes with the name `rows` belong to
`data`, all others to `model`. Loading, caches and programs follow from the
names. What the number of devices does not divide is not divided: every device
has all of it.

Axes of the mesh are of the type Auto: weights, caches and what is carried from
program to program say where they lie, and the compiler adds the communication.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from specdec import arguments as arguments_lib
from specdec import cache as cache_lib

DATA, MODEL = 'data', 'model'
AXES = (DATA, MODEL)

_Names = tuple[str | None, ...]  # Names of the axes of a tensor.
# If a vocabulary cannot be divided, the features are.
_EMBEDDING = ('vocabulary', 'features')
_BY_OUTPUT, _BY_INPUT = ('hidden', None), (None, 'hidden')

# The axes of the parameters that are divided, by the ends of their paths. A
# matrix is stored `[out, in]`; a bias is divided as the outputs are. A product
# over a divided axis is summed over the devices, twice in a layer.
_PARAMETERS: Mapping[tuple[str, ...], _Names] = {
  # All families.
  ('lm_head',): _EMBEDDING,
  # GPT-2 stores queries, keys and values one after the other, so a device has
  # parts of other heads: the products, not the weights, are exchanged.
  ('wte', 'embedding'): _EMBEDDING,
  ('attn', 'c_attn', 'weight'): ('fused_heads', None),
  ('attn', 'c_proj', 'weight'): (None, 'heads'),
  ('mlp', 'c_fc', 'weight'): _BY_OUTPUT,
  ('mlp', 'c_proj', 'weight'): _BY_INPUT,
  # Llama and related models.
  ('embed_tokens', 'embedding'): _EMBEDDING,
  ('embed_tokens_per_layer', 'embedding'): _EMBEDDING,
  ('q_proj', 'weight'): ('heads', None),
  ('k_proj', 'weight'): ('kv_heads', None),
  ('v_proj', 'weight'): ('kv_heads', None),
  ('o_proj', 'weight'): (None, 'heads'),
  ('self_attn', 'sinks'): ('heads',),
  # Short convolutions; the parts of a matrix are stored one after the other.
  ('conv', 'in_proj', 'weight'): ('fused_heads', None),
  ('linear_attn', 'in_proj_qkv', 'weight'): ('fused_heads', None),
  ('linear_attn', 'in_proj_z', 'weight'): ('fused_heads', None),
  # The MLP, or each of the experts.
  ('gate_proj', 'weight'): _BY_OUTPUT,
  ('up_proj', 'weight'): _BY_OUTPUT,
  ('down_proj', 'weight'): _BY_INPUT,
}
_CACHE = ('rows', 'kv_heads')


def _mesh_axis(name: str) -> str:
  return DATA if name == 'rows' else MODEL


def parse_mesh(text: str) -> dict[str, int]:
  """The sizes of the axes in a text such as `data:2,model:4`.

  Raises:
    ValueError: an axis is not known or given twice, or a size is not a number.
  """
  sizes: dict[str, int] = {}
  for part in text.split(','):
    name, _, size = part.partition(':')
    if name not in AXES or name in sizes or not size.isdecimal():
      raise ValueError(
        f'mesh={text}: expected the sizes of the axes data (rows) and model'
        ' (weights), such as data:2,model:4'
      )
    sizes[name] = int(size)
  return sizes


def make_mesh(mesh: Mesh | Mapping[str, int]) -> Mesh:
  """A mesh with the axes `data` and `model`, both of the type Auto.

  Args:
    mesh: a mesh with one of these axes or both, of any type; or their sizes,
      for a mesh of all devices. An axis that is left out has the size 1.

  Raises:
    ValueError: an axis is not known, a size not positive, or their product is
      not the number of devices.
  """
  sizes = dict(mesh.shape if isinstance(mesh, Mesh) else mesh)
  text = ','.join(f'{name}:{size}' for name, size in sizes.items())
  for name, size in sizes.items():
    if name not in AXES:
      raise ValueError(
        f'mesh={text}: there is no axis {name!r}; choose from data (rows) and'
        ' model (weights)'
      )
    if not arguments_lib.is_integer(size) or size < 1:
      raise ValueError(
        f'mesh={text}: the size of {name} must be a positive integer'
      )
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  types = (AxisType.Auto,) * len(AXES)
  if isinstance(mesh, Mesh):
    order = [list(sizes).index(axis) for axis in AXES if axis in sizes]
    devices = mesh.devices.transpose(order).reshape(shape)
    return Mesh(devices, AXES, axis_types=types)
  num_devices = jax.device_count()
  if math.prod(shape) != num_devices:
    raise ValueError(
      f'mesh={text} is for {math.prod(shape)} devices, but there are'
      f' {num_devices}; give sizes whose product is {num_devices}, or a'
      ' jax.sharding.Mesh of some of them (on CPU, JAX_NUM_CPU_DEVICES sets'
      ' their number)'
    )
  return jax.make_mesh(shape, AXES, axis_types=types)


# Reading a layer of this size takes about as long as its two sums over the
# devices: 20 microseconds on v5e, computed and not measured.
_BYTES_WORTH_SUMS = 16 << 20
DRAFT_MESHES = ('auto', 'replicated', 'sharded')
"""Where a draft may lie, see `draft_layout`."""


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where a model lies; hashable, and equal for equal meshes.

  Attributes:
    mesh: of `make_mesh`; None for the default device alone.
    divides_weights: whether weights and heads are divided among the devices of
      the axis `model`. If not, each of them has all and computes the same.
  """

  mesh: Mesh | None = None
  divides_weights: bool = True

  @property
  def num_devices(self) -> int:
    """The number of devices."""
    return self.mesh.size if self.mesh else 1

  def parts(self, name: str) -> int:
    """Into how many parts an axis of this name is divided, where it can be."""
    axis = _mesh_axis(name)
    if self.mesh is None or (axis == MODEL and not self.divides_weights):
      return 1
    return self.mesh.shape[axis]

  def spec(self, names: _Names, sizes: tuple[int, ...]) -> PartitionSpec:
    """The axis of the mesh for each axis of a tensor.

    Args:
      names: of its axes; None, or left out at the end, for an axis that is not
        divided.
      sizes: of its axes, in units that stay together, such as heads.
    """
    axes: list[str | None] = []
    for name, size in zip(names, sizes, strict=False):
      divided = name and self.parts(name) > 1 and size % self.parts(name) == 0
      axis = _mesh_axis(name) if name and divided else None
      # If two could be divided by the same axis, the first one is.
      axes.append(None if axis in axes else axis)
    return PartitionSpec(*axes)

  def sharding(
    self, names: _Names, sizes: tuple[int, ...]
  ) -> NamedSharding | None:
    """The sharding of a tensor, see `spec`; None without a mesh."""
    if self.mesh is None:
      return None
    return NamedSharding(self.mesh, self.spec(names, sizes))

  @property
  def everywhere(self) -> NamedSharding | None:
    """The sharding of what every device has all of."""
    return self.sharding((), ())

  def of_parameter(
    self, path: tuple[Any, ...], shape: tuple[int, ...], config: Any
  ) -> NamedSharding | None:
    """The sharding of a parameter of a model.

    Args:
      path: of the parameter in the module.
      shape: of the parameter, or of the scales of its outputs.
      config: the shape of the model.
    """
    if path[-1] == 'bias':
      path = (*path[:-1], 'weight')
    ends = (path[-length:] for length in (1, 2, 3))
    names = next((_PARAMETERS[end] for end in ends if end in _PARAMETERS), ())
    units = {'heads': config.num_heads, 'kv_heads': config.num_kv_heads}
    sizes = tuple(
      units.get(name or '', size)
      for name, size in zip(names, shape, strict=False)
    )
    return self.sharding(names[: len(shape)], sizes)

  def put_parameter(
    self, path: tuple[Any, ...], matrix: Any, config: Any
  ) -> Any:
    """Puts a parameter of the host on the devices, to each only its own part.

    It takes the arguments of `of_parameter`, with an array or another `Matrix`
    in place of the shape.
    """

    def put(array: Any) -> jax.Array:
      sharding = self.of_parameter(path, array.shape, config)
      if self.mesh is None or sharding is None:
        return jax.device_put(array)
      # A matrix in groups is divided by whole groups.
      axes = (
        axis if axis and size % self.mesh.shape[axis] == 0 else None
        for axis, size in zip(sharding.spec, array.shape, strict=False)
      )
      return jax.make_array_from_callback(
        array.shape,
        NamedSharding(sharding.mesh, PartitionSpec(*axes)),
        lambda index: array[index],
      )

    return jax.tree.map(put, matrix)

  def place(self, tree: Any) -> Any:
    """See `specdec.model.ModelSpec.place`."""
    if self.mesh is None:
      return tree
    return jax.tree.map(
      self._place,
      tree,
      is_leaf=lambda leaf: isinstance(leaf, cache_lib.KVCache),
    )

  def in_use(self) -> contextlib.AbstractContextManager[Any]:
    """Lets `sum_of_experts` know of the devices while a model is traced."""
    if self.mesh is None or not self.divides_weights:
      return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

  def gather_vocabulary(self, logits: jax.Array) -> jax.Array:
    """Divides `logits [B, L, V]` among the devices by rows alone.

    Constrains them to be divided by vocabulary first, as the head is; without
    this XLA may gather the head's weights.
    """
    if self.mesh is None:
      return logits
    names = ('rows', None, 'vocabulary')
    divided = self.sharding(names, logits.shape)
    return self.place(lax.with_sharding_constraint(logits, divided))

  def _place(self, leaf: Any) -> Any:
    if isinstance(leaf, cache_lib.KVCache):
      return leaf.replace(
        keys=tuple(map(leaf.ops.place, leaf.keys)),
        values=tuple(map(leaf.ops.place, leaf.values)),
        hidden=jax.tree.map(leaf.ops.place, leaf.hidden),
        length=self._place(leaf.length),
        recurrent=jax.tree.map(
          # States of heads are divided as keys are.
          lambda array: (leaf.ops.place if array.ndim == 4 else self._place)(
            array
          ),
          leaf.recurrent,
        ),
        marked=None if leaf.marked is None else self._place(leaf.marked),
      )
    sharding = self.sharding(('rows',), leaf.shape)
    return lax.with_sharding_constraint(leaf, sharding)


def make_layout(mesh: Mesh | Mapping[str, int] | None) -> Layout:
  """The layout of a target; for the mesh and the errors see `make_mesh`."""
  return Layout(None if mesh is None else make_mesh(mesh))


def draft_layout(
  layout: Layout, draft_mesh: str, layer_bytes: Callable[[], float]
) -> Layout:
  """The layout of a draft, on the devices of its target.

  Args:
    layout: of the target.
    draft_mesh: `replicated`: every device of the axis `model` has all weights,
      and sums nothing with others; `sharded`: as the target; `auto`: sharded if
      that is faster by its size.
    layer_bytes: returns the bytes of a layer of the draft; called if they are
      needed.

  Raises:
    ValueError: `draft_mesh` is not one of `DRAFT_MESHES`.
  """
  if draft_mesh not in DRAFT_MESHES:
    raise ValueError(
      f'draft_mesh={draft_mesh!r} is not known; choose from {DRAFT_MESHES}'
    )
  sharded = draft_mesh == 'sharded'
  if draft_mesh == 'auto' and layout.num_devices > 1:
    sharded = layer_bytes() > _BYTES_WORTH_SUMS
  return dataclasses.replace(layout, divides_weights=sharded)


def undivided(layout: Layout, config: Any) -> list[str]:
  """The parts of a model of this shape that are not divided, in words."""
  sizes = {
    'heads': config.num_heads,
    'kv_heads': config.num_kv_heads,
    'hidden': math.gcd(*np.atleast_1d(config.inner_width or 4 * config.width)),
  }
  return [
    f'{name}={size}'
    for name, size in sizes.items()
    if size % layout.parts(name)
  ]


def sum_of_experts(
  function: Callable[..., Any], experts: list[Any], hidden: int, *args: Any
) -> Any:
  """`function(experts, *args)`, summed over the parts of the hidden units.

  Each expert has its own loop, and the compiler would sum over the devices in
  every round. Here a device ends all loops with its part of the sum.

  Args:
    function: linear in what each hidden unit contributes.
    experts: for each its matrices `[hidden, width]`, `[hidden, width]` and
      `[width, hidden]`, each with a bias or None.
    hidden: the number of hidden units.
    *args: what every device has all of.
  """
  mesh = jax.sharding.get_abstract_mesh()
  num_parts = 1 if mesh.empty else mesh.shape[MODEL]
  if num_parts == 1 or hidden % num_parts:
    return function(experts, *args)

  def divided(axis: int, matrix: Any) -> Any:
    axes = lambda leaf: (
      MODEL if at == axis else None for at in range(leaf.ndim)
    )
    return jax.tree.map(lambda leaf: PartitionSpec(*axes(leaf)), matrix)

  specs = tuple(map(divided, (0, 0, 1), experts[0]))
  return jax.shard_map(
    lambda *args: lax.psum(function(*args), MODEL),
    in_specs=([specs] * len(experts), *(PartitionSpec() for _ in args)),
    out_specs=PartitionSpec(),
    axis_names={MODEL},
    check_vma=False,
  )(experts, *args)


@functools.cache
def slot_ops(layout: Layout) -> cache_lib.SlotOps:
  """`specdec.cache.SlotOps`, each device on its own rows and heads.

  As programs for all devices they would go from row to row and gather each of
  them from the device that has it.
  """
  if layout.mesh is None:
    return cache_lib.SlotOps()

  def by_parts(
    function: Callable[..., jax.Array],
    in_names: tuple[_Names, ...],
    out_names: _Names,
  ) -> Callable[..., jax.Array]:
    def run(*args: jax.Array) -> jax.Array:
      return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=tuple(
          layout.spec(names, array.shape)
          for names, array in zip(in_names, args, strict=True)
        ),
        out_specs=layout.spec(out_names, args[0].shape),
        check_vma=False,
      )(*args)

    return run

  rows = ('rows',)

  def read(slots: jax.Array, start: jax.Array, number: int) -> jax.Array:
    take = functools.partial(cache_lib.read_slots, number=number)
    return by_parts(take, (_CACHE, rows), _CACHE)(slots, start)

  def mask(start: jax.Array, window: jax.Array, num_slots: int) -> jax.Array:
    make = functools.partial(cache_lib.window_mask, num_slots=num_slots)
    return by_parts(make, (rows, rows), rows)(start, window)

  def place(slots: jax.Array) -> jax.Array:
    sharding = layout.sharding(_CACHE, slots.shape)
    return lax.with_sharding_constraint(slots, sharding)

  return cache_lib.SlotOps(
    write=by_parts(cache_lib.write_slots, (_CACHE, _CACHE, rows), _CACHE),
    read=read,
    mask=mask,
    place=place,
  )
