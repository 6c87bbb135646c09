"""How many bytes of main memory an instruction reads and writes.

An instruction reads its operands and writes its result, but for those that look
at a part of an operand only (slices, gathers), or write to a part of an array
in place (`dynamic-update-slice`). The same holds within a fusion.
"""

from models.compiling.hlo import Array
from models.compiling.hlo import Instruction
from models.compiling.hlo import Program

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
