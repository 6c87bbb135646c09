"""Conversations: templates, ends of turns, and that only what is new is read.

Models are random, and their answers end early.
"""

import numpy as np
import pytest
import refusals
import tiny
import tiny_drafters
import tiny_served

import specdec
from specdec import loop
from specdec.models.checkpoints import hub

_TEMPLATE, _EOS_IDS = tiny_served.TEMPLATE, tiny_served.EOS_IDS
_END = _EOS_IDS[0]
# Answers that others follow lose all but a letter.
_FORGETFUL = _TEMPLATE.replace(
  "['content']", "['content'][:1 if message['role'] == 'assistant' else None]"
)
# In transformers, tools that are absent are None, and no loop is over None.
_WITH_TOOLS = '{% if tools is defined %}{% for one in tools %}<a>{% endfor %}'
_WITH_TOOLS += '{% endif %}' + _TEMPLATE
_SAID = ('ab', 'c', 'Def', 'ab', 'g')
_LIMIT = 5


def _generator(kind='plain', template=_TEMPLATE):
  drafter = tiny_drafters.simple(kind, tiny.draft('similar', num_layers=1))
  return tiny_served.generator(tiny.gpt2(num_layers=1), drafter, template)


def _user(text='ab'):
  return {'role': 'user', 'content': text}


def _sampling(temperature=0.0, bias=2.0):
  """Ends of turns are more probable than in the model, and do occur."""
  ends = dict.fromkeys(_EOS_IDS, bias)
  return specdec.Sampling(temperature=temperature, logit_bias=ends)


_ENDLESS = {'sampling': _sampling(bias=-np.inf)}
_OPTIONS = {'max_new_tokens': _LIMIT, 'sampling': _sampling(), 'seed': 3}
_WHOLE = _OPTIONS | {'room_for_new_tokens': tiny.MAX_POSITIONS}


def _chat(lm, **options):
  system = {'role': 'system', 'content': 'xy'}
  return lm.chat([system, _user(_SAID[0])], **_OPTIONS | options)


def _again(messages, template=_TEMPLATE, sampling=_sampling()):
  """The answer of plain decoding of the whole conversation."""
  options = _WHOLE | {'sampling': sampling}
  return _generator(template=template).generate([messages], **options)


_num_programs = lambda: [
  program._cache_size() for program in (loop.start, loop.extend, loop.advance)
]


@pytest.mark.parametrize(
  ('kind', 'temperature'), [('plain', 0.0), ('staged', 1.0)]
)
def test_five_turns_equal_decoding_everything_again(kind, temperature):
  sampling = _sampling(temperature)
  chat = _chat(_generator(kind), sampling=sampling)
  shown, num_known, ends = ''.join(chat), 0, set()
  for turn, said in enumerate(_SAID[1:], 1):
    result = chat.result()
    assert result.tokens == _again(chat.messages, sampling=sampling).tokens
    assert shown == result.text[0]
    ends.add(result.tokens[0][-1])
    length = len(result.prompt_tokens[0])
    assert chat.num_read == length - num_known
    # All that was decoded, without the last token, and an end that differs from
    # the template's end.
    num_known = length + len(result.tokens[0]) - 1
    programs = _num_programs()
    assert chat.reply(said) is chat
    shown = ''.join(chat)
    assert turn == 1 or _num_programs() == programs
  assert chat.num_read < 12 < len(chat.result().prompt_tokens[0])
  roles = [message['role'] for message in chat.messages]
  assert roles == ['system', 'user', *['assistant', 'user'] * 4]
  assert ends & {*_EOS_IDS}


def test_a_template_may_change_earlier_turns():
  """The part that it changed is read again, and all that follows."""
  chat = _chat(_generator('staged', _FORGETFUL))
  for said in _SAID[1:]:
    result = chat.run()
    assert result.tokens == _again(chat.messages, _FORGETFUL).tokens
    before = len(result.prompt_tokens[0])
    has_more = len(result.text[0]) > 1
    chat.reply(said)
    ids = chat.result().prompt_tokens[0]
    # The prompt and, of the answer, one letter.
    assert chat.num_read == len(ids) - before - has_more
  assert chat.run().tokens == _again(chat.messages, _FORGETFUL).tokens


def test_an_answer_that_was_stopped_is_part_of_what_follows():
  chat = _chat(_generator('staged'), **_ENDLESS)
  first = next(iter(chat))
  assert chat.result().finish_reasons == ['cancelled']
  chat.reply('c')
  assert chat.messages[-2] == {'role': 'assistant', 'content': first}
  assert chat.run().tokens == _again(chat.messages, **_ENDLESS).tokens


def test_a_full_context_is_refused_and_nothing_changes():
  chat = _chat(_generator(), context=24, **_ENDLESS)
  chat.run()
  with pytest.raises(ValueError, match=r'has 2. tokens, .* room for 24; begin'):
    chat.reply('abcdefghij')
  assert len(chat.messages) == 2
  chat.reply('abcd')
  result = chat.run()
  ids, (tokens,) = result.prompt_tokens[0], result.tokens
  assert len(ids) + len(tokens) <= 24
  assert len(tokens) < _LIMIT
  assert result.finish_reasons == ['length']


def test_conversations_are_prompts():
  messages, prompt = [_user()], [_END + 2, 0, 1, _END, _END + 3]
  call = lambda method: getattr(_generator(), method)(messages, **_WHOLE)
  stream = call('stream')
  text = ''.join(new[0] for new in stream)
  assert stream.prompts == ['ab']  # without special tokens
  assert stream.result().text == [text]
  for result in (call('generate'), stream.result()):
    assert result.tokens == _again(messages).tokens
    assert result.prompt_tokens == [prompt]
  assert call('stream').trace()[0].prompt_tokens == tuple(prompt)
  assert _generator(template=_WITH_TOOLS).pair.ids_of([messages]) == [prompt]
  mixed = [[_user()], 'ab', [0, 1], [_user('c'), _user('d')]]
  lengths = [len(ids) for ids in _generator().pair.ids_of(mixed)]
  assert lengths == [5, 2, 2, 7]


def test_what_is_no_conversation_is_refused():
  for messages, words in refusals.of('models/text', 'messages'):
    with pytest.raises(ValueError, match=words):
      _generator().chat(messages)
  for template, words in refusals.of('models/text', 'template'):
    with pytest.raises(ValueError, match=words):
      _generator(template=template).chat([_user()])


def test_a_missing_template_is_noticed_before_the_weights_are_read(monkeypatch):
  monkeypatch.setattr(hub, 'load_network', pytest.fail)
  with pytest.raises(ValueError, match='has no chat template'):
    specdec.load('demo', None, method='plain', messages=[_user()])


@pytest.mark.parametrize('context', [0, 81, 2.5, 'all'])
def test_a_context_that_the_target_has_not_is_refused(context):
  with pytest.raises(ValueError, match=r'context must be .* at most 80'):
    _chat(_generator(), context=context)
