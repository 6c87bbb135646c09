"""Matrices in blocks of few bits, as GGUF files have them.

A weight is `f q - o` or `f (q - c)`: an integer q without sign, a scale f and a
minimum o of a group of 16 or 32 inputs, or an offset c of the kind (ggml-quants
of github.com/ggml-org/llama.cpp; `gguf.quants` is the same in Python). Here a
matrix is held in words of 32 bits, block by block, with the same bits as in the
file:

    kind              inputs  a block has
    Q4_0, Q5_0, Q8_0  128     scales of four groups, fifth bits, q
    Q4_1, Q5_1        128     scales and minima of four groups, fifth bits, q
    MXFP4             128     exponents of four groups, q
    Q4_K, Q5_K        256     what it has in the file
    Q6_K              256     what it has in the file, and two bytes

A q of MXFP4 is the number of a value, twice a float of four bits. Inputs are
padded with groups whose scale is zero. `cpu/blocks.h` multiplies these words in
a `matrices.PackedMatrix`; XLA multiplies a `GroupedMatrix`.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.models.nn import contraction

Rows = tuple[slice | np.ndarray, np.ndarray]
"""Indices of n rows, and these rows `[n, in]`; of a vector `[n]`."""

_ROWS = 4096  # Rows that are read at once.


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of blocks.

  Attributes:
    number: in GGUF.
    inputs: of a block here.
    fields: bytes of the parts of a block of the file, by name.
    offset: c, of kinds without minima.
    code_dtype: of q or q - c in `GroupedMatrix`.
  """

  number: int
  inputs: int
  fields: dict[str, int]
  offset: int = 0
  code_dtype: Any = np.int8

  @property
  def bytes(self) -> int:
    """The number of bytes of a block in the file."""
    return sum(self.fields.values())

  @property
  def file_inputs(self) -> int:
    """Inputs of a block of the file."""
    return min(self.inputs, 32) if self.inputs == 128 else self.inputs

  @property
  def words(self) -> int:
    """The number of words of a block here, of 32 bits."""
    return -(-self.bytes * (self.inputs // self.file_inputs) // 4)

  @property
  def factors(self) -> slice:
    """Which words of a block here have its scales and minima in float16."""
    start = 0
    for name, size in self.fields.items():
      if name in ('e', 'd', 'dm'):
        break
      start += size
    together = self.inputs // self.file_inputs
    return slice(start // 4, start // 4 + -(-size * together // 4))

  def blocks(self, width: int) -> int:
    """The number of blocks of `width` inputs here."""
    return -(-width // self.inputs)


KINDS = {
  'Q4_0': Kind(2, 128, {'d': 2, 'q': 16}, 8, jnp.int4),
  'Q4_1': Kind(3, 128, {'dm': 4, 'q': 16}, 0, jnp.uint4),
  'Q5_0': Kind(6, 128, {'d': 2, 'high': 4, 'q': 16}, 16),
  'Q5_1': Kind(7, 128, {'dm': 4, 'high': 4, 'q': 16}),
  'Q8_0': Kind(8, 128, {'d': 2, 'q': 32}, 128),
  'Q4_K': Kind(12, 256, {'dm': 4, 'scales': 12, 'q': 128}, 0, jnp.uint4),
  'Q5_K': Kind(13, 256, {'dm': 4, 'scales': 12, 'high': 32, 'q': 128}),
  'MXFP4': Kind(39, 128, {'e': 1, 'q': 16}),
  'Q6_K': Kind(14, 256, {'q': 128, 'high': 64, 'scales': 16, 'd': 2}, 32),
}
"""Kinds by their names in GGUF."""

# Twice the floats of four bits (OCP Microscaling Formats 1.0, section 5.3.3).
_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_MOST_EXPONENT = 252  # Twelve times its scale is finite.


def check_finite(words: np.ndarray, kind: str) -> None:
  """Checks the scales and minima of a matrix on the host.

  Kernels, XLA and look-ups of rows treat infinite scales and NaN differently.

  Args:
    words: `[..., blocks, words]` uint32, see `to_words`.
    kind: a key of `KINDS`.

  Raises:
    ValueError: one of them is infinite or NaN.
  """
  factors = np.ascontiguousarray(words[..., KINDS[kind].factors])
  if kind == 'MXFP4':
    is_finite = factors.view(np.uint8) <= _MOST_EXPONENT
  else:
    is_finite = np.isfinite(factors.view(np.float16))
  if not is_finite.all():
    raise ValueError(
      f'a block of {kind} has a scale that is not finite; the file is damaged'
    )


def _spread_fifth_bits(bits: np.ndarray) -> np.ndarray:
  """Moves bit `4 j + b` of words to bit j of their byte b."""
  words = np.zeros_like(bits)
  for byte in range(4):
    part = bits >> np.uint32(byte) & np.uint32(0x11111111)
    for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0x000000FF)):
      part = (part | part >> np.uint32(shift)) & np.uint32(mask)
    words |= part << np.uint32(8 * byte)
  return words


def to_words(raw: np.ndarray, kind: str, width: int) -> np.ndarray:
  """Rows of a file in the words of this module.

  Args:
    raw: `[n, bytes]` uint8, rows of whole blocks.
    kind: a key of `KINDS`.
    width: inputs of a row.

  Returns:
    `[n, blocks, words]` uint32.
  """
  facts = KINDS[kind]
  count, blocks = len(raw), facts.blocks(width)
  if facts.inputs == 256:
    blocks_of_words = raw.reshape(count, blocks, facts.bytes)
    if facts.bytes % 4:
      blocks_of_words = np.pad(
        blocks_of_words, ((0, 0), (0, 0), (0, -facts.bytes % 4))
      )
    return np.ascontiguousarray(blocks_of_words).view(np.uint32)
  together = facts.inputs // facts.file_inputs
  padded = np.zeros((count, blocks * together, facts.bytes), np.uint8)
  padded[:, : -(-width // facts.file_inputs)] = raw.reshape(
    count, -1, facts.bytes
  )
  fields, start = [], 0
  for name, size in facts.fields.items():
    part = np.ascontiguousarray(padded[..., start : start + size])
    part = part.reshape(count, blocks, -1).view(np.uint32)
    if name == 'high':
      part = _spread_fifth_bits(part)
    if kind == 'Q8_0' and name == 'q':
      part ^= np.uint32(0x80808080)
    fields.append(part)
    start += size
  return np.concatenate(fields, axis=-1)


# Integers, scales and minima: arrays of NumPy or JAX.
_Parts = tuple[Any, Any, Any]


def _shifted(words: Any, by: Sequence[int], axis: int = -1) -> Any:
  """Words `[..., 1, ...]` shifted down by several numbers, along an axis."""
  shape = [1] * words.ndim
  shape[axis] = len(by)
  return words >> np.array(by, np.uint32).reshape(shape)


def _bytes_of(words: Any) -> Any:
  """The bytes of words `[..., n]`, as int32 `[..., 4 n]`."""
  values = _shifted(words[..., None], (0, 8, 16, 24)) & np.uint32(0xFF)
  return values.astype(np.int32).reshape(*words.shape[:-1], -1)


def _halves(words: Any, xp: Any) -> Any:
  """The float16 in the lower halves, as float32 to the last bit.

  Not a conversion of XLA's, which on CPU takes denormal numbers for zero.
  """
  bits = words & np.uint32(0x7FFF)
  large = (bits << np.uint32(13)) + np.uint32(112 << 23)
  if xp is np:
    large = large.view(np.float32)
  else:
    large = lax.bitcast_convert_type(large, np.float32)
  tiny = bits.astype(np.int32).astype(np.float32) * np.float32(2.0**-24)
  size = xp.where(bits < np.uint32(0x400), tiny, large)
  return xp.where(words & np.uint32(0x8000), -size, size)


def _powers(exponents: Any, xp: Any) -> Any:
  """2 to the power of `exponents - 128`, and 0 where these are below 2."""
  bits = xp.where(exponents < 2, 0, (exponents - 1) << 23)
  if xp is np:
    return bits.astype(np.int32).view(np.float32)
  return lax.bitcast_convert_type(bits, np.float32)


def _small(words: Any, facts: Kind, xp: Any) -> _Parts:
  """q, scales and minima of kinds with blocks of 32 inputs in the file."""
  head, nibbles = words[..., :2], np.uint32(0x0F0F0F0F)
  lead = words.shape[:-1]
  if 'e' in facts.fields:
    head = words[..., :1]
    scale, minimum = _powers(_bytes_of(head), xp), None
  elif 'dm' in facts.fields:
    head = words[..., :4]
    scale, minimum = _halves(head, xp), -_halves(head >> np.uint32(16), xp)
  else:
    scale, minimum = _halves(_shifted(head[..., None], (0, 16)), xp), None
    scale = scale.reshape(*lead, 4)
  rest = words[..., head.shape[-1] :]
  if facts.fields['q'] == 32:
    return _bytes_of(rest), scale, minimum
  low = rest[..., -16:].reshape(*lead, 4, 1, 4)
  q = (_shifted(low, (0, 4), -2) & nibbles).reshape(*lead, 4, 8)
  if 'high' in facts.fields:
    bits = _shifted(rest[..., :4, None], range(8))
    q |= (bits & np.uint32(0x01010101)) << np.uint32(4)
  q = _bytes_of(q.reshape(*lead, 32))
  if 'e' in facts.fields:
    q = xp.asarray(_FLOAT4, np.int32)[q]
  return q, scale, minimum


def _with_six_bits(words: Any, facts: Kind, xp: Any) -> _Parts:
  """q, scales and minima of Q4_K and Q5_K."""
  lead = words.shape[:-1]
  first, second, third = (words[..., i : i + 1] for i in (1, 2, 3))
  nibbles, upper = np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
  six, two, four = np.uint32(0x3F3F3F3F), np.uint32(2), np.uint32(4)
  pack = lambda *arrays: _bytes_of(xp.concatenate(arrays, -1))
  scales = pack(first & six, third & nibbles | first >> two & upper)
  minima = pack(second & six, third >> four & nibbles | second >> two & upper)
  scale = _halves(words[..., :1], xp) * scales.astype(np.float32)
  minimum = _halves(words[..., :1] >> np.uint32(16), xp)
  minimum = minimum * minima.astype(np.float32)
  low = words[..., -32:].reshape(*lead, 4, 1, 8)
  q = (_shifted(low, (0, 4), -2) & nibbles).reshape(*lead, 8, 8)
  if 'high' in facts.fields:
    bits = _shifted(words[..., None, 4:12], range(8), -2)
    q |= (bits & np.uint32(0x01010101)) << four
  return _bytes_of(q.reshape(*lead, 64)), scale, minimum


def _by_sixteens(words: Any, facts: Kind, xp: Any) -> _Parts:
  """q, scales and minima of Q6_K, which has none."""
  lead = words.shape[:-1]
  low = words[..., :32].reshape(*lead, 2, 1, 16)
  low = _shifted(low, (0, 4), -2) & np.uint32(0x0F0F0F0F)
  high = words[..., 32:48].reshape(*lead, 2, 1, 8)
  high = _shifted(high, (0, 2, 4, 6), -2) & np.uint32(0x03030303)
  high = high << np.uint32(4)
  q = low.reshape(*lead, 64) | high.reshape(*lead, 64)
  scales = _bytes_of(words[..., 48:52])
  signed = scales - 2 * (scales & 128)
  scale = _halves(words[..., 52:53], xp) * signed.astype(np.float32)
  return _bytes_of(q), scale, None


def _read(words: Any, kind: str, xp: Any) -> _Parts:
  """Integers and factors of the weights `code * scale - minimum`.

  Returns:
    `[..., blocks, inputs]` int32, and twice `[..., blocks, groups]` float32 or,
    of a kind without minima, None.
  """
  facts = KINDS[kind]
  read = _small if facts.inputs == 128 else _with_six_bits
  read = _by_sixteens if kind == 'Q6_K' else read
  q, scale, minimum = read(words, facts, xp)
  return q.reshape(*scale.shape[:-1], -1) - facts.offset, scale, minimum


def _weights(codes: Any, scale: Any, minimum: Any) -> Any:
  """Weights `[..., n, inputs]` float32 of n groups, of codes of that shape.

  Products of codes and scales are exact, so it makes no difference whether a
  compiler rounds them before it subtracts the minimum.
  """
  values = codes.astype(np.float32) * scale[..., None]
  return values if minimum is None else values - minimum[..., None]


def expand(words: Any, kind: str, width: int, xp: Any = jnp) -> Any:
  """The weights of rows.

  Args:
    words: `[..., blocks, words]` uint32.
    kind: a key of `KINDS`.
    width: inputs of a row.
    xp: `jax.numpy` or `numpy`.

  Returns:
    `[..., width]` float32.
  """
  codes, scale, minimum = _read(words, kind, xp)
  values = _weights(codes.reshape(*scale.shape, -1), scale, minimum)
  return values.reshape(*words.shape[:-2], -1)[..., :width]


class GroupedMatrix(flax.struct.PyTreeNode):
  """A matrix as XLA multiplies it; see `matrices.Matrix`.

  Compilers for GPUs and TPUs can compute its weights within a product. They
  cannot do that with the words of a file (docs/accelerators.md).

  Attributes:
    codes: `[out, inputs of whole blocks]`, as `code_dtype` of the kind.
    scales: `[out, groups]` float32.
    minima: the same, or None for a kind without.
    width: the number of inputs.
    dtype: the format it was loaded in.
  """

  codes: Any
  scales: Any
  minima: Any
  width: int = flax.struct.field(pytree_node=False)
  dtype: str = flax.struct.field(pytree_node=False)

  @property
  def shape(self) -> tuple[int, ...]:
    return (self.codes.shape[0], self.width)

  def product(self, rows: jax.Array) -> jax.Array:
    """See `Matrix`; weights and rows are rounded to bfloat16."""
    # Tied to the rows, which change in a loop, so that no compiler computes the
    # weights before the loop.
    held, rows = lax.optimization_barrier((self, rows))
    codes = held.codes.reshape(*held.scales.shape, -1)
    weights = _weights(codes, held.scales, held.minima).astype(jnp.bfloat16)
    missing = held.codes.shape[1] - self.width
    rows = jnp.pad(rows.astype(jnp.bfloat16), ((0, 0), (0, missing)))
    rows = rows.reshape(-1, *codes.shape[1:])
    return contraction.rows_matmul(rows, weights)

  def take(self, index: jax.Array) -> jax.Array:
    rows = jax.tree.map(lambda leaf: leaf[index], self)
    codes = rows.codes.reshape(*rows.scales.shape, -1)
    values = _weights(codes, rows.scales, rows.minima)
    return values.reshape(*index.shape, -1)[..., : self.width]

  def unpacked(self) -> Any:
    return self.codes


class BlockMatrix(flax.struct.PyTreeNode):
  """A matrix `[out, in]` on the host, in the words of this module.

  Attributes:
    words: `[out, blocks, words]` uint32, see `to_words`.
    kind: a key of `KINDS`.
    width: the number of inputs.
    dtype: the format it was loaded in.
  """

  words: Any
  kind: str = flax.struct.field(pytree_node=False)
  width: int = flax.struct.field(pytree_node=False)
  dtype: str = flax.struct.field(pytree_node=False)

  @property
  def shape(self) -> tuple[int, ...]:
    return (self.words.shape[0], self.width)

  def grouped(self) -> GroupedMatrix:
    """The matrix as XLA multiplies it."""
    facts = KINDS[self.kind]
    count, blocks = self.words.shape[:2]
    codes: Any = np.empty((count, blocks * facts.inputs), facts.code_dtype)
    scales, minima = list[np.ndarray](), list[np.ndarray]()
    for start in range(0, count, _ROWS):
      part = self.words[start : start + _ROWS]
      part_codes, scale, minimum = _read(part, self.kind, np)
      codes[start : start + _ROWS] = part_codes.reshape(len(part), -1)
      scales.append(scale.reshape(len(part), -1))
      if minimum is not None:
        minima.append(minimum.reshape(len(part), -1))
    return GroupedMatrix(
      codes=codes,
      scales=np.concatenate(scales),
      minima=np.concatenate(minima) if minima else None,
      width=self.width,
      dtype=self.dtype,
    )


def from_raw(
  blocks: Iterable[Rows],
  shape: tuple[int, ...],
  kind: str,
  dtype: str = 'stored',
) -> BlockMatrix:
  """A matrix on the host of the rows of a file.

  Args:
    blocks: indices of n rows, and these rows as in `to_words`.
    shape: `(out, in)`.
    kind: a key of `KINDS`.
    dtype: the format that it belongs to.

  Raises:
    ValueError: a scale is not finite.
  """
  facts = KINDS[kind]
  words: Any = np.empty(
    (shape[0], facts.blocks(shape[1]), facts.words), np.uint32
  )
  for index, raw in blocks:
    part = to_words(raw, kind, shape[1])
    check_finite(part, kind)
    words[index] = part
  return BlockMatrix(words=words, kind=kind, width=shape[1], dtype=dtype)
