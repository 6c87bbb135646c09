"""Reasoning before an answer, in the ways of several families.

The target is a script: it says one answer, token for token, so that one small
program serves all tests.
"""

import functools
import json
import pathlib
from typing import NamedTuple

import byte_level
import httpx
import jax
import jax.numpy as jnp
import pytest
import tiny_served
import tokenizers

import specdec
from specdec import cache as cache_lib
from specdec.models.text import chat_template
from specdec.models.text import generator as generator_lib
from specdec.models.text import many as many_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import result as result_lib

_VOCAB_SIZE, _CONTEXT = 272, 512
_USER = [{'role': 'user', 'content': 'Hello'}]
_LOOP = '{% for one in messages %}'


class _Family(NamedTuple):
  """How a family reasons; a row of `reasoning.jsonl`, which also has a name.

  The first token ends a text. `said_again` is in a prompt after the answer.
  """

  template: str
  tokens: str
  with_text: str = ''  # Tokens that are not special.
  said: str = ''
  said_again: str = ''


_ROWS = pathlib.Path(__file__).with_name('reasoning.jsonl').read_text('utf-8')
_FAMILIES = {
  row.pop('name'): _Family(**row) for row in map(json.loads, _ROWS.splitlines())
}


@functools.cache
def _tokenizer(family):
  tokens, with_text = family.tokens.split(), family.with_text.split()
  tokenizer = byte_level.tokenizer(
    byte_level.ALPHABET,
    *(token for token in tokens if token not in with_text),
    eos_token=tokens[0],
    chat_template=family.template,
  )
  tokenizer.add_tokens(
    [tokenizers.AddedToken(token, normalized=False) for token in with_text]
  )
  return tokenizer


def _ids(tokenizer, text):
  return tokenizer(text, add_special_tokens=False)['input_ids']


def _apply(params, tokens, positions, mask, cache):
  del tokens, mask
  following = params['script'][positions]
  return 9.0 * jax.nn.one_hot(following, _VOCAB_SIZE), cache


def _generator(family, prompt=_USER):
  """A target that answers a prompt, and then says its end for ever."""
  tokenizer = _tokenizer(family)
  if isinstance(prompt, str):
    ids = _ids(tokenizer, prompt)
  else:
    ids = chat_template.conversation_ids(tokenizer, prompt)
  end = tokenizer.eos_token_id
  script = [*ids, *_ids(tokenizer, family.said)]
  script += [end] * (_CONTEXT + 1 - len(script))
  target = specdec.LanguageModel(
    params={'script': jnp.asarray(script[1:], jnp.int32)},
    spec=specdec.ModelSpec(
      apply=_apply,
      init_cache=cache_lib.init_empty_cache,
      vocab_size=_VOCAB_SIZE,
      max_positions=_CONTEXT,
      weight_bytes=0,
      cache_bytes_per_slot=0,
    ),
  )
  pair = pair_lib.Pair(target, None, tokenizer, eos_ids=(end,))
  return generator_lib.Generator(pair, specdec.PLAIN)


_OPTIONS = {'max_new_tokens': 128, 'room_for_new_tokens': 128}


@pytest.mark.parametrize('name', _FAMILIES)
def test_reasoning_is_a_field_of_its_own(name):
  lm = _generator(_FAMILIES[name])
  stream = lm.stream(_USER, **_OPTIONS)
  steps = [part for (part,) in stream.said()]
  result = stream.result()
  assert result.tokens == [_ids(lm.pair.tokenizer, _FAMILIES[name].said)]
  assert (result.reasoning, result.text) == (['Hm.\n\nm'], ['Hi!'])
  assert ''.join(part.text for part in steps) == 'Hi!'
  assert ''.join(part.reasoning for part in steps) == 'Hm.\n\nm'
  # A token alone, as here, or several, as of a draft that guesses right.
  pair, (ids,) = lm.pair, result.tokens
  section = pair.section_after(_USER)
  for size in (2, 7, len(ids)):
    several = pair.text_stream((), section)
    parts = [
      several.feed(ids[start : start + size])
      for start in range(0, len(ids), size)
    ]
    parts.append(several.flush())
    assert ''.join(part.text for part in parts) == 'Hi!'
    assert ''.join(part.reasoning for part in parts) == 'Hm.\n\nm'
  assert ''.join(result.pieces[0]) == 'Hm.\n\nmHi!'
  assert ''.join(result_lib.labelled(steps)) == (
    '\n[reasoning] Hm.\n\nm\n[answer] Hi!'
  )
  assert result.marked(0, color=False) == '\u2070Hm.\n\nm\n\n\u2070Hi!'
  # After a text, and no message, all is text.
  alone = _generator(_FAMILIES[name], 'Hello')
  result = alone.generate('Hello', **_OPTIONS)
  assert result.reasoning == ['']
  assert 'Hm.' in result.text[0]
  assert result.text[0].endswith('Hi!')


@pytest.mark.parametrize(
  ('name', 'head', 'kind'),
  [
    ('qwen', '<think>', 'reasoning'),
    ('qwen', '<think>\n\n</think>\n\n', 'text'),
    ('qwen', '', 'text'),
    ('gemma', '<|turn>model\n<|channel>thought\n<channel|>', 'text'),
    ('gguf', '<|turn>model\n<|channel>thought\n', 'reasoning'),
    ('ministral', '[THINK]', 'reasoning'),
    ('harmony', '<|start|>assistant<|channel|>final<|message|>', 'text'),
    (
      'harmony',
      '<|start|>assistant<|channel|>analysis<|message|>',
      'reasoning',
    ),
    ('harmony', '<|start|>assistant', 'hidden'),
  ],
)
def test_the_template_says_where_an_answer_begins(name, head, kind):
  family = _FAMILIES[name]
  end = '</think>' if name == 'qwen' else family.tokens.split()[-1]
  template = f'{_LOOP}{{{{ one.content }}}}{{% endfor %}}{{# {end} #}}'
  template += '{% if add_generation_prompt %}' + head + '{% endif %}'
  pair = _generator(family._replace(template=template, said='')).pair
  # A user's words begin nothing.
  for content in ('Hello', 'Is <think> a tag?', '<|channel>thought\n', head):
    messages = [{'role': 'user', 'content': content or 'x'}]
    assert pair.sections[pair.section_after(messages)].kind == kind
    assert pair.section_after(content) == len(pair.sections) - 1


@pytest.mark.parametrize(
  'name', [name for name in _FAMILIES if _FAMILIES[name].said_again]
)
def test_reasoning_goes_back_as_the_template_wants(name):
  lm = _generator(_FAMILIES[name])
  chat = lm.chat(_USER, max_new_tokens=128)
  chat.run()
  chat.reply('And now?')
  assert chat.messages[1] == {
    'role': 'assistant',
    'content': 'Hi!',
    'reasoning': 'Hm.\n\nm',
  }
  ids = chat.result().prompt_tokens[0]
  whole = lm.pair.tokenizer.decode(ids, skip_special_tokens=False)
  assert whole.count('Hi!') == 1
  said_again = _FAMILIES[name].said_again
  assert said_again in whole
  assert ('Hm.' in whole) == ('Hm.' in said_again)


def test_reasoning_has_the_name_that_a_template_reads():
  for name in ('reasoning', 'reasoning_content', 'thinking'):
    template = _LOOP + '{{ one.' + name + ' }},{% endfor %}'
    tokenizer = _tokenizer(_Family(template, '<end>'))
    for given in ('reasoning', 'reasoning_content', 'thinking'):
      answer = {'role': 'assistant', 'content': 'a', given: 'abc'}
      ids = chat_template.conversation_ids(tokenizer, [answer, *_USER])
      assert tokenizer.decode(ids) == 'abc,,'


@pytest.mark.parametrize('name', ['qwen', 'harmony', 'gguf'])
def test_stop_strings_are_looked_for_in_the_answer(name):
  lm = _generator(_FAMILIES[name])
  ends = {'qwen': '</think>', 'harmony': '<|end|>', 'gguf': '<channel|>'}
  for stop, reasoning, text, reason in (
    ('\n\n', 'Hm.\n\nm', 'Hi!', 'eos'),
    ('m', 'Hm.\n\nm', 'Hi!', 'eos'),
    ('i', 'Hm.\n\nm', 'H', 'stop'),
    ('anal', 'Hm.\n\nm', 'Hi!', 'eos'),
    (ends[name], 'Hm.\n\nm', '', 'stop'),  # It is meant for the reasoning.
  ):
    stream = lm.stream(_USER, stop=stop, **_OPTIONS)
    steps = [part for (part,) in stream.said()]
    result = stream.result()
    assert result.finish_reasons == [reason], stop
    assert (result.reasoning, result.text) == ([reasoning], [text]), stop
    assert ''.join(part.text for part in steps) == text
    assert ''.join(part.reasoning for part in steps) == reasoning
    assert ''.join(result.pieces[0]) == reasoning + text


def test_prompts_of_one_batch_begin_in_sections_of_their_own():
  """Stop strings count from the first token of a text without an answer."""
  lm = _generator(_FAMILIES['qwen'])
  (ids,) = lm.pair.ids_of([_USER])
  prompts = [_USER, ids, _USER, ids]
  options = {'stop': 'm', 'max_new_tokens': 128}
  expected = [('Hi!', 'Hm.\n\nm'), ('H', ''), ('Hi!', 'Hm.\n\nm'), ('H', '')]
  many = lm.generate_many(prompts, batch_size=2, in_order=True, **options)
  results = [completion.result for completion in many]
  parts = [(result.text[0], result.reasoning[0]) for result in results]
  assert parts == expected
  batch = lm.generate(prompts, **options)
  assert [*zip(batch.text, batch.reasoning, strict=True)] == expected
  # The next prompts of a batch may be of another kind.
  stream = lm.stream([_USER, ids], **options)
  stream.run()
  stream.extend([ids, _USER], max_new_tokens=128)
  stream.run()
  assert stream.result().text == ['H', 'Hi!']


def test_a_constraint_is_for_all_that_is_said():
  said = '{"a":1}<|im_end|>'
  lm = _generator(_FAMILIES['qwen']._replace(said=said))
  options = {'regex': r'\{"a":1\}', **_OPTIONS}
  result = lm.generate(_USER, **options)
  assert (result.text, result.reasoning) == (['{"a":1}'], [''])
  job = many_lib.Job(prompt=_USER, regex=options['regex'])
  (completion,) = lm.generate_many([job], max_new_tokens=32)
  assert completion.result.text == ['{"a":1}']


def test_models_without_reasoning_have_one_section():
  template = _LOOP + '{{ one.content }}{% endfor %}'
  lm = _generator(_Family(template, '<end>', said='\nHi!\n<end>'))
  assert len(lm.pair.sections) == 1
  result = lm.generate(_USER, **_OPTIONS)
  assert (result.text, result.reasoning) == (['\nHi!\n'], [''])
  assert str(result).startswith('Hello\nHi!\n\n\n')


def test_an_endpoint_has_a_field_for_reasoning():
  """Whole and streamed; the next prompt has it where the template wants it."""
  lm = _generator(_FAMILIES['qwen'])
  settings = {'method': 'plain', 'context': _CONTEXT, 'max_new_tokens': 64}
  path = '/v1/chat/completions'
  with (
    tiny_served.serving(lm, **settings) as server,
    httpx.Client(base_url=server.address, timeout=60) as http,
  ):
    ask = lambda messages, **more: http.post(
      path, json={'messages': messages, **more}
    )
    (choice,) = ask(_USER).json()['choices']
    lines = ask(_USER, stream=True).text.split('\n\n')
    deltas = [
      json.loads(line.removeprefix('data: '))['choices'][0]['delta']
      for line in lines
      if line.startswith('data: {')
    ]
    answer = choice['message']
    history = [*_USER, answer, *_USER]
    usage = ask(history, max_tokens=1).json()['usage']
  assert answer == {
    'role': 'assistant',
    'content': 'Hi!',
    'reasoning_content': 'Hm.\n\nm',
  }
  for field in ('content', 'reasoning_content'):
    assert ''.join(delta.get(field, '') for delta in deltas) == answer[field]
  said = {'reasoning': 'Hm.\n\nm', 'content': 'Hi!', 'role': 'assistant'}
  ids = chat_template.conversation_ids(
    lm.pair.tokenizer, [*_USER, said, *_USER]
  )
  assert usage['prompt_tokens'] == len(ids)
