"""Many prompts: `generate_many`, its script, and files that runs go on from."""

import functools
import io
import itertools
import json

import command_lines
import numpy as np
import pytest
import tiny_demo

import specdec
from specdec.models.lab.training import kept
from specdec.models.text import many as many_lib

_PROMPTS = ['import ', 'def f(x):\n  return', '', 'a' * 9000, [20, 30], 'x = 1']
_PROMPTS += [[1.5, 2]]
_OPTIONS = {'max_new_tokens': 9, 'stop': ['\n']}


_tiny_pair = tiny_demo.in_this_file


@pytest.fixture(scope='module', name='lm')
def _lm(_tiny_pair):
  return specdec.load(method='plain')


def _alone(lm, prompt, seed, **options):
  return lm.generate(
    [prompt], seed=[seed], room_for_new_tokens=64, **_OPTIONS | options
  )


def test_every_prompt_is_completed_as_alone(lm):
  sampling = specdec.Sampling(temperature=[1.0])
  taken = []

  def prompts():
    for index, prompt in enumerate(_PROMPTS):
      taken.append(index)
      yield prompt
    yield specdec.Job(prompt='import ', seed=0, max_new_tokens=3)

  options = {'batch_size': 2, 'context': 128, 'seed': 5} | _OPTIONS
  options['sampling'] = specdec.Sampling(temperature=1.0)
  many = lm.generate_many(prompts(), **options)
  assert not taken
  completions = {completion.index: completion for completion in many}
  assert sorted(completions) == list(range(8))
  errors = {
    index: completion.error
    for index, completion in completions.items()
    if completion.error
  }
  assert errors.keys() == {2, 3, 6}
  assert 'must be a list of token ids, got [1.5, 2]' in errors[6]
  assert 'the prompt is empty' in errors[2]
  assert 'exceed the context of 128 tokens' in errors[3]
  for index in (0, 1, 4, 5):
    alone = _alone(lm, _PROMPTS[index], 5 + index, sampling=sampling)
    assert completions[index].result == alone
  expected = _alone(lm, 'import ', 0, sampling=sampling, max_new_tokens=3)
  assert completions[7].result == expected
  assert many.num_steps > 0


def test_completions_may_come_in_order_and_prompts_are_taken_when_needed(lm):
  taken = itertools.count(1)
  prompts = ([next(taken)] for _ in range(100))
  options = {'batch_size': 2, 'context': 128, 'in_order': True} | _OPTIONS
  many = lm.generate_many(prompts, **options)
  indices = [completion.index for completion in itertools.islice(many, 5)]
  assert indices == [0, 1, 2, 3, 4]
  assert next(taken) <= 12
  # Another loop goes on where that one stopped.
  indices = [completion.index for completion in itertools.islice(many, 3)]
  assert indices == [5, 6, 7]
  # For a list, the buffers are as large as it needs.
  for prompt in ([1] * 150, np.ones(150, np.int32)):
    many = lm.generate_many([prompt], batch_size=2, **_OPTIONS)
    assert next(many).error is None


def test_what_is_no_list_of_prompts_is_refused(lm):
  for prompts, batch_size, words in (
    ('x = 1', 2, "several prompts, got 'x = 1'"),
    (None, 2, 'several prompts, got None'),
    (['x = 1'], 0, 'batch_size must be an integer of at least 1, got 0'),
  ):
    with pytest.raises(ValueError, match=words):
      lm.generate_many(prompts, batch_size=batch_size)


def _input(path, end):
  lines = [
    {'prompt': 'import ', 'id': 'first'},
    {'prompt': 'x = ', 'seed': 7, 'max_new_tokens': 4},
    {'prompt': 'x = ', 'temperature': 1.0, 'seed': 3},
    {'prompt': ''},
    {'prompt': 'x', 'prompts': 'y'},
    {'prompt': 'x', 'top_p': 0.5},
    {'messages': [{'role': 'user', 'content': 'x'}]},
    {'prompt': 'def f('},
    {'prompt': 'def f(', 'seed': 7, 'eos_ids': [end, '<|endoftext|>']},
    {'prompt': 'x', 'eos_ids': ['no token']},
  ]
  text = '\n'.join([*map(json.dumps, lines), '{', ''])
  path.write_text(text, 'utf-8-sig')
  return path


def _arguments(source, output, *more):
  files = (f'--prompt_file={source}', f'--output={output}')
  flags = ('--method=plain', '--max_new_tokens=9', '--batch_size=2')
  return ('generate_many.py', *files, *flags, '--stop=\\n', *more)


def _pipe(monkeypatch, data):
  """Standard input, as on a system with another encoding."""
  piped = io.TextIOWrapper(io.BytesIO(data), 'ascii')
  monkeypatch.setattr('sys.stdin', piped)


def _rows(text):
  return {row['index']: row for row in map(json.loads, text.splitlines())}


def test_the_script_completes_a_file_and_goes_on_where_it_was(
  tmp_path, lm, monkeypatch
):
  end = _alone(lm, 'def f(', 7).tokens[0][2]
  source, output = tmp_path / 'in.jsonl', tmp_path / 'out' / 'out.jsonl'
  _input(source, end)
  ended = command_lines.run(*_arguments(source, output))
  assert ended.code == 0, ended
  text = output.read_text()
  rows = _rows(text)
  assert len(text.splitlines()) == len(rows) == 11
  for index, words in {
    3: 'the prompt is empty',
    4: 'line 5: expected a JSON object with keys of prompt',
    6: 'has no chat template',
    9: "eos_ids='no token': no token of",
    10: 'line 11: ',
  }.items():
    assert words in rows[index]['error']
  for index, prompt, seed, options in (
    (1, 'x = ', 7, {'max_new_tokens': 4}),
    (2, 'x = ', 3, {'sampling': specdec.Sampling(temperature=[1.0])}),
    (7, 'def f(', 7, {}),
    (8, 'def f(', 7, {'eos_ids': [end]}),
  ):
    alone = _alone(lm, prompt, seed, **options)
    row = rows[index]
    assert row['error'] is None
    assert (row['tokens'], row['text']) == (alone.tokens[0], alone.text[0])
    assert row['finish_reason'] == alone.finish_reasons[0]
    assert row['stats']['new_tokens'] == len(row['tokens'])
  assert (rows[0]['id'], rows[7]['id']) == ('first', 7)
  assert rows[8]['finish_reason'] == 'eos'

  # Nothing is left to do, with another batch size and nothing else.
  ended = command_lines.run(*_arguments(source, output, '--batch_size=3'))
  assert ended.code == 0
  assert output.read_text() == text
  words = 'holds another run (seed: 0 then, 1 now)'
  assert words in command_lines.refusal(*_arguments(source, output, '--seed=1'))
  # Pipes.
  _pipe(monkeypatch, source.read_bytes())
  ended = command_lines.run(*_arguments('-', '-', '--in_order'))
  assert ended.code == 0, ended
  assert list(_rows(ended.output)) == list(range(11))
  assert _rows(ended.output) == rows
  _pipe(monkeypatch, b'{"prompt": "x"}')
  arguments = _arguments('-', tmp_path / 'piped.jsonl')
  assert command_lines.run(*arguments).code == 0
  words = 'differ from those of standard input'
  assert words in command_lines.refusal(*arguments)
  # A file with another suffix has no JSON.
  texts = tmp_path / 'in.txt'
  texts.write_text('\nimport \n\nx = \n')
  ended = command_lines.run(*_arguments(texts, '-', '--in_order'))
  alone = [_alone(lm, 'import ', 0), _alone(lm, 'x = ', 1)]
  texts = [row['text'] for row in _rows(ended.output).values()]
  assert texts == [result.text[0] for result in alone]
  source.write_text(source.read_text() + '{"prompt": "x"}\n')
  refused = functools.partial(command_lines.refusal, 'generate_many.py')
  words = 'another run (prompts_sha256: '
  assert words in refused(*_arguments(source, output)[1:])
  assert '--prompt_file and --output are needed' in refused()


# Values of a wrong type; `text_files_test` has all types.
_WRONG = [('messages', 'x'), ('eos_ids', [True]), ('regex', 3), ('prompt', 5)]
_WRONG += [('json_schema', 3)]
_WRONG += [(key, 1.5) for key in ('max_new_tokens', 'seed', 'top_k')]
_WRONG += [(key, 'x') for key in ('temperature', 'top_p', 'min_p')]
# These have the right type, and cannot be used.
_UNUSABLE = [('messages', []), ('temperature', 10**400), ('seed', 10**30)]


def test_a_wrong_value_is_an_error_that_names_its_key(monkeypatch):
  given = _WRONG + _UNUSABLE
  lines = [
    {key: value} if key == 'messages' else {'prompt': 'x', key: value}
    for key, value in given
  ]
  _pipe(monkeypatch, '\n'.join(map(json.dumps, lines)).encode())
  ended = command_lines.run(*_arguments('-', '-', '--in_order'))
  assert ended.code == 0, ended
  for index, row in _rows(ended.output).items():
    key, error = given[index][0], row['error']
    assert f'{key} ' in error
    assert len(error) < 200
    if index < len(_WRONG):
      assert error.startswith(f'line {index + 1}: {key} must be ')


def test_an_interrupt_keeps_the_rows_and_is_one_line(tmp_path, monkeypatch):
  source, output = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
  source.write_text('{"prompt": "import "}\n' * 4)
  step, calls = many_lib.ManyDecoding.__next__, []

  def interrupted(many):
    calls.append(1)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return step(many)

  monkeypatch.setattr(many_lib.ManyDecoding, '__next__', interrupted)
  ended = command_lines.run(*_arguments(source, output))
  assert ended.code == 130
  last = 'generate_many.py: interrupted; what is written is kept'
  assert ended.errors.splitlines()[-1] == last
  assert 'Traceback' not in ended.errors
  assert len(_rows(output.read_text())) == 2
  assert command_lines.run(*_arguments(source, output)).code == 0
  assert len(_rows(output.read_text())) == 4


def test_files_of_results_survive_a_kill_at_every_byte(tmp_path):
  path = tmp_path / 'rows.jsonl'
  rows = [{'index': 0, 'text': 'a\nü'}, {'index': 1, 'text': ''}]
  opened = lambda **settings: kept.ResumableRows(path, settings, 2)
  results = opened(seed=0, stop=('a',))
  for row in rows:
    results.add(row)
  whole = path.read_bytes()
  for size in range(len(whole) + 1):
    path.write_bytes(whole[:size])
    again = opened(stop=['a'], seed=0)
    complete = whole[:size].count(b'\n')
    assert again.rows == rows[:complete]
    for row in rows[complete:]:
      again.add(row)
    assert path.read_bytes() == whole
  refused = functools.partial(pytest.raises, ValueError)
  with refused(match=r'run.json .*\(method: .*; seed: 0 then, 1 now; stop: '):
    opened(seed=1, method='plain')
  first, second = whole.splitlines()
  for line in (b'no JSON', b'\xff', b'[]', b'{}', b'{"index": 2}', first):
    path.write_bytes(b'%b\n%b\n%b\n' % (first, line, second))
    with refused(match=r'rows.jsonl cannot be read: .*remove line 2, whose'):
      opened(seed=0, stop=['a'])
    assert path.read_bytes().endswith(second + b'\n')
  settings = tmp_path / 'rows.jsonl.run.json'
  settings.write_text('{')
  with refused(match=r'run.json is not valid JSON: .*or give another --output'):
    opened(seed=0)
  settings.unlink()
  with refused(match=r'there, but not rows.jsonl.run.json, the settings of it'):
    opened(seed=0)
  with refused(match=f'{tmp_path} is no regular file; give another --output'):
    kept.ResumableRows(tmp_path, {}, 2)
