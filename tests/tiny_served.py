"""Servers of tiny models, and what their clients send.

Every token is a letter or special, so that a text has one way to be cut.
"""

import contextlib
import functools
import string
import threading
import time

import byte_level
import tiny

from specdec.models.serve import app as app_lib
from specdec.models.serve import asked as asked_lib
from specdec.models.serve import engine as engine_lib
from specdec.models.text import generator as generator_lib
from specdec.models.text import pair as pair_lib

LETTERS = string.ascii_letters[:40]
SPECIAL = ('<end>', '<system>', '<user>', '<assistant>', '<a>', '<b>', '<c>')
EOS_IDS = tuple(range(40, 40 + len(SPECIAL)))
TEMPLATE = (
  '{% for message in messages %}'
  "<{{ message['role'] }}>{{ message['content'] }}<end>"
  '{% endfor %}'
  '{% if add_generation_prompt %}<assistant>{% endif %}'
)


@functools.cache
def _tokenizer(template, letters):
  return byte_level.tokenizer(
    letters, *SPECIAL, eos_token='<end>', chat_template=template
  )


def generator(target, drafter, template=TEMPLATE, letters=LETTERS):
  """A generator whose tokens are letters."""
  tokenizer = _tokenizer(template, letters)
  pair = pair_lib.Pair(target, None, tokenizer, eos_ids=EOS_IDS)
  return generator_lib.Generator(pair, drafter)


@contextlib.contextmanager
def serving(lm, *, max_new_tokens=8, api_key=None, **options):
  """A server at `address` until the end of the block."""
  chosen = {'method': 'tree', 'context': tiny.MAX_POSITIONS} | options
  engine = engine_lib.Engine(lm, **chosen)
  reader = asked_lib.Reader(engine, model='tiny', max_new_tokens=max_new_tokens)
  server = app_lib.Server(reader, api_key=api_key)
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  while not server.address:
    assert thread.is_alive()
    time.sleep(0.01)
  try:
    yield server
  finally:
    engine.stop()
    server.should_exit = True
    for running in (thread, engine.thread):
      running.join(20)
      assert not running.is_alive()
