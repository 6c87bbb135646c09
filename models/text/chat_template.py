r"""Conversations as token ids, and how models mark their reasoning.

The chat template of a tokenizer puts a conversation into words. Models mark
what they think before they answer in several ways::

    <think>...</think> answer                 and other tags of this kind
    <|channel>thought\n...<channel|>answer    Gemma 4
    <|channel|>analysis<|message|>...<|end|>
      <|start|>assistant<|channel|>final<|message|>answer    gpt-oss

Each way is a list of sections (`specdec.text.sections`). The text that ends a
section says which one follows. A stream, a whole result and the table of stop
strings on the device all read these. The chat template and the tokens of a
tokenizer decide on the sections. What the template writes before an answer,
such as `<think>`, decides on the first section of the answer.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import itertools
import re
from typing import Any
from typing import TypeGuard
import weakref

import jinja2
import transformers

from specdec import arguments as arguments_lib
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import sections as sections_lib

Message = Mapping[str, str]
"""`role` (such as system, user or assistant) and `content`, both texts.

A message of the assistant may have `reasoning`, which the template puts into
the prompt, or leaves out.
"""

# The names that templates have for the reasoning of a message.
_NAMES_OF_REASONING = 'reasoning', 'reasoning_content', 'thinking'

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, a list of ids, or a conversation."""


def is_conversation(prompt: Any) -> TypeGuard[Sequence[Message]]:
  """Whether a prompt is a list of messages."""
  is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
  return is_list and any(isinstance(entry, Mapping) for entry in prompt)


def first_messages(text: str, system: str | None) -> list[Message]:
  """A user's first message, after a system message if there is one."""
  user = {'role': 'user', 'content': text}
  if system is None:
    return [user]
  return [{'role': 'system', 'content': system}, user]


def answer(text: str, reasoning: str) -> dict[str, str]:
  """The message of an answer."""
  message = {'role': 'assistant', 'content': text}
  return message | {'reasoning': reasoning} if reasoning else message


def _check_texts(name: str, value: Any) -> None:
  """Refuses texts in a message, at any depth, that are not valid Unicode."""
  if isinstance(value, str):
    arguments_lib.check_text(name, value)
  elif isinstance(value, Mapping):
    for key, entry in value.items():
      _check_texts(f'{name}, {key}', entry)
  elif isinstance(value, Iterable):
    for entry in value:
      _check_texts(name, entry)


def _check(messages: Sequence[Message]) -> None:
  if not isinstance(messages, Sequence) or isinstance(messages, str):
    raise ValueError(f'messages must be a list of dicts, got {messages!r:.60}')
  for index, message in enumerate(messages):
    names = ('role', 'content')
    if not isinstance(message, Mapping) or not all(
      isinstance(message.get(name), str) for name in names
    ):
      raise ValueError(
        f'message {index} must be a dict with the texts role and content, got'
        f' {message!r:.200}'
      )
    _check_texts(f'message {index}', message)
  if not messages:
    raise ValueError('messages is empty; give at least one')


def _reasoning_of(message: Message) -> str:
  """The reasoning of a message, by whatever name; empty if it has none."""
  texts = (message.get(name) for name in _NAMES_OF_REASONING)
  return next((text for text in texts if isinstance(text, str)), '')


def _named(message: Message) -> dict[str, Any]:
  """A message with its reasoning by all names; a template reads one of them."""
  text = _reasoning_of(message)
  return dict(message) | (
    dict.fromkeys(_NAMES_OF_REASONING, text) if text else {}
  )


def _in_blocks(message: Message) -> dict[str, Any]:
  """A message with its reasoning in its content, as Ministral 3 wants it."""
  if not (text := _reasoning_of(message)):
    return dict(message)
  thinking = {'type': 'thinking', 'thinking': text}
  content = [thinking, {'type': 'text', 'text': message['content']}]
  return {'role': message['role'], 'content': content}


def _rendered(
  tokenizer: transformers.PreTrainedTokenizerBase,
  messages: Sequence[Message],
  *,
  with_head: bool,
) -> Any:
  """The text of a conversation; `with_head`: also the beginning of its answer.

  Reasoning is put into the contents if the template writes tags around it.
  """
  named = _rendered_as(tokenizer, map(_named, messages), with_head)
  texts = [*filter(None, map(_reasoning_of, messages))]
  tags = tags_of(tokenizer)
  if not (texts and tags):
    return named
  try:
    blocks = map(_in_blocks, messages)
    in_blocks = _rendered_as(tokenizer, blocks, with_head)
  except Exception:  # The template knows no such contents.
    return named
  are_marked = all(text.join(tags) in in_blocks for text in texts)
  return in_blocks if are_marked else named


def _rendered_as(
  tokenizer: transformers.PreTrainedTokenizerBase,
  messages: Iterable[dict[str, Any]],
  with_head: bool,
) -> Any:
  """The text of a conversation, in a form that the template may not know."""
  render = functools.partial(
    tokenizer.apply_chat_template,
    [*messages],
    add_generation_prompt=with_head,
    tokenize=False,
  )
  try:
    return render()
  except TypeError:
    # Tools that are absent are None in transformers, and undefined in
    # llama.cpp. Some templates of GGUF files are written for llama.cpp.
    template = tokenizer.get_chat_template()
    return render(chat_template=f'{{% set tools = no_tools %}}{template}')


def _text_of(
  tokenizer: transformers.PreTrainedTokenizerBase,
  messages: Sequence[Message],
  *,
  with_head: bool = True,
) -> str:
  """The text of a conversation; see `conversation_ids`."""
  _check(messages)
  if not tokenizer.chat_template:
    raise ValueError(
      'the tokenizer of the target has no chat template: base models have none;'
      ' choose an instruct model, copy its chat_template.jinja into the folder'
      ' of the target, or give a text as the prompt, without a chat'
    )
  try:
    text = _rendered(tokenizer, messages, with_head=with_head)
  except Exception as error:  # A template is a program: it may raise anything.
    roles = ', '.join(message['role'] for message in messages)
    is_refusal = isinstance(error, jinja2.TemplateError)
    error_type = '' if is_refusal else f'{type(error).__name__}: '
    raise ValueError(
      'the chat template of the target refuses a conversation with the roles'
      f' {roles}: {error_type}{error}'
    ) from error
  text = text.removeprefix('\ufeff')  # A byte order mark of the template file.
  arguments_lib.check_text(
    'the text that the chat template of the target makes', text
  )
  return text


def answer_head(
  tokenizer: transformers.PreTrainedTokenizerBase, messages: Sequence[Message]
) -> str:
  """The text that begins an answer in a template; see `conversation_ids`."""
  whole = _text_of(tokenizer, messages)
  without = _text_of(tokenizer, messages, with_head=False)
  pairs = zip(whole, without, strict=False)
  same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
  return whole[sum(1 for _ in same) :]


def conversation_ids(
  tokenizer: transformers.PreTrainedTokenizerBase, messages: Sequence[Message]
) -> list[int]:
  """The ids of a conversation, up to where the answer begins.

  Raises:
    ValueError: the tokenizer has no template, the template refuses the
      messages, or a message is malformed; gives the reason.
  """
  text = _text_of(tokenizer, messages)
  return tokenizer(text, add_special_tokens=False, verbose=False)['input_ids']


# By tokenizer, then by its template and its size, which can change.
_cache: weakref.WeakKeyDictionary[Any, dict[Any, sections_lib.Sections]] = (
  weakref.WeakKeyDictionary()
)

_END_TAG = re.compile(r'[<\[]/(?:\w+:)?think(?:ing)?[>\]]', re.IGNORECASE)

_TEXT, _REASONING = sections_lib.TEXT, sections_lib.REASONING
_HIDDEN, _Section = sections_lib.HIDDEN, sections_lib.Section

# Sections by a text that only such templates or tokenizers have.
_CHANNELS: dict[str, sections_lib.Sections] = {
  # Gemma 4: a name in the first line of a channel, and no name for the answer.
  '<channel|>': (
    _Section(_TEXT, ((b'<|channel>', 1),)),
    _Section(_HIDDEN, ((b'\n', 2), (b'<channel|>', 0))),
    _Section(_REASONING, ((b'<channel|>', 0),)),
  ),
  # Harmony, of gpt-oss: role and channel are the head of each message. All that
  # is not analysis is for the user.
  '<|channel|>': (
    _Section(_HIDDEN, ((b'<|channel|>analysis', 1), (b'<|message|>', 3))),
    _Section(_HIDDEN, ((b'<|message|>', 2),)),
    _Section(_REASONING, ((b'<|end|>', 0),)),
    _Section(_TEXT, ((b'<|end|>', 0),)),
  ),
}


def _marks(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
  """The templates, and then the tokens that no words are made of."""
  added = token_bytes_lib.added_tokens(tokenizer).values()
  tokens = [token.content for token in added]
  return '\n'.join([str(tokenizer.chat_template or ''), *tokens])


def tags_of(
  tokenizer: transformers.PreTrainedTokenizerBase,
) -> tuple[str, str] | None:
  """The tags around reasoning, such as <think> and </think>; None: no tags."""
  end = _END_TAG.search(_marks(tokenizer))
  return (end[0].replace('/', '', 1), end[0]) if end else None


def sections_of(
  tokenizer: transformers.PreTrainedTokenizerBase,
) -> sections_lib.Sections:
  """The sections of what a model says, by its template and its tokens.

  The last of them is never left. A text outside a conversation is all in this
  section. The result is cached as long as the tokenizer exists.
  """
  by_template = _cache.setdefault(tokenizer, {})
  key = str(tokenizer.chat_template), len(tokenizer)
  if key not in by_template:
    marks, tags = _marks(tokenizer), tags_of(tokenizer)
    of_channels = [_CHANNELS[mark] for mark in _CHANNELS if mark in marks]
    sections: sections_lib.Sections = ()
    if of_channels:
      sections = of_channels[0]
    elif tags is not None:
      begin, end = (tag.encode() for tag in tags)
      sections = (
        _Section(_TEXT, ((begin, 1),)),
        _Section(_REASONING, ((end, 0),)),
      )
    by_template[key] = sections + sections_lib.PLAIN
  return by_template[key]
