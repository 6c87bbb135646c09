"""Kernels, copies and collectives of one round of each loop of a program.

The text of a compiled XLA program is a list of computations. Each is a list of
instructions in the order in which they run:

    %body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
      %x = f32[8]{0} get-tuple-element(%arg), index=1
      ROOT %sum = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
    }

A loop whose trip count the compiler knows counts as that many times its body,
and belongs to what surrounds it. Every other loop is a `Loop` of its own: the
decode step, and in it the growth round of each stage. Of the branches of a
conditional, only the one with the most kernels counts.
"""

from collections import Counter
from collections.abc import Iterator
import dataclasses
import math
import re
from typing import Any
from typing import NamedTuple

_LARGE_COPY = 64 * 1024  # Bytes; larger copies are listed by shape.

# Bits of the element types whose name does not contain them.
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}
_ARRAY = re.compile(r'([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?')
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
# Name, shape, opcode, operands, attributes.
_INSTRUCTION = re.compile(
  r'\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)?(.*)'
)
_CALLED = re.compile(
  r'(?:body|condition|calls|to_apply|true_computation|false_computation'
  r'|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)'
)
# Instructions that run nothing.
_FREE = re.compile(
  'parameter|constant|tuple|get-tuple-element|bitcast|after-all|add-dependency'
  '|opt-barrier|partition-id|replica-id|.*-(start|done|update)'
)
_FREE_TARGETS = ('ConcatBitcast', 'Sharding', 'AllocateBuffer', 'AssumeGather')
_HOST_OPCODES = re.compile('(infeed|outfeed|send|recv)(-start)?')
_HOST_TARGETS = re.compile('callback|MoveToHost|MoveToDevice|PipelineForward')
_HOST_SPACE = 5
_RELAYOUT = frozenset({'parameter', 'copy', 'transpose', 'bitcast', 'tuple'})
_COLLECTIVE = re.compile(
  '(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all'
  '|collective-permute|collective-broadcast)(-start)?'
)
_OP_NAME, _TARGET = r'op_name="([^"]*)"', r'custom_call_target="([^"]*)"'
_LAYER = r'op_name="[^"]*/layer_(\d+)[/"]'
_TRIPS = r'known_trip_count"?:\{"n":"(\d+)"'
_CYCLES = r'"estimated_cycles":"(\d+)"'  # Only on TPUs.


def _search(pattern: str, text: str) -> str:
  """The first group of a pattern in a text; empty if nothing matches."""
  match = re.search(pattern, text)
  return match.group(1) if match else ''


class Array(NamedTuple):
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


class Instruction(NamedTuple):
  """One instruction of a computation."""

  opcode: str  # Such as `fusion`.
  arrays: tuple[Array, ...]  # The result; tuples are flattened.
  operands: list[str]  # Names of instructions whose results it takes.
  called: list[str]  # Names of computations.
  attributes: str  # The text after the operands.


class Program(NamedTuple):
  """A compiled program."""

  computations: dict[str, dict[str, Instruction]]  # By name, instructions too.
  entry: str  # Name of the computation that the program starts with.


def parse_arrays(text: str) -> tuple[Array, ...]:
  """Reads the arrays of a shape, such as `(f32[2,3]{1,0}, s32[])`."""
  return tuple(
    Array(element, tuple(map(int, filter(None, dims.split(',')))), layout)
    for element, dims, layout in _ARRAY.findall(text)
  )


def parse(text: str) -> Program:
  """Reads a program from the result of `compiled.as_text()`.

  Raises:
    ValueError: the text has no entry computation.
  """
  computations: dict[str, dict[str, Instruction]] = {}
  entry, name = '', ''
  for raw in text.splitlines():
    line = re.sub(r'/\*.*?\*/', '', raw)
    if header := _HEADER.match(line):
      name = header.group(2)
      computations[name] = {}
      entry = name if header.group(1) else entry
    elif match := _INSTRUCTION.match(line):
      key, shape, opcode, operands, attributes = match.groups()
      computations[name][key] = Instruction(
        opcode,
        parse_arrays(shape),
        re.findall(r'%([\w.\-]+)', operands),
        re.findall(r'[\w.\-]+', ' '.join(_CALLED.findall(attributes))),
        attributes,
      )
  if not entry:
    raise ValueError('not the text of a compiled program: it has no ENTRY')
  return Program(computations, entry)


LAUNCHES_FILE = '*.thunk_sequence_after_thunk_passes.txt'
"""The name of the list in the folder of `xla_dump_to`."""

# A launch, or the title of a part of a loop.
_LAUNCH = re.compile(r'( *)(?:\d+: k(\w+)|(condition|body):)')


@dataclasses.dataclass
class Graphs:
  """The launches of the host in one round of a loop."""

  number: int = 0  #: Graphs of this loop; loops within it count their own.
  #: Launches outside of graphs end these; loops count, too. By kind.
  breaks: Counter[str] = dataclasses.field(default_factory=Counter)
  #: The loops within this one, in the order in which they run.
  loops: list['Graphs'] = dataclasses.field(default_factory=list)


def parse_launches(text: str) -> Graphs:
  """Reads XLA's list of launches of a program for a GPU.

  XLA joins neighbouring launches into graphs (command buffers). A graph is one
  launch, and ends where something cannot be part of it. The list is indented:

      002: kWhile         [prev=001 (1) | sink]
      condition:
          003: kCustomKernel  [source | sink] loop_and_fusion grid: [1, 1, 1]
        body:
          000: kCommandBuffer [source | next=010 (1)]
              004: kCustomKernel [source | sink] loop_add_fusion grid: ...
          010: kCopy          [prev=000 (1) | sink] kCopy

  Conditions of loops are left out. Of a conditional outside of a graph, the
  launches of all branches count.

  Raises:
    ValueError: the text has no launches.
  """
  outermost, is_condition = Graphs(), False
  # Each line around has its indentation, its launches, and whether these are in
  # a graph.
  around = [(-1, outermost, False)]
  for match in filter(None, map(_LAUNCH.match, text.splitlines())):
    indentation, kind, title = match.groups()
    if title:
      is_condition = title == 'condition'
    elif not is_condition:
      while around[-1][0] >= len(indentation):
        around.pop()
      _, graphs, in_graph = around[-1]
      if kind == 'CommandBuffer':
        graphs.number += 1
        around.append((len(indentation), graphs, True))
        continue
      if not in_graph:
        graphs.breaks[kind] += 1
      if kind == 'While':
        graphs.loops.append(Graphs())
        around.append((len(indentation), graphs.loops[-1], in_graph))
  if not (outermost.number or outermost.breaks):
    raise ValueError(
      'not a list of launches: no line begins as 001: kCopy does'
    )
  return outermost


class Exchange(NamedTuple):
  """A collective; the arrays are what each device has after it."""

  opcode: str  # Such as `all-reduce`.
  arrays: tuple[Array, ...]
  in_layer: bool  # Whether it belongs to a layer of a model.

  def __str__(self) -> str:
    return f'{self.opcode} {", ".join(map(str, self.arrays))}'


@dataclasses.dataclass
class Loop:
  """The work of one round of a loop, without the loops within it."""

  name: str = ''  # `op_name` of the loop; empty outside of loops.
  counts: Counter[str] = dataclasses.field(default_factory=Counter)
  layers: Counter[str] = dataclasses.field(default_factory=Counter)  # Kernels.
  #: Launches that end graphs, by kind.
  breaks: Counter[str] = dataclasses.field(default_factory=Counter)
  copies: Counter[str] = dataclasses.field(default_factory=Counter)  # By shape.
  exchanges: Counter[Exchange] = dataclasses.field(default_factory=Counter)
  loops: list['Loop'] = dataclasses.field(default_factory=list)

  def add(self, other: 'Loop', times: int = 1) -> None:
    """Adds the counts of another loop, `times` times, and its inner loops."""
    for name in ('counts', 'layers', 'breaks', 'copies', 'exchanges'):
      for key, count in getattr(other, name).items():
        getattr(self, name)[key] += times * count
    self.loops += other.loops

  def figures(self, divided: frozenset[int]) -> dict[str, Any]:
    """The counts as a row of a table.

    Kernels are what the device launches, without asynchronous copies;
    `bookkeeping` are those outside of forwards; `copies` end in main memory. At
    each of the `branches`, conditionals and inner loops, a GPU waits for the
    host, unless it is part of a graph or the length of the loop is known. For
    `graphs` and `breaks` see `Graphs`; only GPUs have them.
    `whole_tensors` are exchanged arrays of as many elements as a weight or
    cache that is `divided`.
    """
    layers, row = max(len(self.layers), 1), Counter[str]()
    collectives = Counter[str]()
    for exchange, times in self.exchanges.items():
      collectives[str(exchange)] += times
      row['in layers'] += times * exchange.in_layer
      row['bytes'] += times * sum(array.num_bytes for array in exchange.arrays)
      sizes = {math.prod(array.dims) for array in exchange.arrays}
      row['whole'] += times * bool(sizes & divided)
    return {
      'kernels': self.counts['kernels'],
      'kernels_per_layer': round(self.layers.total() / layers, 2),
      'bookkeeping': self.counts['kernels'] - self.counts['forward'],
      'copies': dict(self.copies),
      'collectives': dict(collectives),
      'collectives_per_layer': round(row['in layers'] / layers, 2),
      'collective_bytes': row['bytes'],
      'whole_tensors': row['whole'],
      'host_transfers': self.counts['host'],
      'branches': self.counts['branches'],
      'graphs': self.counts['graphs'],
      'breaks': dict(self.breaks),
      'cycles': self.counts['cycles'],
    }


def count(
  program: Program,
  computation: str = '',
  launched: Iterator[Graphs] = iter(()),
) -> Loop:
  """Counts of a computation outside of its loops; of the entry by default.

  `launched` are the graphs of its loops, on a GPU.
  """
  total, name = Loop(), computation or program.entry
  for instruction in program.computations[name].values():
    opcode, called = instruction.opcode, instruction.called
    if opcode == 'while':
      graphs = next(launched, Graphs())
      loop = Loop(_search(_OP_NAME, instruction.attributes))
      loop.counts['graphs'], loop.breaks = graphs.number, Counter(graphs.breaks)
      trips = _search(_TRIPS, instruction.attributes)
      inner_loops = iter(graphs.loops)
      # The condition, the first of both, is not run if the trips are known.
      for inner in called[1:] if trips else called:
        loop.add(count(program, inner, inner_loops))
      total.counts['branches'] += 1
      if trips:
        total.add(loop, int(trips))
      else:
        total.loops.append(loop)
    elif opcode == 'conditional':
      branches = [count(program, branch, launched) for branch in called]
      total.counts['branches'] += 1
      total.add(max(branches, key=lambda branch: branch.counts['kernels']))
    elif opcode in ('call', 'async-start') and called:
      total.add(count(program, called[0], launched))
    else:
      fused = [instruction]
      if opcode == 'fusion':
        fused = [*program.computations[called[0]].values()]
      total.add(_count_instruction(instruction, fused))
  return total


def _count_instruction(
  instruction: Instruction, fused: list[Instruction]
) -> Loop:
  """Counts of an instruction, or of the instructions that a fusion joins."""
  opcode, arrays, _, _, attributes = instruction
  target, layer = _search(_TARGET, attributes), _search(_LAYER, attributes)
  launches = opcode in ('fusion', 'custom-call', 'copy')
  is_kernel = (
    not (_FREE.fullmatch(opcode) or target in _FREE_TARGETS)
    # The scalar unit of a TPU computes single numbers.
    and (launches or any(array.dims for array in arrays))
  )
  runs = is_kernel or opcode.endswith('-start')
  moves = runs and any(array.memory_space == _HOST_SPACE for array in arrays)
  talks = _HOST_OPCODES.fullmatch(opcode) or _HOST_TARGETS.search(target)
  in_forward = re.search('/forward[/"]', attributes)
  total = Loop()
  total.counts['kernels'] = int(is_kernel)
  total.counts['forward'] = int(is_kernel and bool(in_forward))
  total.counts['host'] = int(moves or bool(talks))
  total.counts['cycles'] = int(_search(_CYCLES, attributes) or 0)
  if is_kernel and in_forward and layer:
    total.layers[layer] = 1
  for step in fused:
    if match := _COLLECTIVE.fullmatch(step.opcode):
      # The first array of an instruction that starts one is the operand.
      starts = match.group(2) and match.group(1) != 'all-reduce'
      results = step.arrays[1:2] if starts else step.arrays
      in_layer = bool(layer or _search(_LAYER, step.attributes))
      total.exchanges[Exchange(match.group(1), results, in_layer)] = 1
      break
  opcodes = {step.opcode.removesuffix('-start') for step in fused}
  if opcodes & {'copy', 'transpose'} and opcodes <= _RELAYOUT:
    for array in arrays[:1]:
      if array.memory_space == 0 and array.num_bytes > _LARGE_COPY:
        total.copies[str(array)] = 1
  return total
