"""Checkpoints of a run, by step: a state and the loss curve.

A run that is resumed takes the last one. Orbax writes each completely or not at
all, and keeps the one before it.
"""

import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

_FILES = 1 << 16  # Bytes of a checkpoint, its arrays apart.


def _manager(folder: pathlib.Path) -> ocp.CheckpointManager:
  options = ocp.CheckpointManagerOptions(
    max_to_keep=2, enable_async_checkpointing=False
  )
  return ocp.CheckpointManager(folder.absolute(), options=options)


def restore(
  folder: pathlib.Path, state: Any
) -> tuple[Any, list[dict[str, Any]]]:
  """The last checkpoint, else the given state and an empty curve.

  `state` is a pytree of arrays.

  Raises:
    ValueError: the checkpoint cannot be read, or has another structure; the
      message names it.
  """
  expected = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  items = ocp.args.Composite(
    state=ocp.args.StandardRestore(expected), curve=ocp.args.JsonRestore()
  )
  with _manager(folder) as manager:
    step = manager.latest_step()
    if step is None:
      return state, []
    try:
      stored = manager.restore(step, args=items)
    except Exception as error:  # Orbax has many.
      reason = str(error).partition('\n')[0]
      raise ValueError(
        f'{folder / str(step)} is damaged, or of another program: {reason};'
        ' remove it, and the run continues from the checkpoint before'
      ) from error
  return stored['state'], stored['curve']


def save(folder: pathlib.Path, state: Any, curve: list[dict[str, Any]]) -> None:
  """Saves a checkpoint at the end of a curve; keeps only the one before it.

  Raises:
    OSError: it cannot be written; those before it are kept.
  """
  path = folder / str(curve[-1]['step'])
  folder.mkdir(parents=True, exist_ok=True)
  needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _FILES
  free = shutil.disk_usage(folder).free
  items = ocp.args.Composite(
    state=ocp.args.StandardSave(state), curve=ocp.args.JsonSave(curve)
  )
  try:
    # Each of orbax's writer threads would print that the disk is full.
    if free < needed:
      raise OSError(f'it takes {needed} bytes, and {free} are free')
    with _manager(folder) as manager:
      manager.save(curve[-1]['step'], args=items)
  except Exception as error:
    raise OSError(
      f'{path} cannot be written: {error}; make room and run again: what was'
      ' written before is kept'
    ) from error
