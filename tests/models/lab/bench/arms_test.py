"""Arms by name, and other programs' decoding of our weights, beside our own.

A program stands in the place of the servers of llama.cpp and vLLM.
"""

import re
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_blocks

import specdec
from specdec.models.checkpoints import hub
from specdec.models.lab.bench import arms as arms_lib
from specdec.models.lab.bench import peer as peer_lib
from specdec.models.lab.bench import transformers_peer
from specdec.models.nn import adapter
from specdec.models.text import choice as choice_lib
from specdec.models.text import settings as settings_lib

_CONTEXT = 96
_LIMIT = 20
_PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]
_EOS = 7
# It counts on from the last id to the end of a text, which llama.cpp leaves
# out; a request whose temperature is above 1 is refused with all that was said
# to it; and it logs more than a pipe holds.
_SERVER = f"""\
#!{sys.executable}
import http.server, json, os, sys
if sys.argv[1] == '--version':
  sys.exit(print('version: 5 (abc)', file=sys.stderr))
if sys.argv[1] == '-c':
  sys.exit(print('0.1') if 'vllm' in sys.argv[2] else 1)
words = [word for word in sys.argv if word != '--no-enable-prefix-caching']
words = words[3:] if words[1] == '-m' else words[1:]
flags = dict(zip(words[::2], words[1::2]))
if flags.get('--spec-draft-n-max') == '99':
  sys.exit('error: 99 is too many')
drafted = 4 * bool({{'--spec-type', '--speculative-config'}} & {{*flags}})
total = 0
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    kind = 'vllm:spec_decode_num_%s_tokens_total{{engine="0"}} %d.0\\n'
    counts = ('accepted', total // 2), ('draft', total)
    self.answer(''.join(kind % one for one in counts))
  def do_POST(self):
    global total
    request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    print('.' * 100_000, file=sys.stderr, flush=True)
    if request['temperature'] > 1:
      told = request, flags, os.environ.get('VLLM_CPU_OMP_THREADS_BIND')
      return self.answer(json.dumps(told), 400)
    (stop,), total = request.get('stop_token_ids', [{_EOS}]), total + drafted
    count = request.get('max_tokens', request.get('n_predict'))
    first = request['prompt'][-1] + 1
    ids = [*range(first, first + max(count, 1))]
    ended = stop in ids
    if ended:
      ids = ids[: ids.index(stop) + (self.path == '/v1/completions')]
    counts = {{'draft_n': drafted, 'draft_n_accepted': drafted // 2}}
    self.answer(json.dumps({{
      'choices': [{{'token_ids': ids}}],
      'tokens': ids,
      'stop_type': 'eos' if ended else 'limit',
      'timings': counts if drafted else {{}},
    }}))
  def answer(self, body, status=200):
    self.send_response(status)
    self.end_headers()
    self.wfile.write(body.encode())
  def log_message(self, *args):
    pass
port = int(flags['--port'])
http.server.HTTPServer(('127.0.0.1', port), Handler).serve_forever()
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Servers, folders of a target and a draft, and the header of a GGUF file."""
  folder = tmp_path_factory.mktemp('peers')
  for name, seed in (('target', 0), ('draft', 1)):
    module = tiny.module(num_positions=_CONTEXT, seed=seed)
    hub.save_pretrained(module, folder / name)
  for name in ('llama-server', 'python'):
    (folder / name).write_text(_SERVER)
    (folder / name).chmod(0o755)
  writer = gguf.GGUFWriter(folder / 'model.gguf', 'llama')
  writer.add_tensor('token_embd.weight', np.zeros((40, 16), np.float16))
  tiny_blocks.finish(writer)
  return folder


def _arms(folder, text, *, eos_ids=(_EOS,), **changes):
  if text.startswith('transformers'):
    pytest.importorskip('torch')
  names = dict.fromkeys(('target', 'draft'), 'model.gguf')
  if not text.startswith('llama.cpp'):
    names = {name: name for name in names}
  for flag, name in names.items():
    name = changes.pop(flag, name)
    known = name and (folder / name).exists()
    names[flag] = str(folder / name) if known else name
  settings = {'models': choice_lib.ModelChoice(**names), 'seed': 3}
  settings |= {'drafting': settings_lib.DraftSettings()}
  settings |= {'sampling': specdec.Sampling()}
  settings |= {'llama_cpp': str(folder), 'vllm': str(folder / 'python')}
  specs = arms_lib.parse_arms(text, 'float32')
  task = peer_lib.BenchmarkTask(**settings | changes)
  arms = arms_lib.make_peer_arms(specs, task, eos_ids)
  return [arms[spec] for spec in specs]


def test_rows_that_are_done_have_no_more_forwards():
  rows = [[4, 5, 6, 9], [7, 8]]
  found = peer_lib.as_generation(rows, [6], {'target': 3, 'draft': 5})
  assert found.tokens == [[4, 5, 6], [7, 8]]
  assert found.finish_reasons == ['eos', 'length']
  assert found.stats.target_forwards == 3 + 2
  assert found.stats.block_efficiency == 1
  assert found.stats.stage_forwards == {'draft': 5}


def test_without_torch_the_remedy_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  with pytest.raises(ValueError, match='pip install torch'):
    transformers_peer.Transformers().describe(peer_lib.BenchmarkTask())


def test_greedy_tokens_are_ours_however_they_are_decoded(folder):
  names = 'transformers,transformers-assisted,transformers-lookup'
  pytest.importorskip('torch')
  module = hub.load_module(folder / 'target', dtype=jnp.float32)
  target, key = adapter.as_model(module), jax.random.key(0)
  ours = specdec.generate(target, key, [_PROMPT], max_new_tokens=_LIMIT)
  eos = ours.tokens[0][5]
  assert ours.tokens[0].index(eos) == 5
  for eos_ids, size, reason in (((), _LIMIT, 'length'), ((eos,), 6, 'eos')):
    found = [
      arm.decode([_PROMPT], _LIMIT)
      for arm in _arms(folder, names, eos_ids=eos_ids)
    ]
    for generation in found:
      assert generation.tokens == [ours.tokens[0][:size]]
      assert generation.finish_reasons == [reason]
      assert generation.stats.new_tokens == size
    plain, assisted, _ = (generation.stats for generation in found)
    assert plain.target_forwards == size
    assert assisted.stage_forwards['draft'] > 0


@pytest.mark.parametrize('name', ['llama.cpp', 'vllm'])
def test_tokens_and_forwards_of_servers_are_counted_as_ours(name, folder):
  plain, draft = _arms(folder, f'{name},{name}-draft')
  generation = plain.decode([[10, 11]], 5)
  assert generation.tokens == [[12, 13, 14, 15, 16]]
  assert generation.finish_reasons == ['length']
  assert generation.stats.target_forwards == 5
  assert plain.decode([[10, 11]], 0).tokens == [[]]
  ended = draft.decode([[3, 4]], 9)
  assert (ended.tokens, ended.finish_reasons) == ([[5, 6, _EOS]], ['eos'])
  for _ in range(2):  # Counters of a server go on.
    stats = draft.decode([[10, 11]], 5).stats
    assert stats.target_forwards == 3
    assert stats.stage_forwards == {'draft': 4}


@pytest.mark.parametrize(
  ('text', 'changes', 'parts'),
  [
    (
      'llama.cpp-draft(spec_draft_n_max=4)',
      {},
      [
        '"seed": 9, "temperature": 1.5, "top_k": 3, "top_p": 1.0, "min_p": 0',
        '"samplers": ["temperature", "top_k", "top_p", "min_p"]',
        '"prompt": [1, 2], "n_predict": 3, "cache_prompt": false',
        '"--spec-type": "draft-simple", "--spec-draft-n-max": "4"',
      ],
    ),
    (
      'vllm-lookup(num_speculative_tokens=5):bfloat16',
      {},
      [
        '"seed": 9, "temperature": 1.5, "top_k": 3, "top_p": 1.0, "min_p": 0',
        '"prompt": [1, 2], "max_tokens": 3, "return_token_ids": true',
        r'\"method\": \"ngram\", \"num_speculative_tokens\": 5',
        '"--dtype": "bfloat16", "--max-model-len": "4096", "--max-num-seqs": ',
      ],
    ),
    ('vllm-draft', {'draft': 'demo'}, [r'models/demo/draft\"']),
  ],
)
def test_what_a_server_is_told(text, changes, parts, folder):
  changes = {'sampling': specdec.Sampling(temperature=1.5, top_k=3)} | changes
  (arm,) = _arms(folder, text, seed=9, **changes)
  name = text.partition('-')[0]
  with pytest.raises(ValueError, match=f'{name}: ') as error:
    arm.decode([[1, 2]], 3)
  for part in parts:
    assert part in str(error.value)


def test_versions(folder):
  task = peer_lib.BenchmarkTask(
    llama_cpp=str(folder), vllm=str(folder / 'python')
  )
  for name, version in (('llama.cpp', 'version: 5 (abc)'), ('vllm', '0.1')):
    assert arms_lib.PEERS[name].describe(task)[name] == version


_BIASED = {'sampling': specdec.Sampling(logit_bias={1: 2})}


@pytest.mark.parametrize(
  ('text', 'changes', 'limit', 'message'),
  [
    ('llama.cpp', {'llama_cpp': '/none'}, 1, 'no program llama-server in /non'),
    (
      'llama.cpp',
      {'target': 'demo'},
      1,
      '--target=demo: the llama.cpp arms re',
    ),
    ('llama.cpp', {'batch_size': 2}, 1, 'one prompt at a time, not 2'),
    ('llama.cpp', _BIASED, 1, 'llama.cpp arms have no --logit_bi'),
    ('llama.cpp', {}, 4096, 'exceed the context of the llama.cpp arms'),
    ('llama.cpp-draft', {'draft': None}, 1, 'needs a draft; give --draft'),
    ('llama.cpp-draft(spec_draft_n_max=99)', {}, 1, 'start: .*99 is too many'),
    ('vllm', {'vllm': None}, 1, 'install vLLM in an environment of its own'),
    ('vllm', {'target': 'model.gguf'}, 1, '--target=.*: the vllm arms read fo'),
    ('vllm', _BIASED, 1, 'vllm arms have no --logit_b'),
    ('vllm-draft(num_speculative_tokens=x)', {}, 1, 'must be an integer'),
    ('transformers-assisted(num_assistant_tokens=0)', {}, 1, 'integer from 1'),
    ('transformers', _BIASED, 1, 'no --logit_b'),
  ],
)
def test_what_cannot_be_done_is_refused(text, changes, limit, message, folder):
  with pytest.raises(ValueError, match=message):
    _arms(folder, text, **changes)[0].decode([_PROMPT], limit)


# Names of arms, to and fro.


def test_methods_dtypes_and_options_are_told_apart():
  text = (
    'plain,chain:bfloat16,tree(num_nodes=16,rounds=2),'
    'staged(inner=lookup):bfloat16,transformers-lookup'
  )
  arms = arms_lib.parse_arms(text, 'float32')
  assert arms == [
    peer_lib.ArmSpec('plain', 'float32'),
    peer_lib.ArmSpec('chain', 'bfloat16'),
    peer_lib.ArmSpec('tree', 'float32', (('num_nodes', '16'), ('rounds', '2'))),
    peer_lib.ArmSpec('staged', 'bfloat16', (('inner', 'lookup'),)),
    peer_lib.ArmSpec('transformers-lookup', 'float32'),
  ]
  assert [arm.peer for arm in arms] == [None] * 4 + ['transformers']
  (arm,) = arms_lib.parse_arms('llama.cpp-draft(spec_draft_n_max=8)', 'float32')
  assert (arm.peer, arm.dtype) == ('llama.cpp', 'gguf')
  assert arms_lib.parse_arms(','.join(map(str, arms)), 'bfloat16') == arms
  assert len(arms_lib.parse_arms('chain(draft_prompt=4)', 'float32')) == 1
  # Alternatives give all combinations.
  arms = arms_lib.parse_arms(
    'tree(num_nodes=8|16,rounds=2|4|6):bfloat16', 'float32'
  )
  assert [str(arm) for arm in arms] == [
    f'tree(num_nodes={nodes},rounds={rounds}):bfloat16'
    for nodes in (8, 16)
    for rounds in (2, 4, 6)
  ]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('forest', "'forest' is not known; it is"),
    ('plain:float64', "'plain:float64' is not known"),
    ('tree(num_nodes=4', 'is not known; it is'),
    ('chain(num_nodes=4)', "'num_nodes=4' is not known; chain has"),
    ('plain(width=4)', 'plain has none'),
    ('lookup(draft_prompt=4)', "'draft_prompt=4' is not known; lookup has"),
    ('tree(width)', "'width' is not known"),
    ('tree(width=4,width=5)', 'has an option twice'),
    ('tree,tree', 'arms are repeated'),
    ('tree(width=4|4)', 'arms are repeated'),
    ('', 'no arm is given'),
    ('rounds=two', 'rounds=two: '),
    ('inner=ngrams', 'inner=ngrams: expected one of none, ngram, lookup'),
  ],
)
def test_what_is_not_known_is_refused(text, message):
  name, _, value = text.partition('=')
  call = lambda: arms_lib.parse_arms(text, 'float32')
  if name in settings_lib.OPTIONS:
    call = lambda: settings_lib.with_options(
      settings_lib.DraftSettings(), {name: value}
    )
  with pytest.raises(ValueError, match=re.escape(message)):
    call()
