"""Checkpoints of a run; a run that is resumed takes the last whole one."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import json
import pathlib
from typing import Any

from absl import logging
import jax
import orbax.checkpoint as ocp

from models.lab.training import kept
from models.lab.training import run_record

_NUMBER = 2  # The newest ones are kept.


@contextlib.contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
  """Orbax, which logs the traceback of an error that it also raises."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)
  try:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
      yield checkpointer
  finally:
    logging.set_verbosity(before)


class Checkpoints:
  """The folders `STEP` of a folder: a state and the loss curve up to it."""

  def __init__(self, folder: pathlib.Path, report: Callable[[str], None]):
    self._folder = folder.absolute()
    self._report = report
    self._steps: list[int] = []  # Of the checkpoints, ascending.

  def _path(self, step: int) -> pathlib.Path:
    return self._folder / str(step)

  def describe_last(self) -> str:
    """What is kept, for a message."""
    if not self._steps:
      return 'there is no checkpoint yet'
    return f'the last good checkpoint is {self._path(self._steps[-1])}'

  def restore(self, state: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The last whole checkpoint, else the given state and an empty curve.

    Damaged ones are reported.

    Args:
      state: a pytree of arrays, with the structure, shapes and dtypes of those
        that were saved.

    Raises:
      ValueError: the checkpoint has another structure; the message names it.
    """
    names = [path.name for path in self._folder.glob('*') if path.is_dir()]
    self._steps = sorted(int(name) for name in names if name.isdecimal())
    while self._steps:
      path = self._path(self._steps[-1])
      otherwise = 'training starts anew'
      if len(self._steps) > 1:
        otherwise = 'the checkpoint before it is taken'
      if kept.is_whole(path, self._report, otherwise=otherwise):
        return self._read(path, state)
      self._steps.pop()
    return state, []

  def _read(self, path, state) -> tuple[Any, list[dict[str, Any]]]:
    expected = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    try:
      with _checkpointer() as checkpointer:
        restored = checkpointer.restore(
          path / 'state', args=ocp.args.StandardRestore(expected)
        )
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f'{path} is not of this program: {str(error).splitlines()[0]}; give'
        ' another --workdir'
      ) from error
    return restored, json.loads((path / 'curve.json').read_text('utf-8'))

  def save(self, step: int, state: Any, curve: list[dict[str, Any]]) -> None:
    """Saves a checkpoint, then removes the oldest if there are too many.

    Raises:
      OSError: it cannot be written; those before it are kept.
    """

    def write(folder: pathlib.Path) -> None:
      with _checkpointer() as checkpointer:
        checkpointer.save(folder / 'state', args=ocp.args.StandardSave(state))
      run_record.save_json(folder / 'curve.json', curve)

    kept.save(self._path(step), write)
    self._steps.append(step)
    while len(self._steps) > _NUMBER:
      kept.remove(self._path(self._steps.pop(0)))
