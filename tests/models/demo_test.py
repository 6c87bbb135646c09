"""The embedded pair: what ships, and that it does what it is there for."""

import jax
import pytest

import specdec
from specdec.models.checkpoints import hub
from specdec.models.text import choice as choice_lib
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib

_PROMPTS = (
  'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
  'def read_lines(path):\n    """Yield the lines of a file."""\n',
  'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n',
)


@pytest.fixture(scope='module')
def pair():
  return pair_lib.load_pair(choice_lib.ModelChoice('demo', 'demo-draft'))


def _generate(pair, method):
  """Greedy and sampled rows, with the settings that scripts have by default."""
  sampling = specdec.Sampling(temperature=[0, 0, 1], top_k=[None, None, 50])
  return specdec.generate(
    pair.target,
    jax.random.key(3),
    [pair.encode(prompt) for prompt in _PROMPTS],
    drafter=drafters.make_drafter(method, pair, settings_lib.DraftSettings()),
    max_new_tokens=32,
    sampling=sampling,
    eos_ids=pair.eos_ids,
  )


def test_what_ships_helps_and_changes_nothing(pair):
  """The n-gram table helps inside of `staged`."""
  load = lambda head: pair_lib.load_pair(
    choice_lib.ModelChoice('demo', None, head=head)
  )
  plain, chain, staged, head, block = (
    _generate(*arguments)
    for arguments in (
      (pair, 'plain'),
      (pair, 'chain'),
      (pair, 'staged'),
      (load('demo'), 'chain'),
      (load('demo-block'), 'chain'),
    )
  )
  for drafted in (chain, staged, head, block):
    assert drafted.tokens == plain.tokens
  for drafted in (chain, staged):
    assert drafted.stats.relative_bandwidth < 1
  tokens = lambda result: result.stats.block_efficiency
  assert tokens(chain) > 1.5
  assert tokens(staged) > 1.1 * tokens(chain)
  assert tokens(head) > 2
  assert tokens(block) > 1.5


def test_small_enough_to_ship_and_draft_cheap_enough_to_help(pair):
  names = ('demo', 'demo-draft', 'demo-head', 'demo-block')
  folders = [hub.locate(name).path for name in names]
  files = [file for folder in folders for file in folder.iterdir()]
  assert sum(file.stat().st_size for file in files) <= 40e6
  assert drafters.DEMO_TABLE.stat().st_size <= 10e6
  target, draft = pair.target.spec, pair.draft.spec
  assert draft.weight_bytes * 8 <= target.weight_bytes
  assert target.max_positions == draft.max_positions == 1024
