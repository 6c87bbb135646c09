"""Checkpoints of a run; a run that is resumed takes the last whole one.

Each is a folder whose name is the step, with a state and the loss curve.
"""

from collections.abc import Callable
import json
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from specdec.models.lab.training import kept

_FILES = 1 << 16  # Bytes of a checkpoint besides those of its arrays.


def _orbax() -> ocp.Checkpointer:
  return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _steps(folder: pathlib.Path) -> list[int]:
  folders = [path.name for path in folder.glob('*') if path.is_dir()]
  return sorted(int(name) for name in folders if name.isdecimal())


def restore(
  folder: pathlib.Path, state: Any, report: Callable[[str], None]
) -> tuple[Any, list[dict[str, Any]]]:
  """The last whole checkpoint, else the given state and an empty curve.

  Damaged ones are reported. `state` is a pytree of arrays.

  Raises:
    ValueError: the checkpoint has another structure; the message names it.
  """
  steps = _steps(folder)
  while steps:
    path = folder / str(steps.pop())
    otherwise = 'the one before is taken' if steps else 'training starts anew'
    if kept.is_whole(path, report, otherwise):
      curve = json.loads((path / 'curve.json').read_text('utf-8'))
      return _read(path / 'state', state), curve
  return state, []


def _read(path: pathlib.Path, state: Any) -> Any:
  expected = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  args = ocp.args.StandardRestore(expected)
  try:
    with _orbax() as checkpointer:
      return checkpointer.restore(path.absolute(), args=args)
  except ValueError as error:
    raise ValueError(
      f'{path} is not of this program: {str(error).splitlines()[0]}; give'
      ' another --workdir'
    ) from error


def save(folder: pathlib.Path, state: Any, curve: list[dict[str, Any]]) -> None:
  """Saves a checkpoint at the end of a curve; keeps only the one before it.

  Raises:
    OSError: it cannot be written; those before it are kept.
  """

  def write(partial: pathlib.Path) -> None:
    # Orbax writes in threads, of which each prints that the disk is full.
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _FILES
    free = shutil.disk_usage(folder).free
    if free < needed:
      raise OSError(f'it takes {needed} bytes, and {free} are free')
    args, path = ocp.args.StandardSave(state), partial / 'state'
    with _orbax() as checkpointer:
      checkpointer.save(path.absolute(), args=args)
    kept.save_json(partial / 'curve.json', curve)

  newest = [point['step'] for point in curve[-2:]]
  kept.save(folder / str(newest[-1]), write)
  for step in set(_steps(folder)) - set(newest):
    kept.remove(folder / str(step))
