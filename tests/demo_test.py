"""The embedded pair: what ships, and that it does what it is there for."""

import jax
import pytest

from models.checkpoints import hub
from models.text.drafters import DEMO_TABLE
from models.text.drafters import DraftSettings
from models.text.drafters import make_drafter
from models.text.pair import load_pair
import specdec

_PROMPTS = (
  'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
  'def read_lines(path):\n    """Yield the lines of a file."""\n',
  'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n',
)
_LIMIT = 48


@pytest.fixture(scope='module')
def pair():
  return load_pair('demo', 'demo-draft')


def _drafter(pair, method):
  """With the settings that the scripts have by default."""
  settings = DraftSettings(
    num_draft_tokens=4,
    tree=specdec.TreeShape(num_nodes=64, capacity=512),
    stage=specdec.StageConfig(width=16, branching=8, rounds=4),
    inner='ngram+lookup',
    inner_stage=specdec.StageConfig(width=8, branching=3, rounds=3),
    inner_rounds_alone=8,
    ngram='demo',
    lookup=specdec.PromptLookup(),
  )
  return make_drafter(method, pair, settings)


def _generate(pair, *, method, sampling):
  return specdec.generate(
    pair.target,
    jax.random.key(3),
    [pair.encode(prompt) for prompt in _PROMPTS],
    drafter=_drafter(pair, method),
    max_new_tokens=_LIMIT,
    sampling=sampling,
    eos_ids=pair.eos_ids,
  )


@pytest.mark.parametrize(
  'sampling',
  [specdec.Sampling(), specdec.Sampling(temperature=1.0, top_k=50)],
  ids=['greedy', 'sampled'],
)
def test_every_method_helps_and_changes_nothing(pair, sampling):
  plain = _generate(pair, method='plain', sampling=sampling)
  tau = {}
  for method in ('chain', 'tree', 'staged', 'ngram', 'ngram+lookup'):
    result = _generate(pair, method=method, sampling=sampling)
    assert result.tokens == plain.tokens
    assert result.stats['relative_bandwidth'] < 1
    tau[method] = result.stats['block_efficiency']
  assert tau['chain'] > 1.5
  assert tau['tree'] > 1.1 * tau['chain']
  assert tau['staged'] > 1.1 * tau['chain']
  assert tau['ngram'] > 1.4


def test_small_enough_to_ship_and_draft_cheap_enough_to_help(pair):
  folders = [hub.locate(name) for name in ('demo', 'demo-draft')]
  size = sum(
    file.stat().st_size for folder in folders for file in folder.iterdir()
  )
  assert size <= 40e6
  assert DEMO_TABLE.stat().st_size <= 10e6
  target, draft = pair.target.spec, pair.draft.spec
  assert draft.weight_bytes * 8 <= target.weight_bytes
  assert target.max_positions == draft.max_positions == 1024


@pytest.mark.parametrize('text', [*_PROMPTS, '\tnaïve ☃\r\n\x00  end  '])
def test_tokenizer_round_trips(pair, text):
  assert pair.decode(pair.encode(text)) == text


def test_plain_greedy_is_what_transformers_says(pair):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  peer = transformers.AutoModelForCausalLM.from_pretrained(
    hub.locate('demo'), dtype=torch.float32
  )
  ours = _generate(pair, method='plain', sampling=specdec.Sampling())
  for prompt, tokens in zip(_PROMPTS, ours.tokens, strict=True):
    ids = pair.encode(prompt)
    output = peer.generate(
      torch.tensor([ids]), max_new_tokens=_LIMIT, do_sample=False
    )
    assert tokens == output[0, len(ids) :].tolist()
