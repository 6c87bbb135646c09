"""Parser for the text of a compiled XLA program.

The text is a list of computations. Each is a list of instructions in the order
in which they run:

    %body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
      %x = f32[8]{0} get-tuple-element(%arg), index=1
      ROOT %sum = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
    }
"""

import dataclasses
import math
import re

# Bits of the element types whose name does not contain them.
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}
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
  """The shape and the memory layout of one array."""

  element: str  # Type of the elements, such as `bf16`.
  dims: tuple[int, ...]
  layout: str = ''  # The text in braces, such as `1,0:T(8,128)S(1)`.

  @property
  def memory_space(self) -> int:
    """0 is the main memory of the device; others are on the chip or host."""
    return int(_search(r'S\((\d+)\)', self.layout) or 0)

  @property
  def num_bytes(self) -> int:
    """Size in bytes, without the padding of tiled layouts."""
    bits = int(_search(r'(\d+)', self.element) or _BITS[self.element])
    return math.ceil(bits * math.prod(self.dims) / 8)

  def __str__(self) -> str:
    return f'{self.element}[{",".join(map(str, self.dims))}]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
  """One instruction of a computation."""

  name: str  # Unique within the program.
  opcode: str  # Such as `fusion`.
  arrays: tuple[Array, ...]  # The result; tuples are flattened.
  operands: tuple[str, ...]  # Names of instructions whose results it takes.
  is_root: bool  # Whether its result is the result of the computation.
  literal: str  # The value of a constant, or the number of a parameter.
  called: dict[str, tuple[str, ...]]  # Names of computations, by attribute.
  op_name: str  # The traced operation, such as `jit(f)/while/body/add`.
  target: str  # The function that a custom call runs.
  cycles: int  # As the compiler expects; 0 except on TPUs.
  attributes: str  # The text behind the operands.


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program: computations, and instructions in them, by name."""

  computations: dict[str, dict[str, Instruction]]
  entry: str  # Name of the computation that the program starts with.

  def root(self, computation: str) -> Instruction:
    """The instruction whose result is the result of a computation."""
    instructions = self.computations[computation].values()
    return next(inner for inner in instructions if inner.is_root)

  def trip_count(self, loop: Instruction) -> int | None:
    """Number of rounds of a `while`; None if it is not known.

    It is known if the compiler states it, or if the condition is that a counter
    is less than a constant. Such a counter is assumed to start at 0.
    """
    stated = _search(r'known_trip_count"?:\{"n":"(\d+)"', loop.attributes)
    if stated:
      return int(stated)
    (condition,) = loop.called['condition']
    root = self.root(condition)
    if root.opcode != 'compare' or 'direction=LT' not in root.attributes:
      return None
    bound = self.computations[condition][root.operands[1]]
    return int(bound.literal) if bound.opcode == 'constant' else None


def _search(pattern: str, text: str) -> str:
  """The first group of a pattern in a text; empty if it is not found."""
  found = re.search(pattern, text)
  return found.group(1) if found else ''


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for position in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[position], 0)
    if depth == 0:
      return position
  raise ValueError(f'unbalanced parentheses in {text[start : start + 80]!r}')


def parse_arrays(text: str) -> tuple[Array, ...]:
  """Reads the arrays of a shape, such as `(f32[2,3]{1,0}, s32[])`."""
  return tuple(
    Array(element, tuple(map(int, filter(None, dims.split(',')))), layout)
    for element, dims, layout in _ARRAY.findall(text)
  )


def _parse_instruction(head: re.Match[str], line: str) -> Instruction:
  rest = line[head.end() :]
  # The shape of a tuple contains spaces, the shape of an array does not.
  end = _closing(rest, 0) + 1 if rest[0] == '(' else rest.index(' ')
  shape, rest = rest[:end], rest[end + 1 :]
  opened = rest.index('(')
  closed = _closing(rest, opened)
  opcode, operands = rest[:opened], rest[opened + 1 : closed]
  attributes = rest[closed + 1 :]
  return Instruction(
    name=head.group(2),
    opcode=opcode,
    arrays=parse_arrays(shape),
    operands=tuple(_NAME.findall(operands)),
    is_root=head.group(1) is not None,
    literal=operands if opcode in ('parameter', 'constant') else '',
    called={
      kind: tuple(re.findall(r'[\w.\-]+', names))
      for kind, names in _CALLED.findall(attributes)
    },
    op_name=_search(r'op_name="([^"]*)"', attributes),
    target=_search(r'custom_call_target="([^"]*)"', attributes),
    cycles=int(_search(r'"estimated_cycles":"(\d+)"', attributes) or 0),
    attributes=attributes,
  )


def parse(text: str) -> Program:
  """Reads a program from the result of `compiled.as_text()`.

  Raises:
    ValueError: the text has no entry computation.
  """
  computations: dict[str, dict[str, Instruction]] = {}
  entry, name = '', ''
  for raw in text.splitlines():
    line = _COMMENT.sub('', raw)
    if header := _HEADER.match(line):
      name = header.group(2)
      computations[name] = {}
      entry = name if header.group(1) else entry
    elif head := _INSTRUCTION.match(line):
      instruction = _parse_instruction(head, line)
      computations[name][instruction.name] = instruction
  if not entry:
    raise ValueError('not the text of a compiled program: it has no ENTRY')
  return Program(computations, entry)
