"""All tests share this: how programs are compiled, and helpers to begin with.

Models and drafters:

- `tiny`: GPT-2s and Llamas with random weights, their prompts, keys, sampling.
  Use `tiny.gpt2(num_layers=1)` with `tiny.draft(kind, num_layers=1)`: other
  tests compile the same programs.
- `tiny_drafters`: drafters for them. `simple(kind, draft)` is a chain, a tree
  or a staged drafter; there are tables of n-grams, of pairs and of blocks.
- `tiny_recurrent`: a model whose state is a hash of its path, so that any wrong
  state shows; forwards of models with states.
- `tiny_heads`, `block_folders`: heads and block drafters as others write them.
- `variants`, `gguf_files`, `tiny_blocks`: checkpoints of every family and heads
  that they bring along, GGUF files, matrices in blocks. `by_heart`: drafters
  that know some texts.
- `tiny_demo`, `tiny_served`, `byte_level`, `plans`: stand-ins for the embedded
  models, servers, tokenizers and plans.

References in plain Python or NumPy, which share no code with the library:

- `reference`: plain decoding of one row, token by token.
- `list_trees`: trees as lists, and how they grow.
- `enumeration`: distributions that are summed, and rules of verification.
- `slow_head`: heads by their formulas.

Calls: `fuzzing` makes random ones of the text API, `command_lines` runs
scripts. `quick` has the options by which programs compile fast. `on_devices`,
`cpu_calls` and `strip_notebooks` are programs of their own.
"""

import collections
import gc
import json
import os
import pathlib
import shutil
from unittest import mock

# Set before anything else imports JAX. An explicit choice wins, so the suite
# can be tried on an accelerator.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

# Compiling takes long. What one process has compiled serves others that compile
# alike: workers, one script after another, and the next run.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _programs_kept = pathlib.Path(__file__).parents[1] / 'build/programs'
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(_programs_kept)
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'
  # JAX's own limit reads the size of every file whenever it writes one.
  if sum(file.stat().st_size for file in _programs_kept.glob('*')) > 2**30:
    shutil.rmtree(_programs_kept)

import hypothesis
import jax
import pytest
import quick

# Silent broadcasting of a `[V]` or `[B]` array is how batches get mixed up.
jax.config.update('jax_numpy_rank_promotion', 'raise')

# The same examples every time; a busy machine may be slow.
hypothesis.settings.register_profile(
  'suite', derandomize=True, deadline=None, max_examples=100, database=None
)
hypothesis.settings.load_profile('suite')

# A process may have 65,530 memory mappings, and compiled programs need many.
_MAX_MAPPINGS = 25_000

# How many programs all tests may have compiled, and the seconds of each file
# when that was counted (for the order of files, longest first).
_BUDGETS = pathlib.Path(__file__).parent / 'golden/budgets.json'

# Files that took more seconds are slow. By file and not by test, because the
# first test of a file often pays for programs that others then have compiled.
_SLOW = 10

_COMPILED = '/jax/core/compile/backend_compile_duration'
_STARTED = pytest.StashKey[int]()
_compiled = []


@pytest.fixture(autouse=True, scope='module')
def _few_mappings():
  """Forgets compiled programs before the process dies of them.

  Between files, so that no file has a program of its own compiled twice. What
  is kept is left out of garbage collection, which otherwise takes long.
  """
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > _MAX_MAPPINGS:
    gc.unfreeze()
    jax.clear_caches()
    gc.collect()
  gc.freeze()


def pytest_configure(config):
  """Here programs run for moments; with `--long` they compile as for users."""
  gc.set_threshold(50_000, 20, 20)
  if not config.getoption('--long'):
    with mock.patch.dict(os.environ, quick.environment()):
      jax.devices()  # XLA reads its flags once
    jax.config.update('jax_traceback_in_locations_limit', 0)
  # Programs that a persistent cache has count, too.
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: event == _COMPILED and _compiled.append(event)
  )


def pytest_addoption(parser):
  parser.addoption(
    '--long', action='store_true', help='also run the tests that take minutes'
  )
  parser.addoption(
    '--fast',
    action='store_true',
    help=f'skip files of over {_SLOW} s in golden/budgets.json',
  )
  parser.addoption(
    '--shard',
    metavar='I/N',
    help='the I-th of N parts of the files, of about the same seconds',
  )
  parser.addoption(
    '--update_limits',
    action='store_true',
    help='make what is counted now the limits: of counted work (in'
    ' counted_work_test.py) and of programs',
  )


def _file_of(item):
  return item.nodeid.split('::')[0]


def shard_of(files, seconds, index, number):
  """The files of a shard, from 1 to `number`: long ones go where least is."""
  shards = [(0.0, place, []) for place in range(number)]
  for file in sorted(files, key=lambda file: (-seconds(file), file)):
    total, place, chosen = min(shards)
    shards[shards.index((total, place, chosen))] = (
      total + seconds(file) + 1,
      place,
      [*chosen, file],
    )
  return set(shards[index - 1][2])


def _deselect(config, items, is_left_out):
  config.hook.pytest_deselected(
    items=[item for item in items if is_left_out(item)]
  )
  items[:] = [item for item in items if not is_left_out(item)]


def pytest_collection_modifyitems(config, items):
  if not config.getoption('--long'):
    for item in items:
      if item.get_closest_marker('long'):
        item.add_marker(pytest.mark.skip(reason='takes minutes; --long'))
  budgets = json.loads(_BUDGETS.read_text())['seconds']
  seconds = lambda item: budgets.get(_file_of(item), 0)
  if config.getoption('--fast'):
    _deselect(config, items, lambda item: seconds(item) > _SLOW)
  if config.getoption('--shard'):
    index, number = map(int, config.getoption('--shard').split('/'))
    took = lambda file: budgets.get(file, 0)
    files = shard_of({*map(_file_of, items)}, took, index, number)
    _deselect(config, items, lambda item: _file_of(item) not in files)
  # Two workers end at about the same time only if long files come first.
  items.sort(key=lambda item: -seconds(item))


def pytest_runtest_setup(item):
  item.stash.setdefault(_STARTED, len(_compiled))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  report = yield
  if call.when == 'teardown':
    # The process that ran it counted; xdist carries it to the one that reports.
    now = len(_compiled)
    report.programs = now - item.stash.get(_STARTED, now)
  return report


_seconds, _programs = collections.Counter(), collections.Counter()


def pytest_runtest_logreport(report):
  file = report.nodeid.split('::')[0]
  _seconds[file] += report.duration
  _programs[file] += getattr(report, 'programs', 0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
  if hasattr(session.config, 'workerinput'):
    return  # One of several processes hears from all.
  budgets = json.loads(_BUDGETS.read_text())
  count, budget = _programs.total(), budgets['programs']
  is_whole = budgets['seconds'].keys() <= _seconds.keys()
  if session.config.getoption('--update_limits'):
    budgets['seconds'] |= {file: round(took) for file, took in _seconds.items()}
    if is_whole:
      budgets['programs'] = count
    _BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + '\n')
  elif is_whole and not session.config.getoption('--long'):
    # The count of a file depends on the files that its worker ran before.
    if count > 1.15 * budget:
      _complaints.append(
        f'{count} programs were compiled; the budget is {budget}. Share'
        ' programs that other tests have, or raise the budget with'
        ' --update_limits.'
      )
    if _complaints and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED


_complaints: list[str] = []


def pytest_terminal_summary(terminalreporter):
  if len(_seconds) > 1:
    terminalreporter.section('seconds and programs by file')
    for file, seconds in _seconds.most_common():
      if seconds >= 2:
        terminalreporter.line(f'{seconds:6.0f} {_programs[file]:5} {file}')
    terminalreporter.line(f'{_seconds.total():6.0f} {_programs.total():5}')
  for complaint in _complaints:
    terminalreporter.line(complaint, red=True)
