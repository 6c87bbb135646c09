"""Texts that match expressions and JSON schemas, checked by other validators.

The tokens of a tiny model are letters, digits and pieces of JSON.
"""

import functools
import json
import re
from unittest import mock

import byte_level
import command_lines
import jsonschema
import pytest
import refusals
import tiny
import tiny_demo
import tiny_drafters

import specdec
from specdec import hosts
from specdec.models.text import byte_automaton
from specdec.models.text import constraints
from specdec.models.text import generator as generator_lib
from specdec.models.text import pair as pair_lib
from specdec.text import automaton as automaton_lib

_PIECES = (*'abcdeflnrstu0123456789 {}[]":,-.\n', '":', '{"', 'true', 'ab')
_PIECES += ('name', 'null', '", "', 'é', 'cab', '"}')
_END, _TABOO = tiny.VOCAB_SIZE - 2, tiny.TABOO
_SAMPLED = specdec.Sampling(temperature=0.9)
_PROMPT = 'tab:'
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}:{% endfor %}"

_NAMED = {
  'type': 'object',
  'properties': {
    'name': {'type': 'string', 'maxLength': 4},
    'ab': {'type': 'boolean'},
  },
  'required': ['name'],
}
_REGEX = [r'(cab|[a-c]{2}){2,3}', None, r'\d{2,3}(\.\d)?(é|\n)?', None, None]
_SCHEMA = [None, _NAMED, None, None, json.dumps({'enum': ['ab', 1, None]})]


@functools.cache
def _tokenizer():
  """One token for each piece."""
  fill = [f'<{index}>' for index in range(len(_PIECES), _END)]
  return byte_level.tokenizer(
    map(byte_level.spelled, _PIECES),
    *fill,
    '<end>',
    '<taboo>',
    eos_token='<end>',
    chat_template=_TEMPLATE,
  )


@functools.cache
def _generator(kind='plain', draft='similar'):
  pair = pair_lib.Pair(
    tiny_drafters.target(), None, _tokenizer(), eos_ids=(_END,)
  )
  drafter = tiny_drafters.simple(kind, tiny.draft(draft, num_layers=1))
  return generator_lib.Generator(pair, drafter)


def _matches(text, regex, schema):
  """By `re` and `jsonschema`."""
  if regex is not None:
    return re.fullmatch(regex, text) is not None
  schema = json.loads(schema) if isinstance(schema, str) else schema
  jsonschema.validate(
    json.loads(text),
    schema,
    format_checker=jsonschema.FormatChecker(),
  )
  return True


def _generate(kind='plain', rows=range(5), **options):
  pick = lambda values: [values[row] for row in rows]
  arguments = {
    'max_new_tokens': 40,
    'sampling': _SAMPLED,
    'seed': [10 + row for row in rows],
    'regex': pick(_REGEX),
    'json_schema': pick(_SCHEMA),
  }
  return _generator(kind).generate([_PROMPT] * len(rows), **arguments | options)


def test_rows_match_constraints_of_their_own():
  """The texts match, and plain decoding gives the same tokens."""
  result, plain = _generate('tree'), _generate()
  assert result.tokens == plain.tokens
  for row, text in enumerate(result.text):
    if row != 3:  # which has no constraint
      assert result.finish_reasons[row] == 'eos'
      assert _matches(text, _REGEX[row], _SCHEMA[row]), text
  free = _generate(regex=None, json_schema=None)
  assert result.tokens[3] == free.tokens[3]
  assert not _matches(free.text[0], _REGEX[0], None)
  # One constraint holds for all rows.
  both = _generate(rows=[0, 0], regex=_REGEX[0], json_schema=None)
  assert both.tokens == [plain.tokens[0]] * 2


def test_what_is_counted_is_what_is_unrolled(monkeypatch):
  """Next to rows that do not count, and one that has no constraint."""
  regex = ['([a-c]{2,5} ){1,3}', r'([0-9]{2,4}[a-e]{0,4}\.){2,3}', 'ab|b', None]
  rows = {'rows': range(4), 'regex': regex, 'json_schema': None}
  plain = _generate(**rows)
  monkeypatch.setattr(byte_automaton, '_UNROLLED', 0)
  constraints._automaton.cache_clear()
  of_bytes = automaton_lib.of_bytes
  with mock.patch.object(automaton_lib, 'of_bytes', wraps=of_bytes) as made:
    counted = _generate('tree', **rows)
  constraints._automaton.cache_clear()
  assert sum(call.args[-1] is not None for call in made.call_args_list) == 2
  assert counted.tokens == plain.tokens
  for text, pattern in zip(counted.text[:3], regex, strict=False):
    assert _matches(text, pattern, None)


def test_every_answer_of_a_chat_matches():
  options = {'regex': _REGEX[0], 'sampling': _SAMPLED, 'max_new_tokens': 20}
  generator = _generator('tree')
  chat = generator.chat([{'role': 'user', 'content': 'tab'}], **options)
  assert _matches(chat.run().text[0], _REGEX[0], None)
  second = chat.reply('cab').run()
  alone = generator.generate(chat.messages, room_for_new_tokens=48, **options)
  assert second.tokens == alone.tokens


def test_prompts_in_slots_have_constraints_of_their_own():
  """Also where a later one needs larger tables than all before it."""
  wanted = [*zip(_REGEX, _SCHEMA, strict=True), ('[a-c]{280}', None)]
  jobs = [
    specdec.Job(
      prompt=_PROMPT,
      seed=10 + row,
      regex=wanted[row][0],
      json_schema=wanted[row][1],
    )
    for row in (3, 0, 1, len(_REGEX))
  ]
  jobs.insert(2, specdec.Job(prompt=_PROMPT, regex='('))
  many = _generator('tree').generate_many(
    jobs,
    batch_size=3,
    context=80,
    max_new_tokens=40,
    sampling=_SAMPLED,
    in_order=True,
  )
  completions, plain = list(many), _generate().tokens
  assert 'regex' in completions.pop(2).error
  assert completions.pop().result.finish_reasons == ['length']
  assert [completion.result.tokens[0] for completion in completions] == [
    plain[row] for row in (3, 0, 1)
  ]


def test_a_longer_text_takes_no_more_round_trips():
  """Nor does a text without a constraint: the loop runs on the device."""

  def reads(limit, **options):
    with mock.patch.object(hosts, 'read', wraps=hosts.read) as read:
      options |= {'max_new_tokens': limit, 'room_for_new_tokens': 48}
      result = _generator('tree').generate(_PROMPT, **options)
    return result.stats.new_tokens, read.call_count

  (few, once), (many, again) = (reads(n, regex='[a-c]{47}') for n in (4, 44))
  assert few < many
  assert once == again == reads(44)[1]


def test_what_cannot_be_used_is_refused():
  for options, message in (
    ({'regex': f'{"(" * 2000}a{")" * 2000}'}, 'is nested too deeply'),
    ({'json_schema': {'enum': {1}}}, 'json_schema cannot be written as JSON'),
    *refusals.of('models/text', 'constraint'),
  ):
    with pytest.raises(ValueError, match=message) as refused:
      _generator().generate(_PROMPT, max_new_tokens=4, **options)
    assert '\n' not in str(refused.value)


def test_scripts(tmp_path, monkeypatch):
  """A schema in a file, and an expression of all lines but one."""
  tiny_demo.stand_in(monkeypatch)
  schema = tmp_path / 'schema.json'
  schema.write_text(json.dumps(_NAMED))
  options = ['--method=plain', '--temperature=0.9', '--max_new_tokens=48']
  ended = command_lines.run(
    'generate.py', f'--json_schema={schema}', '--json', *options
  )
  assert _matches(json.loads(ended.output)['text'][0], None, _NAMED), ended
  prompts = tmp_path / 'prompts.jsonl'
  lines = {'prompt': 'x'}, {'prompt': 'x', 'json_schema': _NAMED}
  prompts.write_text('\n'.join(map(json.dumps, lines)))
  flags = [f'--prompt_file={prompts}', '--output=-', '--regex=[ab]{3}']
  flags += ['--in_order', '--batch_size=2', *options]
  ended = command_lines.run('generate_many.py', *flags)
  first, second = map(json.loads, ended.output.splitlines())
  assert _matches(first['text'], '[ab]{3}', None)
  assert _matches(second['text'], None, _NAMED)
