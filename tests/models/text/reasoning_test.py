"""Reasoning before an answer, in the ways of several families.

The target is a script: it says one answer, token for token, so that one small
program serves all tests.
"""

import functools
import json

import byte_level
import httpx
import jax
import jax.numpy as jnp
import numpy as np
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

# Each family has a template, its tokens (the first ends a text), and the tokens
# that have a text.
_QWEN = (
  _LOOP + '<|im_start|>{{ one.role }}\n{% if one.reasoning_content %}<think>\n'
  '{{ one.reasoning_content }}\n</think>\n\n{% endif %}{{ one.content }}'
  '<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant'
  '\n<think>\n{% endif %}',
  ('<|im_end|>', '<|im_start|>', '<think>', '</think>'),
  ('<think>', '</think>'),
)
_HARMONY = (
  _LOOP + "{% if one.role == 'assistant' %}<|start|>assistant<|channel|>final"
  '<|message|>{{ one.content }}<|end|>{% else %}<|start|>{{ one.role }}'
  '<|message|>{{ one.content }}<|end|>{% endif %}{% endfor %}'
  '{% if add_generation_prompt %}<|start|>assistant{% endif %}',
  ('<|return|>', '<|start|>', '<|channel|>', '<|message|>', '<|end|>'),
  (),
)
_GEMMA = (
  _LOOP + "<|turn>{{ one.role }}\n{{ one.content.split('<channel|>')[-1] }}"
  '<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif '
  '%}',
  ('<turn|>', '<|turn>', '<|channel>', '<channel|>'),
  (),
)
_GEMMA_OF_GGUF = (*_GEMMA[:2], ('<|channel>', '<channel|>'))
_MINISTRAL = (
  _LOOP + "{% if one.role == 'user' %}[INST]{{ one.content }}[/INST]{% elif "
  'one.content is string %}{{ one.content }}</s>{% else %}{% for part in '
  "one.content %}{% if part.type == 'thinking' %}{{ '[THINK]' + part.thinking "
  "+ '[/THINK]' }}{% else %}{{ part.text }}{% endif %}{% endfor %}</s>"
  '{% endif %}{% endfor %}',
  ('</s>', '[INST]', '[/INST]', '[THINK]', '[/THINK]'),
  (),
)
# No token of its own, as in models that were only trained further.
_TAGS = (
  _LOOP + "{{ one.content.split('</seed:think>')[-1] }}\n{% endfor %}",
  ('<end>',),
  (),
)
_FAMILIES = {
  'qwen': (_QWEN, 'Hm.\n\nm\n</think>\n\nHi!<|im_end|>'),
  'harmony': (
    _HARMONY,
    '<|channel|>analysis<|message|>Hm.\n\nm<|end|><|start|>assistant<|channel|>'
    'final<|message|>Hi!<|return|>',
  ),
  'json': (  # As gpt-oss says that it writes JSON.
    _HARMONY,
    '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>'
    'analysis<|message|>m<|end|><|start|>assistant<|channel|>final json'
    '<|message|>Hi!<|return|>',
  ),
  'gemma': (_GEMMA, '<|channel>thought\nHm.\n\nm\n<channel|>Hi!<turn|>'),
  'gguf': (_GEMMA_OF_GGUF, '<|channel>thought\nHm.\n\nm<channel|>Hi!<turn|>'),
  'ministral': (_MINISTRAL, '[THINK]Hm.\n\nm[/THINK]Hi!</s>'),
  'tags': (_TAGS, '<seed:think>Hm.\n\nm</seed:think>\nHi!<end>'),
}


@functools.cache
def _tokenizer(template, words, shown):
  special = [word for word in words if word not in shown]
  tokenizer = byte_level.tokenizer(
    byte_level.ALPHABET, *special, eos_token=words[0], chat_template=template
  )
  tokenizer.add_tokens(
    [tokenizers.AddedToken(word, normalized=False) for word in shown]
  )
  return tokenizer


def _ids(tokenizer, text):
  return tokenizer(text, add_special_tokens=False)['input_ids']


def _apply(params, tokens, positions, mask, cache):
  del tokens, mask
  following = params['script'][positions]
  return 9.0 * jax.nn.one_hot(following, _VOCAB_SIZE), cache


def _generator(family, said, prompt=_USER):
  """A target that says something after a prompt, and then its end for ever."""
  tokenizer = _tokenizer(*family)
  if isinstance(prompt, str):
    ids = _ids(tokenizer, prompt)
  else:
    ids = chat_template.conversation_ids(tokenizer, prompt)
  end = tokenizer.eos_token_id
  script = [*ids, *_ids(tokenizer, said)]
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
  family, said = _FAMILIES[name]
  lm = _generator(family, said)
  stream = lm.stream(_USER, **_OPTIONS)
  steps = [part for (part,) in stream.said()]
  result = stream.result()
  assert result.tokens == [_ids(lm.pair.tokenizer, said)]
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


@pytest.mark.parametrize('name', _FAMILIES)
def test_a_text_that_is_no_answer_is_all_text(name):
  family, said = _FAMILIES[name]
  result = _generator(family, said, 'Hello').generate('Hello', **_OPTIONS)
  assert result.reasoning == ['']
  assert 'Hm.\n\nm' in result.text[0] or 'Hm.' in result.text[0]
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
  (_, words, shown), _ = _FAMILIES[name]
  end = '</think>' if name == 'qwen' else words[-1]
  template = f'{_LOOP}{{{{ one.content }}}}{{% endfor %}}{{# {end} #}}'
  template += '{% if add_generation_prompt %}' + head + '{% endif %}'
  pair = _generator((template, words, shown), '').pair
  # A user's words begin nothing.
  for content in ('Hello', 'Is <think> a tag?', '<|channel>thought\n', head):
    messages = [{'role': 'user', 'content': content or 'x'}]
    assert pair.sections[pair.section_after(messages)].kind == kind
    assert pair.section_after(content) == len(pair.sections) - 1


@pytest.mark.parametrize(
  ('name', 'prompt'),
  [
    (
      'qwen',
      '<|im_start|>assistant\n<think>\nHm.\n\nm\n</think>\n\nHi!<|im_end|>\n',
    ),
    ('harmony', '<|start|>assistant<|channel|>final<|message|>Hi!<|end|>'),
    ('gemma', '<|turn>assistant\nHi!<turn|>\n'),
    ('gguf', '<|turn>assistant\nHi!<turn|>\n'),
    ('ministral', '[THINK]Hm.\n\nm[/THINK]Hi!</s>'),
    ('tags', 'Hi!\n'),
  ],
)
def test_reasoning_goes_back_as_the_template_wants(name, prompt):
  family, said = _FAMILIES[name]
  lm = _generator(family, said)
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
  assert prompt in whole
  assert ('Hm.' in whole) == ('Hm.' in prompt)


def test_reasoning_has_the_name_that_a_template_reads():
  for name in ('reasoning', 'reasoning_content', 'thinking'):
    template = _LOOP + '{{ one.' + name + ' }},{% endfor %}'
    tokenizer = _tokenizer(template, ('<end>',), ())
    for given in ('reasoning', 'reasoning_content', 'thinking'):
      answer = {'role': 'assistant', 'content': 'a', given: 'abc'}
      ids = chat_template.conversation_ids(tokenizer, [answer, *_USER])
      assert tokenizer.decode(ids) == 'abc,,'


@pytest.mark.parametrize('name', ['qwen', 'harmony', 'gemma', 'gguf'])
def test_stop_strings_are_looked_for_in_the_answer(name):
  family, said = _FAMILIES[name]
  lm = _generator(family, said)
  end = {'qwen': '</think>', 'harmony': '<|end|>'}.get(name, '<channel|>')
  for stop, reasoning, text, reason in (
    ('\n\n', 'Hm.\n\nm', 'Hi!', 'eos'),
    ('m', 'Hm.\n\nm', 'Hi!', 'eos'),
    ('i', 'Hm.\n\nm', 'H', 'stop'),
    ('anal', 'Hm.\n\nm', 'Hi!', 'eos'),
    (end, 'Hm.\n\nm', '', 'stop'),  # It is meant for the reasoning.
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
  family, said = _FAMILIES['qwen']
  lm = _generator(family, said)
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
  lm = _generator(_QWEN, '{"a":1}<|im_end|>')
  options = {'regex': r'\{"a":1\}', **_OPTIONS}
  result = lm.generate(_USER, **options)
  assert (result.text, result.reasoning) == (['{"a":1}'], [''])
  job = many_lib.Job(prompt=_USER, regex=options['regex'])
  (completion,) = lm.generate_many([job], max_new_tokens=32)
  assert completion.result.text == ['{"a":1}']


def test_models_without_reasoning_have_one_section():
  template = _LOOP + '{{ one.content }}{% endfor %}'
  lm = _generator((template, ('<end>',), ()), '\nHi!\n<end>')
  assert len(lm.pair.sections) == 1
  result = lm.generate(_USER, **_OPTIONS)
  assert (result.text, result.reasoning) == (['\nHi!\n'], [''])
  assert str(result).startswith('Hello\nHi!\n\n\n')
  assert np.all(result.origins[0] == np.zeros(6))


def test_an_endpoint_has_a_field_for_reasoning():
  """Whole and streamed; the next prompt has it where the template wants it."""
  lm = _generator(*_FAMILIES['qwen'])
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
