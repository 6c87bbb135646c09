"""Kernels and copies of one round of each loop of a compiled program.

A loop whose trip count the compiler knows is counted as that many times its
body, as part of what surrounds it. Every other loop is a `Loop` of its own: the
decode step, and within it the growth round of each stage. Of the branches of a
conditional, only the one with the most kernels is counted.
"""

from collections import Counter
import dataclasses
import itertools
import math
import re

from specdec.models.lab import hlo

LARGE_COPY = 64 * 1024
"""Copies of more bytes than this are listed one by one."""

# Instructions that run nothing.
_FREE = re.compile(
  'parameter|constant|tuple|get-tuple-element|bitcast|after-all|add-dependency'
  '|opt-barrier|partition-id|replica-id|.*-(start|done|update)'
)
_FREE_TARGETS = ('ConcatBitcast', 'Sharding', 'AllocateBuffer', 'AssumeGather')
_HOST_OPCODES = ('infeed', 'outfeed', 'send', 'recv')
_HOST_TARGETS = ('callback', 'MoveToHost', 'MoveToDevice', 'PipelineForward')
_HOST_SPACE = 5
_RELAYOUT = frozenset({'parameter', 'copy', 'transpose', 'bitcast', 'tuple'})
_KEEPING = '/keep_path/'
_LAYER = re.compile(r'/layer_(\d+)(?:/|$)')
_COLLECTIVE = re.compile(
  '(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all'
  '|collective-permute|collective-broadcast)(-start)?'
)


def axes_of(shape: tuple[int, ...]) -> tuple[int, ...]:
  """The sizes of an array's axes above 1, whatever their order."""
  return tuple(sorted(size for size in shape if size > 1))


def joined_axes(shape: tuple[int, ...]) -> set[tuple[int, ...]]:
  """`axes_of`, and the same with any two of the axes as one.

  For the devices that something is gathered from are often an axis of its own.
  """
  axes = axes_of(shape)
  found = {axes}
  for pair in itertools.combinations(range(len(axes)), 2):
    rest = (size for axis, size in enumerate(axes) if axis not in pair)
    found.add(axes_of((*rest, math.prod(axes[axis] for axis in pair))))
  return found


@dataclasses.dataclass(frozen=True)
class Collective:
  """A kind of exchange between devices; a result is what each has after it."""

  opcode: str  # Such as `all-reduce`.
  arrays: tuple[hlo.Array, ...]  # The results.
  in_layer: bool  # Whether it belongs to a layer of a model.

  @property
  def num_bytes(self) -> int:
    """The bytes of the results."""
    return sum(array.num_bytes for array in self.arrays)

  def __str__(self) -> str:
    return f'{self.opcode} {", ".join(map(str, self.arrays))}'


@dataclasses.dataclass
class Loop:
  """The work of one round of a loop, without the loops within it.

  Kernels are what the device launches, such as fusions, library calls, sorts
  and copies, except asynchronous copies. `copies` counts, by shape, those that
  are larger than `LARGE_COPY` and end in main memory;
  `collectives` counts the exchanges between devices;
  `host_transfers` names the instructions that communicate with the host. At
  each of the `branches` a GPU waits for the host, unless it is part of a
  command buffer. `loops` are those within it whose trip count is not known.
  """

  name: str = ''  # `op_name` of the loop; empty outside of loops.
  kernels: int = 0
  forward_kernels: int = 0  # Those that belong to a model's forward.
  keep_kernels: int = 0  # Those that move cache entries of an accepted path.
  layer_kernels: Counter = dataclasses.field(default_factory=Counter)
  copies: Counter = dataclasses.field(default_factory=Counter)
  collectives: Counter = dataclasses.field(default_factory=Counter)
  host_transfers: list[str] = dataclasses.field(default_factory=list)
  branches: int = 0  # Conditionals and inner loops.
  conditionals: int = 0  # The branches that are no loops.
  cycles: int = 0  # As the compiler expects; 0 except on TPUs.
  loops: list['Loop'] = dataclasses.field(default_factory=list)

  @property
  def other_kernels(self) -> int:
    """Kernels outside of forwards: tree bookkeeping, token choice, counters."""
    return self.kernels - self.forward_kernels

  @property
  def kernels_per_layer(self) -> float:
    """Mean over the layers of a forward; 0 if the loop runs no forward."""
    layers = self.layer_kernels
    return sum(layers.values()) / len(layers) if layers else 0.0

  @property
  def collectives_per_layer(self) -> float:
    """Mean over the layers of a forward; 0 if the loop runs no forward."""
    number = sum(
      times for found, times in self.collectives.items() if found.in_layer
    )
    return number / max(len(self.layer_kernels), 1)

  def add(self, other: 'Loop', times: int = 1) -> None:
    """Adds the counts of another loop, so many times, and its inner loops."""
    for field in dataclasses.fields(self):
      ours, theirs = getattr(self, field.name), getattr(other, field.name)
      if isinstance(ours, int):
        setattr(self, field.name, ours + times * theirs)
      elif isinstance(ours, Counter):
        ours.update({key: times * number for key, number in theirs.items()})
      elif isinstance(ours, list):
        ours.extend(theirs)


def count(program: hlo.Program) -> Loop:
  """Counts of a program outside of its loops, with the loops in `loops`."""
  return _count_computation(program, program.entry)


def _count_computation(program: hlo.Program, name: str) -> Loop:
  total = Loop()
  for instruction in program.computations[name].values():
    called = instruction.called
    if instruction.opcode == 'while':
      loop = Loop(instruction.op_name)
      trips = program.trip_count(instruction)
      # Loops whose trip count is known run no condition.
      conditions = called['condition'] if trips is None else ()
      for part in (*conditions, *called['body']):
        loop.add(_count_computation(program, part))
      total.branches += 1
      if trips is None:
        total.loops.append(loop)
      else:
        total.add(loop, trips)
    elif instruction.opcode == 'conditional':
      branches = [
        _count_computation(program, branch)
        for attribute, names in called.items()
        if 'computation' in attribute
        for branch in names
      ]
      total.branches += 1
      total.conditionals += 1
      total.add(max(branches, key=lambda branch: branch.kernels))
    elif instruction.opcode in ('call', 'async-start') and called:
      for part in next(iter(called.values())):
        total.add(_count_computation(program, part))
    else:
      total.add(_count_instruction(program, instruction))
  return total


def _count_instruction(
  program: hlo.Program, instruction: hlo.Instruction
) -> Loop:
  """Counts of an instruction that calls no computation but a fusion."""
  is_kernel = _is_kernel(instruction)
  total = Loop(kernels=int(is_kernel), cycles=instruction.cycles)
  if _is_host_transfer(instruction):
    total.host_transfers.append(instruction.name)
  total.keep_kernels = int(is_kernel and _KEEPING in instruction.op_name)
  if is_kernel and '/forward/' in f'{instruction.op_name}/':
    total.forward_kernels = 1
    if layer := _LAYER.search(instruction.op_name):
      total.layer_kernels[int(layer.group(1))] = 1
  if found := _collective(program, instruction):
    total.collectives[found] = 1
  for copied in instruction.arrays[:1]:
    is_large = copied.memory_space == 0 and copied.num_bytes > LARGE_COPY
    if is_large and _is_copy(program, instruction):
      total.copies[str(copied)] = 1
  return total


def _collective(
  program: hlo.Program, instruction: hlo.Instruction
) -> Collective | None:
  """The collective that an instruction is, starts, or is fused with."""
  inner = [instruction]
  if instruction.opcode == 'fusion':
    inner = [*program.computations[_fused(instruction)].values()]
  for one in inner:
    if kind := _COLLECTIVE.fullmatch(one.opcode):
      arrays = one.arrays
      if kind.group(2) and kind.group(1) != 'all-reduce':
        arrays = arrays[1:2]  # The first is the operand.
      layer = _LAYER.search(one.op_name) or _LAYER.search(instruction.op_name)
      return Collective(kind.group(1), arrays, bool(layer))
  return None


def _is_kernel(instruction: hlo.Instruction) -> bool:
  opcode = instruction.opcode
  if _FREE.fullmatch(opcode):
    return False
  if opcode not in ('fusion', 'custom-call', 'copy') and not any(
    array.dims for array in instruction.arrays
  ):
    return False  # The scalar unit of a TPU computes single numbers.
  return instruction.target not in _FREE_TARGETS


def _is_host_transfer(instruction: hlo.Instruction) -> bool:
  opcode = instruction.opcode
  named = any(name in instruction.target for name in _HOST_TARGETS)
  spaces = {array.memory_space for array in instruction.arrays}
  runs = _is_kernel(instruction) or opcode.endswith('-start')
  moves = runs and _HOST_SPACE in spaces
  return opcode.removesuffix('-start') in _HOST_OPCODES or named or moves


def _is_copy(program: hlo.Program, instruction: hlo.Instruction) -> bool:
  if instruction.opcode in ('copy', 'copy-start', 'transpose'):
    return True
  if instruction.opcode != 'fusion':
    return False
  fused = program.computations[_fused(instruction)].values()
  opcodes = {inner.opcode for inner in fused}
  return bool(opcodes & {'copy', 'transpose'}) and opcodes <= _RELAYOUT


def _fused(fusion: hlo.Instruction) -> str:
  """Name of the computation of a fusion."""
  (called,) = fusion.called['calls']
  return called
