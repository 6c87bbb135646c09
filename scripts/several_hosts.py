"""Several hosts, each of which runs the same command; see --coordinator."""

from collections.abc import Callable
import json
import os
import pathlib
import sys
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from specdec import text_files


def join(
  address: str, number: int | None, index: int | None, timeout: int
) -> None:
  """Waits for the other hosts; only process 0 prints from now on.

  The arguments are the values of the flags from `--coordinator` on.
  """
  try:
    jax.distributed.initialize(
      None if address == 'auto' else address,
      number,
      index,
      heartbeat_timeout_seconds=timeout,
      shutdown_timeout_seconds=timeout,
    )
  except (ValueError, RuntimeError) as error:
    raise ValueError(f'--coordinator={address}: {error}') from error
  sys.excepthook = _end_at_once
  if not writes():
    sys.stdout = open(os.devnull, 'w', encoding='utf-8')  # noqa: SIM115


def _end_at_once(kind: type, error: BaseException, trace: Any) -> None:
  """Ends this process without waiting for hosts, of which one may be dead."""
  sys.__excepthook__(kind, error, trace)
  print(
    f'{pathlib.Path(sys.argv[0]).name}: this host or another one has failed:'
    f' {" ".join(str(error).split())}',
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)


def writes() -> bool:
  """Whether this process prints and writes: the first of all hosts."""
  return jax.process_index() == 0


def of_first_host(make: Callable[[], Any]) -> Any:
  """What a function returns on the first host, which alone calls it, as JSON.

  Files are read so, because hosts whose inputs differ would wait for ever.
  """
  text = text_files.to_json(make() if writes() else None).encode()
  size = multihost_utils.broadcast_one_to_all(np.array(len(text)))
  padded = np.zeros(int(size), np.uint8)
  if writes():
    padded[:] = np.frombuffer(text, np.uint8)
  found = multihost_utils.broadcast_one_to_all(padded)
  return json.loads(np.asarray(found, np.uint8).tobytes())
