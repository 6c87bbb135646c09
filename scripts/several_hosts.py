"""Several hosts that all run the same command; see --coordinator."""

from collections.abc import Callable
import json
import os
import pathlib
import re
import sys
from typing import Any

from absl import flags
import command_line
import jax
from jax.experimental import multihost_utils
import numpy as np

from specdec.text import text_files

COORDINATOR = flags.DEFINE_string(
  'coordinator',
  None,
  'several hosts that all run the same command: host:port of the first; auto:'
  ' a TPU pod, Slurm or Open MPI gives it and the other two flags',
)
NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'with --coordinator, of all hosts', lower_bound=1
)
PROCESS_ID = flags.DEFINE_integer(
  'process_id',
  None,
  'with --coordinator, the number of this process; 0 prints and writes',
  lower_bound=0,
)
HOST_TIMEOUT = flags.DEFINE_integer(
  'host_timeout',
  60,
  'seconds after which a host that is not heard of ends the others',
  lower_bound=1,
)
FLAGS = (COORDINATOR, NUM_PROCESSES, PROCESS_ID, HOST_TIMEOUT)
"""None of them changes a result."""


@command_line.checked_first
def _check() -> None:
  """Refuses flags that do not go together."""
  numbers = NUM_PROCESSES, PROCESS_ID
  given = [flag.name for flag in numbers if flag.value is not None]
  address = COORDINATOR.value
  if address is None:
    if given:
      raise ValueError(f'--{given[0]} needs --coordinator, host:port')
    return
  if flags.FLAGS.mesh is None:
    raise ValueError('--coordinator needs --mesh, of the devices of all hosts')
  if flags.FLAGS.prompt_file == '-':
    raise ValueError(
      '--prompt_file=-: with --coordinator, name a file that every host has'
    )
  if flags.FLAGS.plan == 'auto':
    raise ValueError(
      '--plan=auto measures, and hosts would find different plans; make one'
      ' with tune.py and name its file'
    )
  if (store := getattr(flags.FLAGS, 'store', None)) is not None:
    raise ValueError(
      f'--store={store}: every host would find other texts; leave it out'
    )
  if address == 'auto':
    if given:
      raise ValueError(f'--coordinator=auto finds --{given[0]}; leave it out')
    return
  if not re.fullmatch(r'.+:\d+', address):
    raise ValueError(f'--coordinator={address}: expected host:port, or auto')
  num_processes, process_id = (flag.value for flag in numbers)
  if num_processes is None or process_id is None or process_id >= num_processes:
    raise ValueError(
      f'--coordinator={address} needs --num_processes and a --process_id less'
      f' than that, got {num_processes} and {process_id}'
    )


def refuse(why: str) -> None:
  """Refuses `--coordinator` in a script that is for one host."""

  @command_line.checked_first
  def check() -> None:
    if COORDINATOR.value is not None:
      raise ValueError(f'--coordinator={COORDINATOR.value}: {why}')


@command_line.before_main
def _join() -> None:
  """Waits for the other hosts; only process 0 prints from now on."""
  address, timeout = COORDINATOR.value, HOST_TIMEOUT.value
  if address is None:
    return
  try:
    jax.distributed.initialize(
      None if address == 'auto' else address,
      NUM_PROCESSES.value,
      PROCESS_ID.value,
      heartbeat_timeout_seconds=timeout,
      shutdown_timeout_seconds=timeout,
    )
  except (ValueError, RuntimeError) as error:
    raise ValueError(f'--coordinator={address}: {error}') from error
  sys.excepthook = _end_at_once
  if not writes():
    sys.stdout = open(os.devnull, 'w', encoding='utf-8')  # noqa: SIM115


def _end_at_once(error_type: type, error: BaseException, trace: Any) -> None:
  """Ends this process without waiting for other hosts; one may be dead."""
  sys.__excepthook__(error_type, error, trace)
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
  """The result of a function that the first host alone calls, as JSON.

  It reads files, because hosts whose inputs differ would wait for ever.
  """
  text = text_files.to_json(make() if writes() else None).encode()
  size = multihost_utils.broadcast_one_to_all(np.array(len(text)))
  padded = np.zeros(int(size), np.uint8)
  if writes():
    padded[:] = np.frombuffer(text, np.uint8)
  received = multihost_utils.broadcast_one_to_all(padded)
  return json.loads(np.asarray(received, np.uint8).tobytes())
