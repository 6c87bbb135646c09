r"""How a model says what it thinks before it answers.

Models mark their reasoning in several ways::

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

import re
from typing import Any
import weakref

import transformers

from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import sections as sections_lib

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


def _between_tags(begin: str, end: str) -> sections_lib.Sections:
  return (
    _Section(_TEXT, ((begin.encode(), 1),)),
    _Section(_REASONING, ((end.encode(), 0),)),
  )


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
    by_template[key] = _sections(tokenizer)
  return by_template[key]


def _sections(
  tokenizer: transformers.PreTrainedTokenizerBase,
) -> sections_lib.Sections:
  marks, plain = _marks(tokenizer), sections_lib.PLAIN
  for mark, sections in _CHANNELS.items():
    if mark in marks:
      return sections + plain
  tags = tags_of(tokenizer)
  return plain if tags is None else _between_tags(*tags) + plain
