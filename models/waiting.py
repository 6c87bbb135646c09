"""Says on stderr what a user waits for."""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import sys
import threading
from typing import TypeVar

import tqdm

_PATIENCE = 2.0  # Seconds until a line says what is being waited for.
_LARGE = 10**9  # Bytes of a checkpoint that gets a progress bar.

_Item = TypeVar('_Item')


@contextlib.contextmanager
def announced(what: str, patience: float = _PATIENCE) -> Iterator[None]:
  """Prints `what` on stderr if the block takes longer than `patience` s."""
  line = lambda: print(f'{what} ...', file=sys.stderr, flush=True)
  timer = threading.Timer(patience, line)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def progress(
  items: Iterable[_Item], what: str, number: int, num_bytes: int
) -> Iterator[_Item]:
  """The items; meanwhile a line, or a bar on a terminal for over 1 GB."""
  if num_bytes > _LARGE and sys.stderr.isatty():
    yield from tqdm.tqdm(items, what, number, leave=False)
    return
  with announced(what):
    yield from items
