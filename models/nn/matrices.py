"""Matrices of weights: their formats, products and rows.

Weights are stored `[out, in]` and contracted over their last axis, with float32
results for every format: on CPU this is by far the fastest way to multiply a
few bfloat16 rows (docs/cpu_kernels.md has more).

A module holds an array of floats or another `Matrix`, by the `WeightFormat` it
was loaded in. Another format is a class here, one for the kernels of
`models/nn/cpu` if they have it, and an entry of `FORMATS`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import contraction
from specdec.models.nn import four_bits
from specdec.models.nn.cpu import huge_pages
from specdec.models.nn.cpu import ops

# -128 has no counterpart, so rounding is symmetric without it.
_LARGEST = 127.0

# The sizes of packed matrices, see `formats.h`.
_LANES = 16  # Outputs of a register; a group has two registers.
_GROUP = 2 * _LANES
_WORDS = 16  # Per tile of the matrix unit; a matrix has a multiple.

Blocks = Iterable[blocks_lib.Rows]
"""The rows of a matrix or vector, one block after another."""


@runtime_checkable
class Matrix(Protocol):
  """A matrix `[out, in]` of weights, a pytree.

  Attributes:
    shape: `(out, in)`.
    dtype: the name of its format, a key of `FORMATS`.
  """

  @property
  def shape(self) -> tuple[int, ...]: ...

  @property
  def dtype(self) -> str: ...

  def product(self, rows: jax.Array) -> jax.Array:
    """`rows @ matrix.T`, `[n, out]` float32, of `[n, in]` of any float."""

  def take(self, index: jax.Array) -> jax.Array:
    """Rows `[..., in]` float32 for `index [...]`."""

  def unpacked(self) -> Any:
    """The stored numbers `[out, in]`, without scales."""


Weight = jax.Array | Matrix
"""A matrix `[out, in]`: an array of floats, or one in another format."""


def quantize_rows(rows: Any, xp: Any = jnp) -> tuple[Any, Any]:
  """Rounds each row to integers times a scale.

  Args:
    rows: `[n, k]` float32.
    xp: `jax.numpy` or `numpy`.

  Returns:
    `[n, k]` int8 and `[n]` float32. The scale of a row that is not finite is
    not finite either, and so are the products of that row.
  """
  # NaN as inf: a maximum of XLA's CPU backend drops NaN in long rows.
  sizes = xp.where(xp.isnan(rows), xp.inf, xp.abs(rows))
  scale = xp.max(sizes, axis=1) / _LARGEST
  # The scale of a tiny row may be 0, as denormal numbers are.
  scale = xp.where(scale == 0.0, 1.0, scale)
  return xp.round(rows / scale[:, None]).astype(xp.int8), scale


class FloatMatrix(flax.struct.PyTreeNode):
  """An array of floats `[out, in]` with the methods of a `Matrix`."""

  values: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  @property
  def dtype(self) -> str:
    return self.values.dtype.name

  def product(self, rows: jax.Array) -> jax.Array:
    return contraction.linear(rows.astype(self.values.dtype), self.values)

  def take(self, index: jax.Array) -> jax.Array:
    take = lambda values, index: values[index].astype(jnp.float32)
    if self.values.dtype == jnp.float32:
      return take(self.values, index)
    # XLA's CPU backend gathers 16-bit floats as float32. In a loop it converts
    # the whole matrix, once, before the loop (933 MB for 151,936 rows of
    # 1,536). A barrier ties the matrix to the index, which changes in the loop,
    # so that rows are converted when they are gathered.
    return lax.platform_dependent(
      self.values,
      index,
      cpu=lambda *args: take(*lax.optimization_barrier(args)),
      default=take,
    )

  def unpacked(self) -> jax.Array:
    return self.values


class Int8Matrix(flax.struct.PyTreeNode):
  """A matrix in eight bits.

  Attributes:
    values: `[out, in]` int8, between -127 and 127.
    scale: `[out]` float32, positive.
  """

  values: jax.Array
  scale: jax.Array
  dtype = 'int8'

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  def product(self, rows: jax.Array) -> jax.Array:
    """See `Matrix`; sums are exact, so a row does not depend on the others."""
    values, scale = quantize_rows(rows.astype(jnp.float32))
    product = contraction.rows_matmul(values, self.values)
    scales = scale[:, None] * self.scale[None]
    return product.astype(jnp.float32) * scales

  def take(self, index: jax.Array) -> jax.Array:
    return self.values[index] * self.scale[index][..., None]

  def unpacked(self) -> jax.Array:
    return self.values


class PackedMatrix(flax.struct.PyTreeNode):
  """A matrix as the kernels read it.

  Attributes:
    words: `[ceil(out / 32), n, 2, m, 16]` uint32, of 16 outputs next to one
      another n blocks of m words. A block of floats or int8 is a word: g
      consecutive weights (g is 1, 2 or 4). Int8 is 128 larger.
    scale: `[out]` float32 of int8, or None.
    shape: the shape `(out, in)` of the matrix.
    dtype: the format.
    kind: a key of `blocks.KINDS`, or None of floats and int8.
  """

  words: jax.Array
  scale: jax.Array | None
  shape: tuple[int, int] = flax.struct.field(pytree_node=False)
  dtype: str = flax.struct.field(pytree_node=False)
  kind: str | None = flax.struct.field(pytree_node=False)

  @property
  def kernel(self) -> str:
    """The name for `ops.multiply`."""
    return 'blocks' if self.kind else self.dtype

  def product(self, rows: jax.Array) -> jax.Array:
    """See `Matrix`; rows of blocks are rounded to eight bits by 128 inputs.

    Those of other formats are rounded as by the unpacked matrix.
    """
    return multiply_packed(rows.astype(jnp.float32), [self], [None])

  def take(self, index: jax.Array) -> jax.Array:
    group, within = index // _GROUP, index % _GROUP
    words = self.words[group, :, within // _LANES, :, within % _LANES]
    if self.kind:
      return blocks_lib.expand(words, self.kind, self.shape[1])
    if self.dtype == 'int8':
      words ^= jnp.uint32(0x80808080)
    values = jax.lax.bitcast_convert_type(words, self.dtype)
    values = values.reshape(*index.shape, -1)[..., : self.shape[1]]
    rows = values.astype(jnp.float32)
    if self.scale is not None:
      # Not a product of XLA's, which may round it together with a sum that
      # follows, or not, by the shape.
      flat = rows.reshape(-1, self.shape[1])
      each = jnp.arange(index.size, dtype=jnp.int32)[:, None]
      scale = self.scale[index].reshape(-1, 1)
      rows = ops.sum_rows(flat, each, scale).reshape(rows.shape)
    return rows

  def unpacked(self) -> np.ndarray:
    words = np.array(self.words)
    if self.dtype == 'int8':
      words ^= np.uint32(0x80808080)
    rows = words.transpose(0, 2, 4, 1, 3).reshape(-1, *words.shape[1::2])
    if self.kind:
      return np.ascontiguousarray(rows[: self.shape[0]])
    values = np.ascontiguousarray(rows[:, :, 0]).view(jnp.dtype(self.dtype))
    num_outputs, num_inputs = self.shape
    return np.ascontiguousarray(values[:num_outputs, :num_inputs])


def scatter_outputs(some: jax.Array, index: jax.Array) -> jax.Array:
  """All outputs `[..., out]` from `some [..., N]`; the others are -inf.

  `index`: `[out]` int32, the place of each output among the N, or -1.
  """
  taken = jnp.take(some, jnp.maximum(index, 0), axis=-1)
  is_there = jnp.expand_dims(index >= 0, range(some.ndim - 1))
  return jnp.where(is_there, taken, -jnp.inf)


def index_of(ids: np.ndarray, size: int) -> np.ndarray:
  """`[size]` int32, the place of each number among `ids [N]`, or -1."""
  index = np.full(size, -1, np.int32)
  index[ids] = np.arange(len(ids))
  return index


class FewOutputs(flax.struct.PyTreeNode):
  """A head that computes some of its outputs; the others are -inf.

  The draft vocabulary of FR-Spec (arXiv 2502.14856) and of EAGLE-3.

  Attributes:
    outputs: the matrix `[N, in]` of the outputs that are computed.
    index: see `scatter_outputs`.
    rows: the matrix `[out, in]` whose rows are looked up where the token
      embedding is the head, or None.
  """

  outputs: Any
  index: Any
  rows: Any = None

  @property
  def shape(self) -> tuple[int, ...]:
    return (*self.index.shape, self.outputs.shape[1])

  @property
  def dtype(self) -> str:
    return _as_matrix(self.outputs).dtype

  def product(self, rows: jax.Array) -> jax.Array:
    return scatter_outputs(_as_matrix(self.outputs).product(rows), self.index)

  def take(self, index: jax.Array) -> jax.Array:
    return _as_matrix(self.rows).take(index)

  def unpacked(self) -> Any:
    raise ValueError('a head that computes few outputs cannot be saved')


def few_outputs(
  matrix: Any, ids: np.ndarray, *, is_embedding: bool
) -> FewOutputs:
  """A head on the host that computes the outputs `ids [N]`.

  Args:
    matrix: `[out, in]`, an array of floats or another unpacked `Matrix`.
    ids: the outputs.
    is_embedding: whether rows of the matrix are looked up as well.
  """
  return FewOutputs(
    outputs=jax.tree.map(lambda leaf: leaf[ids], matrix),
    index=index_of(ids, matrix.shape[0]),
    rows=matrix if is_embedding else None,
  )


def computed(matrix: Weight) -> Weight:
  """The arrays that a product with a matrix reads."""
  return matrix.outputs if isinstance(matrix, FewOutputs) else matrix


def _as_matrix(weight: Any) -> Any:
  """A matrix as it is; an array with the methods of a `Matrix`."""
  is_array = isinstance(weight, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
  return FloatMatrix(weight) if is_array else weight


def matmul(x: jax.Array, weight: Weight) -> jax.Array:
  """`x @ weight.T` over the last axis, in the format of the weights.

  Args:
    x: `[..., in]` of any float dtype; rounded as the format needs it.
    weight: `[out, in]`, an array of floats or another `Matrix`.

  Returns:
    `[..., out]` float32.
  """
  out = _as_matrix(weight).product(x.reshape(-1, x.shape[-1]))
  return out.reshape(*x.shape[:-1], weight.shape[0])


def are_one_call(matrices: Sequence[Weight]) -> bool:
  """Whether one call of `multiply_packed` takes all of these matrices."""
  packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
  return len(packed) == len(matrices) and len({m.kernel for m in packed}) == 1


def multiply_packed(
  x: jax.Array,
  matrices: Sequence[PackedMatrix],
  biases: Sequence[jax.Array | None],
  **options: Any,
) -> jax.Array:
  """`ops.multiply` of packed matrices of one kernel, with its options."""
  operands = [
    ops.Matrix(
      matrix.words,
      matrix.scale,
      matrix.shape[0],
      bias,
      blocks_lib.KINDS[matrix.kind].number if matrix.kind else 0,
    )
    for matrix, bias in zip(matrices, biases, strict=True)
  ]
  return ops.multiply(x, operands, dtype=matrices[0].kernel, **options)


def take_rows(weight: Weight, index: jax.Array) -> jax.Array:
  """Rows `[..., in]` float32 of a matrix `[out, in]`, for `index [...]`."""
  matrix = _as_matrix(weight)
  alone = index.size == 1 and not jax.sharding.get_abstract_mesh().empty
  if not alone:
    return matrix.take(index)

  def twice(matrix: Matrix, index: jax.Array) -> jax.Array:
    rows = matrix.take(jnp.broadcast_to(index.ravel(), 2))
    return rows[0].reshape(*index.shape, -1)

  # The compiler for GPUs makes a slice of the lookup of a single row, for which
  # it gathers a matrix that is divided among devices.
  take = lambda matrix, index: matrix.take(index)
  return lax.platform_dependent(matrix, index, cuda=twice, default=take)


def _words_of(rows: np.ndarray, blocks: int, words: int) -> np.ndarray:
  """`PackedMatrix.words` of rows `[out, ...]`, padded with zeros."""
  rows = rows.reshape(len(rows), -1)
  groups = -(-len(rows) // _GROUP)
  packed = huge_pages.zeros((groups, blocks, 2, words, _LANES))
  width = blocks * words * 4 // rows.dtype.itemsize
  for group in range(groups):
    some = rows[group * _GROUP : (group + 1) * _GROUP]
    padded = np.zeros((_GROUP, width), rows.dtype)
    padded[: len(some), : some.shape[1]] = some
    lanes = padded.view(np.uint32).reshape(2, _LANES, blocks, words)
    packed[group] = lanes.transpose(2, 0, 3, 1)
  return packed


def pack(weight: Any) -> Any:
  """A matrix on the host as the kernels read it, or as it is if they cannot."""
  if isinstance(weight, FewOutputs):
    rows = None if weight.rows is None else pack(weight.rows)
    return weight.replace(outputs=pack(weight.outputs), rows=rows)
  if not FORMATS[_as_matrix(weight).dtype].has_kernels:
    return weight
  scale: jax.Array | None = None
  kind: str | None = None
  if isinstance(weight, blocks_lib.BlockMatrix):
    kind = weight.kind
    words = _words_of(np.asarray(weight.words), *weight.words.shape[1:])
  else:
    is_int8 = isinstance(weight, Int8Matrix)
    values = np.asarray(weight.values if is_int8 else weight)
    per_word = 4 // values.dtype.itemsize
    num_words = -(-values.shape[1] // (_WORDS * per_word)) * _WORDS
    words = _words_of(values, num_words, 1)
    if is_int8:
      words ^= np.uint32(0x80808080)
      scale = jnp.asarray(weight.scale)
  return PackedMatrix(
    words=jax.device_put(words),  # As it lies, without a copy.
    scale=scale,
    shape=weight.shape,
    dtype=_as_matrix(weight).dtype,
    kind=kind,
  )


def for_xla(weight: Any) -> Any:
  """A matrix on the host as XLA multiplies it."""
  is_blocks = lambda leaf: isinstance(leaf, blocks_lib.BlockMatrix)
  grouped = lambda leaf: leaf.grouped() if is_blocks(leaf) else leaf
  return jax.tree.map(grouped, weight, is_leaf=is_blocks)


def as_operand(weight: Any, *, packed: bool) -> Any:
  """A parameter on the host as the kernels or XLA read it."""
  if packed and len(weight.shape) == 2:
    return pack(weight)
  return weight if packed else for_xla(weight)


def unpack(weight: Weight) -> jax.Array | np.ndarray:
  """The stored numbers `[out, in]` of a matrix, without scales."""
  return _as_matrix(weight).unpacked()


def quantize(matrix: np.ndarray) -> Int8Matrix:
  """Rounds a matrix `[out, in]` row by row; its arrays are on the host.

  Raises:
    ValueError: the matrix has a weight that is not finite.
  """
  matrix = np.asarray(matrix, np.float32)
  if not np.isfinite(matrix).all():
    raise ValueError('a matrix has weights that are not finite')
  values, scale = quantize_rows(matrix, np)
  return Int8Matrix(values=values, scale=scale.astype(np.float32))


def quantize_blocks(blocks: Blocks, shape: tuple[int, ...]) -> Int8Matrix:
  """`quantize` of a matrix whose rows come one block after another.

  Args:
    blocks: of the rows.
    shape: `(out, in)`.

  Raises:
    ValueError: the matrix has a weight that is not finite.
  """
  values: Any = np.empty(shape, np.int8)
  scale: Any = np.empty(shape[0], np.float32)
  for index, rows in blocks:
    part = quantize(rows)
    values[index], scale[index] = part.values, part.scale
  return Int8Matrix(values=values, scale=scale)


def fill(blocks: Blocks, shape: tuple[int, ...], *, dtype: Any) -> np.ndarray:
  """An array on the host whose rows come one block after another."""
  array = np.empty(shape, dtype)
  for index, rows in blocks:
    array[index] = rows
  return array


@dataclasses.dataclass(frozen=True)
class WeightFormat:
  """A format in which the matrices of a model may be loaded.

  Attributes:
    name: what `dtype` calls it.
    float_dtype: of the KV cache, and of parameters that are no matrices of this
      format; norms are always float32.
    bytes_per_weight: in memory.
    from_rows: makes a matrix on the host, of `(blocks, shape)`; raises
      ValueError if a weight cannot be rounded.
    of_head: the same for the token embedding and the head; None: `from_rows`.
    keeps_blocks: whether a matrix in blocks of few bits stays as it is stored.
    has_kernels: whether the kernels of `models/nn/cpu` multiply it.
  """

  name: str
  float_dtype: str
  bytes_per_weight: float
  from_rows: Callable[[Blocks, tuple[int, ...]], Any]
  of_head: Callable[[Blocks, tuple[int, ...]], Any] | None = None
  keeps_blocks: bool = False
  has_kernels: bool = True

  @property
  def is_float(self) -> bool:
    """Whether the matrices are plain arrays."""
    return self.name == self.float_dtype


STORED = 'stored'
"""The format of matrices that stay as a GGUF file has them."""


def _floats(name: str, **options: Any) -> WeightFormat:
  dtype = jnp.dtype(name)
  make = functools.partial(fill, dtype=dtype)
  return WeightFormat(name, name, dtype.itemsize, make, **options)


_FORMATS = (
  _floats('float32'),
  _floats('bfloat16'),
  _floats('float16', has_kernels=False),
  WeightFormat('int8', 'bfloat16', 1, quantize_blocks),
  WeightFormat(
    'int4',
    'bfloat16',
    0.5625,
    four_bits.quantize_blocks,
    functools.partial(four_bits.quantize_blocks, is_head=True),
  ),
  # Matrices without blocks are in bfloat16; the others usually have four bits.
  WeightFormat(
    STORED,
    'bfloat16',
    0.5625,
    functools.partial(fill, dtype=jnp.dtype('bfloat16')),
    keeps_blocks=True,
  ),
)
FORMATS = {form.name: form for form in _FORMATS}
"""The formats that weights may be loaded as, by name."""

DTYPES = tuple(FORMATS)
"""Their names, which are the values of `dtype`."""

KERNEL_DTYPES = tuple(form.name for form in _FORMATS if form.has_kernels)
"""Names of the formats that the kernels of `models/nn/cpu` multiply."""


def format_of(dtype: jax.typing.DTypeLike) -> WeightFormat:
  """The format of a name or dtype; ValueError if there is none."""
  try:
    name = jnp.dtype(dtype).name
  except TypeError:  # Not every format is a dtype of JAX.
    name = str(dtype)
  if name not in FORMATS:
    raise ValueError(f'dtype={name} is not known; choose from {DTYPES}')
  return FORMATS[name]
