"""Arms of vLLM, with a program in the place of its Python."""

import sys

import pytest
import tiny

from models.checkpoints import hub
from models.lab.bench import arms as arms_lib
from models.lab.bench import peer as peer_lib
from models.text import choice as choice_lib
from models.text import settings as settings_lib
import specdec

_EOS = 7
# It counts on from the last id to the end of a text; a request whose
# temperature is above 1 is refused with all that was said to it.
_SERVER = f"""\
#!{sys.executable}
import http.server, json, os, sys
if sys.argv[1] == '-c':
  sys.exit(print('0.1') if 'vllm' in sys.argv[2] else 1)
words = [word for word in sys.argv[3:] if word != '--no-enable-prefix-caching']
flags = dict(zip(words[::2], words[1::2]))
accepted = 0
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    kind = 'vllm:spec_decode_num_%s_tokens_total{{engine="0"}} %d.0\\n'
    counts = ('accepted', accepted), ('draft', 2 * accepted)
    self.answer(''.join(kind % one for one in counts))
  def do_POST(self):
    global accepted
    request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    if request['temperature'] > 1:
      told = request, flags, os.environ['VLLM_CPU_OMP_THREADS_BIND']
      return self.answer(json.dumps(told), 400)
    first, stop = request['prompt'][-1] + 1, request['stop_token_ids'][0]
    ids = [*range(first, first + request['max_tokens'])]
    ids = ids[: ids.index(stop) + 1] if stop in ids else ids
    accepted += 2 if '--speculative-config' in flags else 0
    self.answer(json.dumps({{'choices': [{{'token_ids': ids}}]}}))
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
  folder = tmp_path_factory.mktemp('vllm')
  hub.save_pretrained(tiny.module(num_positions=96, seed=0), folder)
  (folder / 'python').write_text(_SERVER)
  (folder / 'python').chmod(0o755)
  return folder


def _arms(folder, text, **changes):
  choice = choice_lib.ModelChoice(
    **{one: changes.pop(one, str(folder)) for one in ('target', 'draft')}
  )
  settings = {'models': choice, 'drafting': settings_lib.DraftSettings()}
  settings |= {'sampling': specdec.Sampling()}
  settings |= {'vllm': str(folder / 'python')}
  specs = arms_lib.parse_arms(text, 'float32')
  task = peer_lib.BenchmarkTask(**settings | changes)
  arms = arms_lib.make_peer_arms(specs, task, (_EOS,))
  return [arms[spec] for spec in specs]


def test_tokens_and_forwards_are_counted_as_ours(folder):
  plain, draft = _arms(folder, 'vllm,vllm-draft')
  generation = plain.decode([[10, 11]], 5)
  assert generation.tokens == [[12, 13, 14, 15, 16]]
  assert generation.finish_reasons == ['length']
  assert generation.stats.target_forwards == 5
  assert plain.decode([[10, 11]], 0).tokens == [[]]
  ended = draft.decode([[3, 4]], 9)
  assert (ended.tokens, ended.finish_reasons) == ([[5, 6, _EOS]], ['eos'])
  for _ in range(2):  # Counters of the server go on.
    stats = draft.decode([[10, 11]], 5).stats
    assert stats.target_forwards == 3
    assert stats.stage_forwards == {'draft': 4}


def test_what_the_server_is_told(folder):
  sampling = specdec.Sampling(temperature=1.5, top_k=3)
  text = 'vllm-lookup(num_speculative_tokens=5):bfloat16'
  (arm,) = _arms(folder, text, sampling=sampling, seed=9)
  with pytest.raises(ValueError, match='vllm: ') as error:
    arm.decode([[1, 2]], 3)
  for part in (
    '"top_k": 3, "seed": 9, "temperature": 1.5',
    '"prompt": [1, 2], "max_tokens": 3, "return_token_ids": true',
    r'\"method\": \"ngram\", \"num_speculative_tokens\": 5',
    '"--dtype": "bfloat16", "--max-model-len": "4096", "--max-num-seqs": "1"',
  ):
    assert part in str(error.value)
  task = peer_lib.BenchmarkTask(vllm=str(folder / 'python'))
  assert arms_lib.PEERS['vllm'].describe(task)['vllm'] == '0.1'


@pytest.mark.parametrize(
  ('kind', 'changes', 'limit', 'message'),
  [
    ('', {'vllm': None}, 1, 'install vLLM in an environment of its own'),
    ('', {'batch_size': 2}, 1, 'one prompt at a time, not 2'),
    ('', {'sampling': specdec.Sampling(logit_bias={1: 2})}, 1, 'no --logit_b'),
    ('', {}, 4096, 'exceed the context of the vllm arms'),
    ('-draft(num_speculative_tokens=x)', {}, 1, 'must be an integer'),
  ],
)
def test_what_it_cannot_do_is_refused(folder, kind, changes, limit, message):
  with pytest.raises(ValueError, match=message):
    _arms(folder, f'vllm{kind}', **changes)[0].decode([[1]], limit)
