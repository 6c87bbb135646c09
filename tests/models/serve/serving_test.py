"""An endpoint gives the answer of `generate` alone, whoever else asks."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import json
import socket
import time

import httpx
import jax
import numpy as np
import openai
import pytest
import refusals
import tiny
import tiny_drafters
import tiny_heads
import tiny_recurrent
import tiny_served

import specdec
from specdec.models.serve import app as app_lib
from specdec.models.serve import engine as engine_lib

_CLIENTS = 16


def _gpt2():
  draft = tiny.draft('similar', num_layers=1)
  return tiny.gpt2(num_layers=1), tiny_drafters.simple('staged', draft)


def _recurrent():
  target = tiny_recurrent.hashed(tiny.VOCAB_SIZE, max_positions=80)
  draft = tiny_recurrent.hashed(tiny.VOCAB_SIZE, 1.0, max_positions=80)
  return target, tiny_drafters.simple('chain', draft, length=2)


def _head():
  scorer = specdec.HeadScorer(tiny_heads.random_head())
  chain = specdec.chain(2)
  return tiny_heads.target(), specdec.fixed_drafter(scorer, chain)


_KINDS = {'gpt2': _gpt2, 'recurrent': _recurrent, 'head': _head}


@functools.cache
def _generator(kind='gpt2'):
  return tiny_served.generator(*_KINDS[kind]())


def _plain(kind='gpt2'):
  return dataclasses.replace(_generator(kind), drafter=specdec.PLAIN)


@contextlib.contextmanager
def _served(lm, **options):
  """A server, and a client that it has."""
  with (
    tiny_served.serving(lm, **options) as server,
    httpx.Client(base_url=server.address, timeout=300) as http,
  ):
    yield server, http


@pytest.fixture(scope='module', name='both')
def _both():
  with _served(_generator()) as both:
    yield both


@pytest.fixture(scope='module', name='server')
def _server(both):
  return both[0]


@pytest.fixture(scope='module', name='http')
def _http(both):
  return both[1]


def _is_idle(server):
  for _ in range(200):
    if server.engine.gauges() == {'waiting': 0, 'running': 0}:
      return True
    time.sleep(0.05)
  return False


_LETTERS = np.array([*tiny_served.LETTERS])


def _asked(rng):
  """A request with random options, and the same for `generate`."""
  length = int(rng.integers(1, 30))
  body = {
    'prompt': ''.join(rng.choice(_LETTERS[:12], length)),
    'max_tokens': int(rng.integers(0, 40)),
    'seed': int(rng.integers(2**32)),
    'temperature': float(rng.choice([0.0, 0.7, 1.5])),
    'return_token_ids': True,
  }
  filters = {
    'top_k': int(rng.integers(1, 50)),
    'top_p': float(rng.uniform(0.3, 1)),
    'min_p': float(rng.uniform(0, 0.3)),
  }
  changes = {
    'repetition_penalty': float(rng.uniform(0.8, 1.5)),
    'logit_bias': {str(rng.integers(40)): 3.0},
  }
  for together in (filters, changes):  # Few programs.
    if rng.random() < 0.4:
      body |= together
  if rng.random() < 0.3:
    body['stop'] = [*rng.choice(_LETTERS, rng.integers(1, 4))]
  if rng.random() < 0.25:
    body['regex'] = str(rng.choice(['[a-h]{2,9}', '(ab|Cd)*', '[^x]*']))
  if rng.random() < 0.2:
    body['method'] = 'plain'
  return body


def _alone(kind, bodies):
  """The same by one plain batch; its rows are decoded as if alone."""
  of_each = lambda name, other=None: [body.get(name, other) for body in bodies]
  bias = [
    {int(token): value for token, value in (bias or {}).items()}
    for bias in of_each('logit_bias')
  ]
  sampling = specdec.Sampling(
    logit_bias=bias,
    repetition_penalty=of_each('repetition_penalty', 1.0),
    temperature=of_each('temperature'),
    top_k=of_each('top_k'),
    top_p=of_each('top_p', 1.0),
    min_p=of_each('min_p', 0.0),
  )
  return _plain(kind).generate(
    of_each('prompt'),
    max_new_tokens=of_each('max_tokens'),
    room_for_new_tokens=48,
    seed=of_each('seed'),
    sampling=sampling,
    stop=of_each('stop', []),
    regex=of_each('regex'),
  )


def _streamed(http, body, most=None):
  """Text, ids and the last chunk of a stream; it is left after `most`."""
  text, last = '', None
  with http.stream('POST', '/v1/completions', json=body) as reply:
    assert reply.status_code == 200, reply.read()
    for number, line in enumerate(reply.iter_lines()):
      if line and line != 'data: [DONE]':
        (choice,) = json.loads(line.removeprefix('data: '))['choices']
        text, last = text + choice['text'], choice
      if most is not None and number >= most:
        break
  return text, last


_LONG = [pytest.param(kind, 200, marks=pytest.mark.long) for kind in _KINDS]


@pytest.mark.parametrize(('kind', 'number'), [('gpt2', 16), *_LONG])
def test_every_answer_is_that_of_decoding_it_alone(kind, number):
  """Among many clients, of whom a third leave half-way."""
  rng = np.random.default_rng(7)
  bodies = [_asked(rng) for _ in range(number)]
  expected = _alone(kind, bodies)
  ways = rng.integers(3, size=number)
  with (
    _served(_generator(kind), queue_size=number) as (server, http),
    concurrent.futures.ThreadPoolExecutor(_CLIENTS) as pool,
  ):

    def ask(index):
      body, way = bodies[index], ways[index]
      if way == 0:
        reply = http.post('/v1/completions', json=body)
        assert reply.status_code == 200, (body, reply.text)
        (choice,) = reply.json()['choices']
        return choice['text'], choice
      streamed = body | {'stream': True}
      return _streamed(http, streamed, None if way == 1 else 2)

    answers = [*pool.map(ask, range(number))]
    assert _is_idle(server)
    counts = []
    for _ in range(3):
      assert len([*pool.map(ask, range(16))]) == 16
      assert _is_idle(server)
      gc.collect()
      counts.append(len(jax.live_arrays()))
    # Options come and go with the prompts that have them.
    assert counts[-1] < counts[0] + 40
    pools = server.engine._pools.values()
    assert all(len(pool.slots.free) == 4 for pool in pools)
  for index, (text, choice) in enumerate(answers):
    body, tokens = bodies[index], expected.tokens[index]
    if ways[index] == 2 and 'token_ids' not in choice:
      assert expected.text[index].startswith(text), body
      continue
    assert choice['token_ids'] == tokens, body
    assert text == expected.text[index], body
    reason = expected.finish_reasons[index].replace('eos', 'stop')
    assert choice['finish_reason'] == reason, body
    evidence = choice['specdec']
    assert evidence['digest'] == engine_lib.digest(tokens)
    assert sum(evidence['origins'].values()) == len(tokens)
    assert evidence['method'] == body.get('method', 'tree')
    assert evidence['seed'] == body['seed']


def test_the_official_client(server):
  """Texts and chats, whole and streamed, with usage."""
  url = f'{server.address}/v1'
  client = openai.OpenAI(base_url=url, api_key='none', max_retries=0)
  lm = _plain()
  expected = lm.generate(['abc', 'de'], max_new_tokens=8, seed=[0, 0])
  assert [model.id for model in client.models.list()] == ['tiny']
  completion = client.completions.create(
    model='tiny', prompt=['abc', 'de'], max_tokens=8, temperature=0
  )
  assert [choice.text for choice in completion.choices] == expected.text
  assert completion.usage.prompt_tokens == 5
  assert completion.usage.completion_tokens == sum(map(len, expected.tokens))
  messages = [
    {'role': 'system', 'content': 'x'},
    {'role': 'user', 'content': [{'type': 'text', 'text': 'abc'}]},
  ]
  plain = [messages[0], {'role': 'user', 'content': 'abc'}]
  options = {'model': 'tiny', 'messages': messages, 'temperature': 1.5}
  seeds = [3, 4, 5]
  whole = lm.generate(
    [plain] * 3,
    max_new_tokens=8,
    seed=seeds,
    sampling=specdec.Sampling(temperature=1.5),
  )
  chat = client.chat.completions.create(
    **options, max_completion_tokens=8, seed=3, n=3
  )
  texts = [choice.message.content for choice in chat.choices]
  assert texts == whole.text
  assert len({*texts}) > 1
  digests = [choice.specdec['digest'] for choice in chat.choices]
  assert digests == [*map(engine_lib.digest, whole.tokens)]
  stream = client.chat.completions.create(
    **options,
    max_tokens=8,
    seed=3,
    stream=True,
    stream_options={'include_usage': True},
  )
  first, *chunks, last = stream
  assert first.choices[0].delta.role == 'assistant'
  added = [chunk.choices[0].delta.content or '' for chunk in chunks]
  assert ''.join(added) == whole.text[0]
  assert last.usage.completion_tokens == len(whole.tokens[0])
  events = [chunk.choices[0].specdec for chunk in chunks[:-1]]
  pieces = [piece for event in events for piece in event['pieces']]
  assert ''.join(pieces) == whole.text[0]
  assert sum(len(event['origins']) for event in events) == len(pieces)
  with pytest.raises(openai.BadRequestError) as refused:
    client.chat.completions.create(**options, frequency_penalty=0.5)
  assert refused.value.param == 'frequency_penalty'
  with pytest.raises(openai.NotFoundError):
    client.completions.create(model='other', prompt='a')


_NO_ENDS = {str(token): -100 for token in tiny_served.EOS_IDS}


@pytest.mark.parametrize('kind', ['recurrent', 'head'])
def test_a_conversation_reads_only_what_is_new(kind):
  """Where the target keeps states, and where a head reads them."""
  lm, messages, read = _plain(kind), [], 0
  bias = dict.fromkeys(tiny_served.EOS_IDS, -100.0)
  with _served(_generator(kind)) as (_, http):

    def ask(messages):
      body = {'messages': messages, 'max_tokens': 2, 'temperature': 0}
      body |= {'return_token_ids': True, 'logit_bias': _NO_ENDS}
      return http.post('/v1/chat/completions', json=body).json()

    for letter in 'abcde':
      messages.append({'role': 'user', 'content': letter})
      reply = ask(messages)
      ask([{'role': 'user', 'content': 'zz'}])
      (choice,), usage = reply['choices'], reply['usage']
      alone = lm.generate(
        [messages],
        max_new_tokens=2,
        room_for_new_tokens=tiny.MAX_POSITIONS,
        sampling=specdec.Sampling(logit_bias=bias),
      )
      assert choice['token_ids'] == alone.tokens[0]
      assert usage['prompt_tokens_details']['cached_tokens'] == read
      # The last token was never read.
      read = usage['prompt_tokens'] + 1
      content = choice['message']['content']
      messages.append({'role': 'assistant', 'content': content})


def test_plain_decoding_proves_what_was_drafted(http):
  body = {'prompt': 'abcab', 'max_tokens': 30, 'temperature': 0.9, 'seed': 1}
  body |= {'logit_bias': _NO_ENDS}
  ask = lambda **more: http.post('/v1/completions', json=body | more).json()
  tree, plain, auto = (
    ask(method=method)['choices'][0]['specdec']
    for method in ('tree', 'plain', 'auto')
  )
  assert tree['digest'] == plain['digest'] == auto['digest']
  assert plain['origins'] == {'target': sum(tree['origins'].values())}
  assert plain['forwards'] == plain['origins']['target'] > tree['forwards']
  assert sum(tree['accepted_histogram']) == tree['forwards']
  # A seed that nobody chose is told, so that the answer can be had again.
  del body['seed']
  first, other = (ask()['choices'][0] for _ in range(2))
  assert first['specdec']['seed'] != other['specdec']['seed']
  again = ask(seed=first['specdec']['seed'])['choices'][0]
  assert again['text'] == first['text']


def test_log_probabilities_are_those_of_the_target(http):
  body = {'prompt': 'abcde', 'max_tokens': 6, 'temperature': 0, 'logprobs': 2}
  (choice,) = http.post('/v1/completions', json=body).json()['choices']
  alone = _plain().generate(
    'abcde', max_new_tokens=6, log_probs=True, eos_ids=None
  )
  log_probs = choice['logprobs']
  np.testing.assert_allclose(
    log_probs['token_logprobs'], alone.log_probs[0], atol=1e-4
  )
  assert log_probs['tokens'] == [
    _generator().pair.token_text(token) for token in alone.tokens[0]
  ]
  for log_prob, best in zip(
    log_probs['token_logprobs'], log_probs['top_logprobs'], strict=True
  ):
    assert max(best.values()) == log_prob  # Greedy.
    assert len(best) == 2
  body |= {'echo': True, 'prompt': [[0, 1, 2, 3, 4]]}
  (echoed,) = http.post('/v1/completions', json=body).json()['choices']
  assert echoed['text'] == 'abcde' + choice['text']
  assert echoed['logprobs']['token_logprobs'][0] is None
  assert echoed['logprobs']['token_logprobs'][5:] == log_probs['token_logprobs']
  text, last = _streamed(http, body | {'stream': True})
  assert (text, last['logprobs']) == (echoed['text'], echoed['logprobs'])
  messages = [{'role': 'user', 'content': 'a'}]
  body = {'messages': messages, 'logprobs': True, 'top_logprobs': 1}
  reply = http.post('/v1/chat/completions', json=body | {'max_tokens': 3})
  content = reply.json()['choices'][0]['logprobs']['content']
  for token in content:
    assert token['top_logprobs'][0]['token'] == token['token']


def test_json_that_a_schema_describes():
  """And any object."""
  letters = '{}[]":, 0123456789abtruefalsn'
  target, _ = _gpt2()
  lm = tiny_served.generator(target, specdec.PLAIN, letters=letters)
  schema = {'type': 'object', 'properties': {'a': {'type': 'boolean'}}}
  schema |= {'required': ['a']}
  of_schema = {'name': 'x', 'schema': schema}
  with _served(lm, method='plain') as (_, http):
    for form in (
      {'type': 'json_object'},
      {'type': 'json_schema', 'json_schema': of_schema},
    ):
      body = {'prompt': '0', 'response_format': form, 'max_tokens': 60}
      (choice,) = http.post('/v1/completions', json=body).json()['choices']
      if choice['finish_reason'] == 'stop':
        assert isinstance(json.loads(choice['text']), dict)
      assert choice['text'].startswith('{')
  assert set(json.loads(choice['text'])) == {'a'}


_MESSAGE = {'role': 'user', 'content': 'a'}
# Next to `refusals.jsonl`: wrong values that are long.
_LONG_VALUES = {
  'text': {
    'temperature': [10**400],
    'stop': [['a'] * 17],
    'regex': ['(' * 2000],
    'prompt': ['a' * 81, [[1] * 80], ['a'] * 1000],
  },
  'chat': {'messages': [[_MESSAGE | {'content': 'a' * 100}]]},
}
_BODIES = {
  'no JSON': b'{',
  'no UTF-8': b'{"prompt": "\xff"}',
  'nothing': b'',
  'a list': b'[]',
  'a number': b'3',
  'NaN': b'{"prompt": "a", "temperature": NaN}',
  'deep': b'[' * 100_000,
  'deep and complete': b'{"prompt": ' + b'[' * 9000 + b']' * 9000 + b'}',
  'many digits': b'{"prompt": "a", "seed": 1' + b'0' * 9000 + b'}',
  'large': b'{"prompt": "' + b'a' * (9 << 20) + b'"}',
}


def test_bad_input_is_refused_by_name_and_the_server_lives(http, server):
  for kind, path, base in (
    ('text', '/v1/completions', {'prompt': 'a'}),
    ('chat', '/v1/chat/completions', {'messages': [_MESSAGE]}),
  ):
    rows = [*refusals.of('models/serve', kind), *_LONG_VALUES[kind].items()]
    for name, value in ((name, value) for name, of in rows for value in of):
      body = json.dumps(base | {'max_tokens': 4} | {name: value})
      reply = http.post(path, content=body)
      assert 400 <= reply.status_code < 500, (name, body, reply.text)
      error = reply.json()['error']
      assert error['message'], body
      assert (error['param'] or '').startswith(name), (body, error)
  for what, content in _BODIES.items():
    reply = http.post('/v1/completions', content=content)
    assert 400 <= reply.status_code < 500, (what, reply.text)
    assert reply.json()['error']['type'] == 'invalid_request_error'
  assert http.get('/nowhere').status_code == 404
  assert http.get('/v1/completions').status_code == 405
  assert _is_idle(server)
  body = {'prompt': 'a', 'max_tokens': 1}
  assert http.post('/v1/completions', json=body).status_code == 200


def test_broken_and_slow_connections_take_no_slot(http, server, monkeypatch):
  host, port = server.address.removeprefix('http://').split(':')
  body = b'{"prompt": "a", "max_tokens": 70}'
  first = b'POST /v1/completions HTTP/1.1\r\n'
  head = first + b'Host: x\r\nContent-Length: %d\r\n\r\n'
  for sent in (
    b'nonsense\r\n\r\n',
    head % len(body) + body,  # Leaves before the answer.
    head % (len(body) + 9) + body,  # Leaves before the end of the body.
    first,
    head % 5,
  ):
    with socket.create_connection((host, int(port))) as connection:
      connection.sendall(sent)
  assert _is_idle(server)
  monkeypatch.setattr(app_lib, '_MOST_SECONDS', 0.2)
  stream = b'{"prompt": "a", "max_tokens": 70, "stream": true}'
  with contextlib.ExitStack() as stack:
    connect = lambda: stack.enter_context(
      socket.create_connection((host, int(port)))
    )
    for _ in range(6):  # Nobody reads what these are told.
      connect().sendall(head % len(stream) + stream)
    slow = connect()
    slow.sendall(head % 99 + b'{"prompt"')
    assert b' 408 ' in slow.recv(100)
    reply = http.post('/v1/completions', json={'prompt': 'a'})
    assert reply.status_code == 200
  assert _is_idle(server)
  assert http.get('/health').json() == {'status': 'ok'}


def test_a_full_queue_refuses_and_a_stopped_server_ends_its_streams(capsys):
  body = {'prompt': 'ab', 'max_tokens': 70, 'stream': True}
  body |= {'logit_bias': _NO_ENDS}
  with _served(_generator(), batch_size=1, queue_size=0) as (server, http):
    step = engine_lib._Pool.step
    slow = lambda pool: (time.sleep(0.05), step(pool))[1]
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(engine_lib, '_MOST_STEPS', 1)
      patch.setattr(engine_lib._Pool, 'step', slow)
      with http.stream('POST', '/v1/completions', json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        second = http.post('/v1/completions', json=body | {'stream': False})
        assert second.status_code == 429
        assert second.json()['error']['code'] == 'queue_full'
        server.engine.stop()
        rest = [line for line in lines if line]
    assert rest[-1] == 'data: [DONE]'
    assert json.loads(rest[-2].removeprefix('data: '))['error']['code'] == (
      'stopped'
    )
    assert http.post('/v1/completions', json=body).status_code == 503
  told = capsys.readouterr().err
  assert f'ready: open {server.address} in a browser; ' in told
  assert 'requests that get an error: 1\n' in told


def test_a_failure_in_decoding_harms_no_later_request(monkeypatch):
  with _served(_generator()) as (_, http):
    body = {'prompt': 'ab', 'max_tokens': 3}
    with monkeypatch.context() as patch:
      patch.setattr(specdec.Slots, 'step', lambda *_: 1 / 0)
      reply = http.post('/v1/completions', json=body)
      assert reply.status_code == 500
      assert reply.json()['error']['type'] == 'server_error'
    assert http.post('/v1/completions', json=body).status_code == 200


def test_a_key_is_needed_where_there_is_one():
  with _served(_generator(), api_key='sésame') as (_, http):
    for path in ('/v1/models', '/metrics'):
      assert http.get(path).status_code == 401
    wrong = {'Authorization': b'Bearer \xff'}
    assert http.post('/v1/completions', headers=wrong).status_code == 401
    right = {'Authorization': 'Bearer sésame'.encode()}
    assert http.get('/v1/models', headers=right).status_code == 200
    assert http.get('/health').status_code == 200


def test_figures_are_those_of_the_requests():
  with _served(_generator()) as (_, http):
    bodies = [{'prompt': 'abcab', 'max_tokens': 9}] * 3
    choices = [
      http.post('/v1/completions', json=body).json() for body in bodies
    ]
    lines = http.get('/metrics').text.splitlines()
  figures = dict(line.split() for line in lines if line[0] != '#')
  usages = [choice['usage'] for choice in choices]
  total = lambda name: str(sum(usage[name] for usage in usages))
  assert figures['specdec_requests_total'] == '3'
  assert figures['specdec_prompt_tokens_total'] == total('prompt_tokens')
  assert figures['specdec_new_tokens_total'] == total('completion_tokens')
  # The second and third are the first again, but for its last token.
  assert figures['specdec_cached_tokens_total'] == '8'
  assert figures['specdec_running'] == figures['specdec_waiting'] == '0'
