"""Reads the text of a compiled XLA program.

The text is one computation after another, each a list of instructions in the
order in which they run:

    %body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
      %x = f32[8]{0} get-tuple-element(%arg), index=1
      ROOT %sum = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
    }

Nothing here knows a device, and nothing needs JAX.
"""

import dataclasses
import functools
import math
import re

_BYTES = {
  'pred': 1,
  's4': 0.5,
  'u4': 0.5,
  'token': 0,
  'opaque': 0,
  'bf16': 2,
  'f8e4m3fn': 1,
  'f8e5m2': 1,
}
_ARRAY = re.compile(r'([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?')
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = ')
_COMMENT = re.compile(r'/\*.*?\*/')
_NAME = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(
  r'(body|condition|calls|to_apply|true_computation|false_computation'
  r'|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)'
)


@dataclasses.dataclass(frozen=True)
class Array:
  """The shape of one array, as it lies in memory.

  Attributes:
    element: type of the elements, such as `bf16`.
    dims: sizes.
    layout: what stands in braces, such as `1,0:T(8,128)S(1)`; may be empty.
  """

  element: str
  dims: tuple[int, ...]
  layout: str = ''

  @property
  def memory_space(self) -> int:
    """0 is the device's main memory; others are on the chip or on the host."""
    found = re.search(r'S\((\d+)\)', self.layout)
    return int(found.group(1)) if found else 0

  @property
  def num_bytes(self) -> int:
    """With the padding to whole tiles that the layout asks for."""
    size = _BYTES.get(self.element)
    if size is None:
      size = int(re.sub(r'\D', '', self.element) or 8) / 8
    return math.ceil(size * math.prod(self._padded()))

  def _padded(self) -> list[int]:
    dims = list(self.dims)
    tile = re.search(r'T\(([\d,]+)\)', self.layout)
    if tile is None:
      return dims
    order = [int(one) for one in re.findall(r'\d+', self.layout.split(':')[0])]
    sizes = [int(one) for one in tile.group(1).split(',')]
    # The last size is that of the most minor dimension.
    for axis, size in zip(order, reversed(sizes), strict=False):
      dims[axis] = -(-dims[axis] // size) * size
    return dims

  def __str__(self) -> str:
    return f'{self.element}[{",".join(map(str, self.dims))}]'


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    name: unique within the program.
    opcode: such as `fusion`.
    arrays: of the result; several if it is a tuple, nested ones flattened.
    operands: names of instructions.
    is_root: whether it is the result of its computation.
    attributes: the rest of the line.
    literal: the value of a constant, or the number of a parameter.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  is_root: bool
  attributes: str
  literal: str = ''

  @functools.cached_property
  def called(self) -> dict[str, tuple[str, ...]]:
    """Names of computations, by the name of the attribute."""
    return {
      kind: tuple(re.findall(r'[\w.\-]+', names))
      for kind, names in _CALLED.findall(self.attributes)
    }

  @property
  def op_name(self) -> str:
    """The path of what it was traced from, such as `jit(f)/while/body/add`."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found.group(1) if found else ''

  @property
  def target(self) -> str:
    """Of a custom call."""
    found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
    return found.group(1) if found else ''

  @property
  def cycles(self) -> int:
    """What the compiler expects it to take, 0 if it does not say (TPU does)."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
    return int(found.group(1)) if found else 0


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program.

  Attributes:
    computations: instructions by computation.
    entry: name of the computation where it starts.
  """

  computations: dict[str, tuple[Instruction, ...]]
  entry: str

  @functools.cached_property
  def _index(self) -> dict[str, dict[str, Instruction]]:
    return {
      name: {one.name: one for one in instructions}
      for name, instructions in self.computations.items()
    }

  def find(self, computation: str, name: str) -> Instruction | None:
    """An instruction of a computation; None if there is none of that name."""
    return self._index[computation].get(name)

  def root(self, computation: str) -> Instruction:
    """The instruction that is the result of a computation."""
    return next(one for one in self.computations[computation] if one.is_root)

  def trip_count(self, loop: Instruction) -> int | None:
    """How often a `while` runs, None if that is not known.

    It is where the compiler says so, or where a counter is compared with a
    constant and nothing else is asked; the counter is taken to start at 0.
    """
    stated = re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.attributes)
    if stated:
      return int(stated.group(1))
    (condition,) = loop.called['condition']
    root = self.root(condition)
    if root.opcode != 'compare' or 'direction=LT' not in root.attributes:
      return None
    bound = self.find(condition, root.operands[1])
    is_number = bound is not None and bound.opcode == 'constant'
    return int(bound.literal) if bound is not None and is_number else None


def _closing(text: str, start: int) -> int:
  """Where the parenthesis at `start` closes."""
  depth = 0
  for position in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[position], 0)
    if depth == 0:
      return position
  raise ValueError(f'unbalanced parentheses in {text[start : start + 80]!r}')


def parse_arrays(text: str) -> tuple[Array, ...]:
  """The arrays of a shape, such as `(f32[2,3]{1,0}, s32[])`."""
  return tuple(
    Array(element, tuple(int(one) for one in dims.split(',') if one), layout)
    for element, dims, layout in _ARRAY.findall(text)
  )


def _parse_instruction(line: str) -> Instruction | None:
  head = _INSTRUCTION.match(line)
  if head is None:
    return None
  rest = line[head.end() :]
  # A tuple's shape has spaces in it, an array's has none.
  end = _closing(rest, 0) + 1 if rest[0] == '(' else rest.index(' ')
  shape, rest = rest[:end], rest[end + 1 :]
  opened = rest.index('(')
  closed = _closing(rest, opened)
  opcode, operands = rest[:opened], rest[opened + 1 : closed]
  return Instruction(
    name=head.group(2),
    opcode=opcode,
    arrays=parse_arrays(shape),
    operands=tuple(_NAME.findall(operands)),
    is_root=head.group(1) is not None,
    attributes=rest[closed + 1 :],
    literal=operands if opcode in ('parameter', 'constant') else '',
  )


def parse(text: str) -> Program:
  """Reads a program, as `compiled.as_text()` gives it.

  Raises:
    ValueError: it has no entry computation.
  """
  computations: dict[str, tuple[Instruction, ...]] = {}
  entry, name = '', ''
  instructions: list[Instruction] = []
  for raw in text.splitlines():
    line = _COMMENT.sub('', raw)
    header = _HEADER.match(line)
    if header:
      name, instructions = header.group(2), []
      entry = name if header.group(1) else entry
    elif line.startswith('}'):
      computations[name] = tuple(instructions)
    else:
      instruction = _parse_instruction(line)
      if instruction is not None:
        instructions.append(instruction)
  if not entry:
    raise ValueError('not the text of a compiled program: it has no ENTRY')
  return Program(computations, entry)
