"""What a compiled loop does each time around: kernels, copies, bytes.

A loop whose number of rounds the compiler knows counts as that many times its
body, as part of what is around it. Any other is a `Loop` of its own: a decode
step is one, and within it each stage's growth round. Of the branches of a
conditional the one with the most kernels counts.
"""

import collections
from collections.abc import Iterator
import dataclasses
import re

from models.compiled.hlo import Array
from models.compiled.hlo import Instruction
from models.compiled.hlo import Program

LARGE_COPY = 64 * 1024
"""Bytes; copies of more than that are listed one by one."""

_FREE = frozenset(
  {
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'after-all',
    'add-dependency',
    'opt-barrier',
    'partition-id',
    'replica-id',
  }
)
# Names for what is there already, or marks for the compiler.
_FREE_TARGETS = ('ConcatBitcast', 'Sharding', 'AllocateBuffer', 'AssumeGather')
_HOST_OPCODES = ('infeed', 'outfeed', 'send', 'recv')
_HOST_TARGETS = ('callback', 'MoveToHost', 'MoveToDevice', 'PipelineForward')
_HOST_SPACE = 5
_RELAYOUT = frozenset({'parameter', 'copy', 'transpose', 'bitcast', 'tuple'})
_FORWARD, _LAYER = 'forward', re.compile(r'/layer_(\d+)(?:/|$)')


@dataclasses.dataclass
class Loop:
  """One round of a loop, loops within it apart.

  Attributes:
    name: of what it was traced from, the path of `op_name`.
    kernels: launched by the device: fusions, library calls, sorts and so on;
      copies included, asynchronous ones apart.
    forward_kernels: those of a model's forward.
    layer_kernels: of these, by layer.
    prefetches: asynchronous copies from main memory onto the chip.
    copies: those from main memory to main memory or back from the chip, larger
      than `LARGE_COPY`: shape and number.
    host_transfers: names of instructions that talk to the host.
    branches: conditionals, and loops within this one. A GPU asks the host each
      time which way to go, unless they are part of a command buffer.
    bytes: of main memory read and written.
    cycles: that the compiler expects, where it says so (TPU).
    loops: within this one, of unknown length.
  """

  name: str
  kernels: int = 0
  forward_kernels: int = 0
  layer_kernels: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  prefetches: int = 0
  copies: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  host_transfers: list[str] = dataclasses.field(default_factory=list)
  branches: int = 0
  bytes: int = 0
  cycles: int = 0
  loops: list['Loop'] = dataclasses.field(default_factory=list)

  @property
  def other_kernels(self) -> int:
    """Not of a forward: tree bookkeeping, choosing tokens, counters."""
    return self.kernels - self.forward_kernels

  @property
  def kernels_per_layer(self) -> float:
    """Of a forward, the mean over layers; 0 if there is none."""
    layers = self.layer_kernels
    return sum(layers.values()) / len(layers) if layers else 0.0

  def walk(self) -> Iterator['Loop']:
    """Itself and all loops within."""
    yield self
    for loop in self.loops:
      yield from loop.walk()

  def add(self, other: 'Loop', times: int = 1) -> None:
    """Counts another, whose name is dropped, as part of this one."""
    for field in dataclasses.fields(self):
      mine, theirs = getattr(self, field.name), getattr(other, field.name)
      if isinstance(mine, int):
        setattr(self, field.name, mine + times * theirs)
      elif isinstance(mine, collections.Counter):
        mine.update({key: times * number for key, number in theirs.items()})
      elif isinstance(mine, list):
        mine.extend(theirs)


def _is_kernel(instruction: Instruction) -> bool:
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith(('-start', '-done', '-update')):
    return False
  if opcode not in ('fusion', 'custom-call', 'copy') and not any(
    one.dims for one in instruction.arrays
  ):
    return False  # Single numbers: a TPU's scalar unit does them on the way.
  return instruction.target not in _FREE_TARGETS


def _is_host_transfer(instruction: Instruction) -> bool:
  opcode = instruction.opcode.removesuffix('-start')
  in_space = any(one.memory_space == _HOST_SPACE for one in instruction.arrays)
  named = any(name in instruction.target for name in _HOST_TARGETS)
  moves = _is_kernel(instruction) or instruction.opcode.endswith('-start')
  return opcode in _HOST_OPCODES or named or (in_space and moves)


def _is_copy(program: Program, instruction: Instruction) -> bool:
  if instruction.opcode in ('copy', 'copy-start', 'transpose'):
    return True
  if instruction.opcode != 'fusion':
    return False
  (called,) = instruction.called['calls']
  opcodes = {one.opcode for one in program.computations[called]}
  return bool(opcodes & {'copy', 'transpose'}) and opcodes <= _RELAYOUT


def _count_one(program: Program, computation: str, one: Instruction) -> Loop:
  """What a single instruction that calls nothing but a fusion does."""
  count = Loop('')
  if _is_kernel(one) or one.opcode.endswith('-start'):
    count.bytes = traffic(program, computation, one)
  count.cycles = one.cycles
  if _is_host_transfer(one):
    count.host_transfers.append(one.name)
  if _is_kernel(one):
    count.kernels = 1
    if f'/{_FORWARD}/' in f'{one.op_name}/':
      count.forward_kernels = 1
      layer = _LAYER.search(one.op_name)
      if layer:
        count.layer_kernels[int(layer.group(1))] = 1
  elif one.opcode.endswith('-start'):
    count.prefetches = 1
  if _is_copy(program, one):
    destination = one.arrays[:1]
    if bytes_of(destination) > LARGE_COPY:
      count.copies[str(destination[0])] = 1
  return count


def _count_computation(program: Program, name: str) -> Loop:
  total = Loop('')
  for one in program.computations[name]:
    called = one.called
    if one.opcode == 'while':
      loop = Loop(one.op_name)
      for part in (*called['condition'], *called['body']):
        loop.add(_count_computation(program, part))
      total.branches += 1
      trips = program.trip_count(one)
      if trips is None:
        total.loops.append(loop)
      else:
        total.add(loop, trips)
    elif one.opcode == 'conditional':
      names = [
        branch
        for kind, branches in called.items()
        if 'computation' in kind
        for branch in branches
      ]
      branches = [_count_computation(program, branch) for branch in names]
      total.branches += 1
      total.add(max(branches, key=lambda branch: branch.kernels))
    elif one.opcode in ('call', 'async-start') and called:
      for part in next(iter(called.values())):
        total.add(_count_computation(program, part))
    else:
      total.add(_count_one(program, name, one))
  return total


def count(program: Program) -> Loop:
  """What a program does outside of loops, with its loops in `loops`."""
  return dataclasses.replace(
    _count_computation(program, program.entry), name=program.entry
  )


_VIEWS = ('bitcast', 'get-tuple-element', 'tuple', 'reshape')
_SLICES = ('slice', 'dynamic-slice', 'gather')


def bytes_of(arrays: tuple[Array, ...]) -> int:
  """In main memory; what lies elsewhere does not count."""
  return sum(one.num_bytes for one in arrays if one.memory_space == 0)


def _size(arrays: tuple[Array, ...]) -> int:
  """Wherever it lies: within a fusion nobody says where that is."""
  return sum(one.num_bytes for one in arrays)


def _read_of_parameter(program: Program, computation: str, name: str) -> float:
  """The bytes of a fusion's parameter that are read; `inf` for all of them."""
  total = 0.0
  for user in program.computations[computation]:
    if name not in user.operands:
      continue
    is_first = user.operands[0] == name and name not in user.operands[1:]
    if user.opcode in _VIEWS:
      total += _read_of_parameter(program, computation, user.name)
    elif user.opcode in _SLICES and is_first:
      total += _size(user.arrays)
    elif user.opcode == 'dynamic-update-slice' and is_first:
      pass  # written in place
    elif user.opcode == 'fusion':
      total += sum(
        _read_of_operand(program, user, index)
        for index, operand in enumerate(user.operands)
        if operand == name
      )
    else:
      return float('inf')
  return total


def _read_of_operand(program: Program, fusion: Instruction, index: int):
  (called,) = fusion.called['calls']
  for one in program.computations[called]:
    if one.opcode == 'parameter' and one.literal == str(index):
      return _read_of_parameter(program, called, one.name)
  return float('inf')


def _written(program: Program, computation: str, name: str) -> float:
  """The bytes that make up an instruction's result; `inf` for all of them."""
  one = program.find(computation, name)
  if one is None:
    return float('inf')
  if one.opcode == 'dynamic-update-slice':
    update = program.find(computation, one.operands[1])
    return float('inf') if update is None else _size(update.arrays)
  if one.opcode == 'fusion':
    (called,) = one.called['calls']
    return _written(program, called, program.root(called).name)
  if one.opcode in ('bitcast', 'reshape'):
    return _written(program, computation, one.operands[0])
  return float('inf')


def _fusion_writes(program: Program, fusion: Instruction) -> float:
  (called,) = fusion.called['calls']
  root = program.root(called)
  if root.opcode != 'tuple':
    of_result = [_written(program, called, root.name)]
  else:
    of_result = [_written(program, called, name) for name in root.operands]
  total = 0.0
  for array, written in zip(fusion.arrays, of_result, strict=False):
    if array.memory_space == 0:
      total += min(written, array.num_bytes)
  return total


def traffic(
  program: Program, computation: str, instruction: Instruction
) -> int:
  """Bytes of main memory that one run of an instruction moves.

  Args:
    program: the program.
    computation: name of the computation that holds the instruction.
    instruction: one that runs something; what it calls, other than a fusion,
      is not looked into.

  Returns:
    Read and written, with the padding of tiled layouts.
  """
  opcode = instruction.opcode
  operands = [program.find(computation, one) for one in instruction.operands]
  sizes = [bytes_of(one.arrays) if one else 0 for one in operands]
  result = bytes_of(instruction.arrays)
  if opcode.endswith('-done'):
    return 0
  if opcode.endswith('-start'):
    # The result is a tuple that names the source too, and is shorter if sliced.
    source = operands[0].arrays if operands and operands[0] else ()
    moved = _moved(instruction, source)
    reads = 1 if bytes_of(source) else 0
    writes = 1 if moved and moved[0].memory_space == 0 else 0
    return _size(moved) * (reads + writes)
  if opcode in _SLICES:
    read = min(sizes[0], _size(instruction.arrays)) if sizes else 0
    return int(read + result)
  if opcode == 'dynamic-update-slice':
    return int(2 * sizes[1])
  if opcode == 'fusion':
    read = sum(
      min(size, _read_of_operand(program, instruction, index))
      for index, size in enumerate(sizes)
    )
    return int(read + _fusion_writes(program, instruction))
  return int(sum(sizes) + result)


def _moved(
  instruction: Instruction, source: tuple[Array, ...]
) -> tuple[Array, ...]:
  """The destination of an asynchronous copy or slice: `(dest, src, ...)`.

  A copy names its destination first, a slice its source.
  """
  arrays = instruction.arrays
  if instruction.opcode == 'copy-start':
    return arrays[:1]
  return arrays[len(source) : len(source) + 1]
