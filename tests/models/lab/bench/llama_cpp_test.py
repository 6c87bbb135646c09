"""Arms of llama.cpp, with a program in the place of its server."""

import sys
import textwrap

import gguf
import numpy as np
import pytest

from models.lab.bench import arms as arms_lib
from models.lab.bench import peer as peer_lib
from models.text import choice as choice_lib
from models.text import settings as settings_lib
import specdec

_EOS = 7
# It counts on from the last id, and ends before 7 as the real one does; it
# says what it was asked and how it was started, and logs more than a pipe
# holds.
_SERVER = f"""\
#!{sys.executable}
import http.server, json, sys
if '--version' in sys.argv:
  sys.exit(print('version: 5 (abc)', file=sys.stderr))
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if flags.get('--spec-draft-n-max') == '99':
  sys.exit('error: 99 is too many')
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.answer({{}})
  def do_POST(self):
    request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    print('.' * 100_000, file=sys.stderr, flush=True)
    if request['temperature'] > 1:
      return self.answer({{'asked': request, 'flags': flags}}, 400)
    first = request['prompt'][-1] + 1
    ids = [*range(first, first + max(request['n_predict'], 1))]
    ended = {_EOS} in ids
    ids = ids[: ids.index({_EOS})] if ended else ids
    drafts = {{'draft_n': 6, 'draft_n_accepted': 2}}
    self.answer({{
      'tokens': ids,
      'stop_type': 'eos' if ended else 'limit',
      'timings': drafts if '--spec-type' in flags else {{}},
    }})
  def answer(self, value, status=200):
    body = json.dumps(value).encode()
    self.send_response(status)
    self.end_headers()
    self.wfile.write(body)
  def log_message(self, *args):
    pass
port = int(flags['--port'])
http.server.HTTPServer(('127.0.0.1', port), Handler).serve_forever()
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """With a server and the header of a model of 1,152 elements in 16 bits."""
  folder = tmp_path_factory.mktemp('llama')
  server = folder / 'llama-server'
  server.write_text(textwrap.dedent(_SERVER))
  server.chmod(0o755)
  writer = gguf.GGUFWriter(folder / 'model.gguf', 'llama')
  for name, size in (
    *(('context_length', 64), ('embedding_length', 16), ('block_count', 1)),
    *(('head_count', 2), ('head_count_kv', 1), ('feed_forward_length', 8)),
    *(('layer_norm_rms_eps', 1e-6), ('vocab_size', 40)),
  ):
    getattr(writer, f'add_{name}')(size)
  writer.add_tensor('token_embd.weight', np.zeros((40, 16), np.float16))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return folder


def _arms(folder, text, **changes):
  model = str(folder / 'model.gguf')
  choice = choice_lib.ModelChoice(
    **{name: changes.pop(name, model) for name in ('target', 'draft')}
  )
  settings = {'models': choice, 'drafting': settings_lib.DraftSettings()}
  settings |= {'sampling': specdec.Sampling(), 'llama_cpp': str(folder)}
  specs = arms_lib.parse_arms(text, 'float32')
  task = peer_lib.BenchmarkTask(**settings | changes)
  arms = arms_lib.make_peer_arms(specs, task, (_EOS,))
  return [arms[spec] for spec in specs]


def test_tokens_and_forwards_are_counted_as_ours(folder):
  plain, draft = _arms(folder, 'llama.cpp,llama.cpp-draft')
  generation = plain.decode([[10, 11]], 5)
  assert generation.tokens == [[12, 13, 14, 15, 16]]
  assert generation.finish_reasons == ['length']
  assert generation.stats.target_forwards == 5
  assert plain.decode([[10, 11]], 0).tokens == [[]]
  ended = draft.decode([[3, 4]], 9)
  assert (ended.tokens, ended.finish_reasons) == ([[5, 6, _EOS]], ['eos'])
  stats = draft.decode([[10, 11]], 5).stats
  assert stats.target_forwards == 3
  assert stats.stage_forwards == {'draft': 6}


def test_what_the_server_is_told(folder):
  sampling = specdec.Sampling(temperature=1.5, top_k=3)
  text = 'llama.cpp-draft(spec_draft_n_max=4)'
  (arm,) = _arms(folder, text, sampling=sampling, seed=9)
  with pytest.raises(ValueError, match=r'llama\.cpp: ') as error:
    arm.decode([[1, 2]], 3)
  said = str(error.value)
  for part in (
    '"seed": 9, "samplers": ["temperature", "top_k", "top_p", "min_p"]',
    '"temperature": 1.5, "top_k": 3, "top_p": 1.0, "min_p": 0.0',
    '"prompt": [1, 2], "n_predict": 3, "cache_prompt": false',
    '"--spec-type": "draft-simple", "--spec-draft-n-max": "4"',
  ):
    assert part in said
  task = peer_lib.BenchmarkTask(llama_cpp=str(folder))
  described = arms_lib.PEERS['llama.cpp'].describe(task)
  assert described['llama.cpp'] == 'version: 5 (abc)'


_BIASED = {'sampling': specdec.Sampling(logit_bias={1: 2})}
_TOO_MANY = '-draft(spec_draft_n_max=99)'


@pytest.mark.parametrize(
  ('kind', 'changes', 'limit', 'message'),
  [
    ('', {'llama_cpp': '/none'}, 1, 'no program llama-server in /non'),
    ('', {'target': 'demo'}, 1, '--target=demo: llama.cpp reads GGUF'),
    ('', {'batch_size': 2}, 1, 'one prompt at a time, not 2'),
    ('', _BIASED, 1, 'no --logit_bi'),
    ('', {}, 4096, 'exceed the context of the llama.cpp arms'),
    ('-draft', {'draft': None}, 1, 'needs a draft; give --draft'),
    (_TOO_MANY, {}, 1, 'does not start: .*99 is too many'),
  ],
)
def test_what_it_cannot_do_is_refused(folder, kind, changes, limit, message):
  with pytest.raises(ValueError, match=message):
    _arms(folder, f'llama.cpp{kind}', **changes)[0].decode([[1]], limit)
