"""Arms by name, and servers of other programs next to our own."""

import contextlib
import http.server
import json
import threading
from unittest import mock

import pytest
import refusals
import tiny_served

import specdec
from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import arms as arms_lib
from specdec.models.lab.bench import endpoint as endpoint_lib
from specdec.models.text import settings as settings_lib

_EOS = 7
_FIELDS_OF_TRANSFORMERS = {'model', 'prompt', 'max_tokens', 'stream', 'seed'}
_FIELDS_OF_TRANSFORMERS |= {'generation_config'}
_TOKENIZER = tiny_served.generator(None, None).pair.tokenizer


class _Server(http.server.BaseHTTPRequestHandler):
  """It counts on from the last id, and says so as one kind of server does."""

  def do_GET(self):
    if self.path == '/metrics':
      count = 'vllm:spec_decode_num_accepted_tokens_total{engine="0"}'
      return self._answer(f'{count} {self.server.accepted}.0\n')
    model = {'id': 'counting', 'owned_by': self.server.kind}
    if self.server.kind == 'transformers':
      model |= {'owned_by': 'local', 'status': {'value': 'loaded'}}
    return self._answer(json.dumps({'data': [model]}))

  def do_POST(self):
    request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    self.server.asked.append((self.headers['Authorization'], request))
    prompt, count = request['prompt'], request['max_tokens']
    if self.server.kind == 'transformers':
      # It refuses all other fields, and ids.
      assert {*request} <= _FIELDS_OF_TRANSFORMERS
      request |= json.loads(request.pop('generation_config'))
      prompt = _TOKENIZER(prompt)['input_ids']
    if request.get('temperature', 0) > 1:
      return self._answer('temperature is too high', 400)
    first = prompt[-1] + 1
    ids = [*range(first, first + count)]
    ended = _EOS in ids
    ids = ids[: ids.index(_EOS)] if ended else ids
    self.server.accepted += len(ids) // 2
    text = ''.join(tiny_served.LETTERS[token] for token in ids)
    choice = {'text': text, 'finish_reason': 'stop' if ended else 'length'}
    event = {'choices': [choice]}
    if self.server.kind == 'vllm':
      choice['token_ids'] = ids
    if self.server.kind == 'llamacpp':
      event['timings'] = {'predicted_n': 9, 'draft_n_accepted': len(ids) // 2}
    return self._answer(
      f': wait\n\ndata: {json.dumps(event)}\n\ndata: [DONE]\n\n'
    )

  def _answer(self, body, status=200):
    self.send_response(status)
    self.end_headers()
    self.wfile.write(body.encode())

  def log_message(self, *args):
    pass


@contextlib.contextmanager
def _serving(kind):
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Server)
  server.kind, server.accepted, server.asked = kind, 0, []
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield server, f'http://127.0.0.1:{server.server_port}/v1'
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def _arm(url, sampling=specdec.Sampling()):
  task = task_lib.Task(sampling=sampling, seed=9)
  endpoint = endpoint_lib.Endpoint(url)
  return endpoint_lib.EndpointArm(endpoint, task, (_EOS,), _TOKENIZER)


@pytest.mark.parametrize('kind', ['vllm', 'llamacpp', 'transformers', 'other'])
def test_tokens_and_forwards_of_servers_are_counted_as_ours(kind, monkeypatch):
  """Where an answer has no ids, its text is encoded."""
  monkeypatch.setenv(endpoint_lib.KEY, 'secret')
  with _serving(kind) as (server, url):
    arm = _arm(url, specdec.Sampling(temperature=0.5, top_k=3))
    result = arm([[10, 11], [20, 21]], 5)
    assert result.tokens == [[12, 13, 14, 15, 16], [22, 23, 24, 25, 26]]
    assert result.finish_reasons == ['length', 'length']
    accepted = 4 if kind in ('vllm', 'llamacpp') else 0
    assert result.stats.target_forwards == 10 - accepted
    assert arm([[10, 11]], 0).tokens == [[]]
    ended = arm([[3, 4]], 9)
    assert (ended.tokens, ended.finish_reasons) == ([[5, 6, _EOS]], ['eos'])
    assert len(arm.first_seconds) == 3
    for key, asked in server.asked:
      assert key == 'Bearer secret'
      words = {'model': 'counting', 'seed': 9, 'top_k': 3, 'top_p': 1.0}
      ends = 'stop_token_ids' if kind != 'transformers' else 'eos_token_id'
      words |= {ends: [_EOS], 'stream': True}
      assert {name: asked[name] for name in words} == words
      reads_all = 'cache_prompt' in asked and asked['cache_prompt'] is False
      assert reads_all == (kind == 'llamacpp')


def test_what_a_server_cannot_do_is_told():
  with _serving('other') as (_, url):
    with pytest.raises(ValueError, match='temperature is too high'):
      _arm(url, specdec.Sampling(temperature=1.5))([[1]], 2)
    with pytest.raises(ValueError, match='take no --logit_bias'):
      _arm(url, specdec.Sampling(logit_bias={1: 2}))
  with _serving('transformers') as (server, url):
    _arm(url)([[10, 11]], 2)
    _, asked = server.asked[0]
    assert asked['do_sample'] is False
    assert 'temperature' not in asked
    endpoint = endpoint_lib.Endpoint(url)
    other = mock.Mock(return_value={'input_ids': [2]}, bos_token=None)
    other.decode.return_value = 'a'
    with pytest.raises(ValueError, match='has others than the prompt'):
      endpoint.to_prompt([1], other)
  with pytest.raises(ValueError, match='no server answers there'):
    _arm(url)


def test_methods_dtypes_and_options_are_told_apart():
  text = (
    'plain,chain:bfloat16,tree(num_nodes=16,rounds=2),'
    'staged(inner=lookup):bfloat16'
  )
  arms = arms_lib.parse_arms(text, 'float32')
  assert arms == [
    arms_lib.ArmSpec('plain', 'float32'),
    arms_lib.ArmSpec('chain', 'bfloat16'),
    arms_lib.ArmSpec('tree', 'float32', (('num_nodes', '16'), ('rounds', '2'))),
    arms_lib.ArmSpec('staged', 'bfloat16', (('inner', 'lookup'),)),
  ]
  assert not any(arm.is_peer for arm in arms)
  server = arms_lib.ArmSpec('http://127.0.0.1:8080')
  assert (server.is_peer, str(server)) == (True, server.method)
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


def test_what_is_not_known_is_refused():
  for text, message in refusals.of('models/lab', 'arm'):
    with pytest.raises(ValueError, match=message):
      arms_lib.parse_arms(text, 'float32')
  usual = settings_lib.DraftSettings()
  for name, message in (('rounds', 'rounds=two: '), ('inner', 'one of none')):
    with pytest.raises(ValueError, match=message):
      settings_lib.with_options(usual, {name: 'two'})
