"""A client of servers with OpenAI's interface.

These are ours, and the servers of vLLM, llama.cpp and transformers. The client
sends the ids of prompts, reads streams, and asks each kind of server to read
every prompt again and to return ids, in the words that it knows. The server of
transformers knows neither ids nor most fields: it gets a text with the same
ids, and a configuration.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import json
import os
import re
import time
from typing import Any
import urllib.error
import urllib.request

import specdec
from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import arms as arms_lib
from specdec.text import text_files

KEY = 'OPENAI_API_KEY'
"""The variable of the environment that has the key of servers, if any."""

OURS = 'specdec'
_TRANSFORMERS = 'transformers'
# Parameters that make servers read every prompt and return ids, by `owned_by`.
_WORDS: Mapping[str, Mapping[str, Any]] = {
  OURS: {'cache_prompt': False, 'return_token_ids': True},
  'llamacpp': {'cache_prompt': False, 'return_tokens': True},
  'vllm': {'return_token_ids': True},
}
_VLLM_COUNT = r'^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$'


@dataclasses.dataclass(frozen=True)
class Reply:
  """The answer of a server."""

  text: str
  tokens: list[int] | None  #: Ids, if the server returns them.
  finish_reason: str | None
  first_seconds: float  #: Until something was said.
  accepted: int | None  #: Drafted tokens among the new, if it is known.
  forwards: int | None  #: Forwards of the target, if the server says.


class Endpoint:
  """A server at an address, such as `http://127.0.0.1:8000`.

  Raises:
    ValueError: nothing answers there.
  """

  def __init__(self, url: str):
    self.url = url.rstrip('/').removesuffix('/v1')
    models = json.loads(self._read('/v1/models'))['data']
    if not models:
      raise ValueError(
        f'{self.url} names no model; start its server with one, see'
        ' docs/serving.md'
      )
    self.model, self.kind = models[0]['id'], models[0].get('owned_by')
    # It has the owner of the model in place of its own name.
    if self.kind not in _WORDS and 'status' in models[0]:
      self.kind = _TRANSFORMERS

  def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
    headers = {'Content-Type': 'application/json'}
    if key := os.environ.get(KEY):
      headers['Authorization'] = f'Bearer {key}'
    data = None if body is None else text_files.to_json(body).encode()
    try:
      request = urllib.request.Request(f'{self.url}{path}', data, headers)
      return urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
      said = error.read().decode('utf-8', 'replace')
      raise ValueError(f'{self.url}{path}: {said:.500}') from error
    except (OSError, ValueError) as error:
      raise ValueError(
        f'{self.url}: no server answers there ({error}); start one, see'
        ' docs/serving.md'
      ) from error

  def _read(self, path: str) -> str:
    with self._open(path) as reply:
      return reply.read().decode()

  def accepted_so_far(self) -> int | None:
    """The drafted tokens that a server of vLLM accepted; None for others."""
    if self.kind != 'vllm':
      return None
    found = re.findall(_VLLM_COUNT, self._read('/metrics'), re.MULTILINE)
    return int(sum(map(float, found)))

  def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    with self._open('/v1/completions', body) as reply:
      for line in reply:
        data = line.decode().removeprefix('data:').strip()
        if data and data != '[DONE]' and not data.startswith(':'):
          event = json.loads(data)
          if 'error' in event:
            raise ValueError(f'{self.url}: {event["error"]}')
          yield event

  def to_prompt(self, ids: Sequence[int], tokenizer: Any) -> list[int] | str:
    """The ids of a prompt, or a text of which the server makes these ids.

    Raises:
      ValueError: the server takes texts alone, and no text has these ids.
    """
    ids = [*map(int, ids)]
    if self.kind != _TRANSFORMERS:
      return ids
    text = tokenizer.decode(ids)
    for prompt in text, text.removeprefix(tokenizer.bos_token or ''):
      if tokenizer(prompt)['input_ids'] == ids:
        return prompt
    raise ValueError(
      f'{self.url} takes no ids, and the text {text!r:.80} has others than the'
      ' prompt; leave out the prompt'
    )

  def complete(
    self, prompt: Sequence[int] | str, limit: int, **settings: Any
  ) -> Reply:
    """Continues a prompt; `settings` are fields of the request.

    Raises:
      ValueError: the server refuses it; has what the server said.
    """
    body = {'model': self.model, 'prompt': prompt, 'max_tokens': limit}
    if self.kind == _TRANSFORMERS:
      settings = _configured(settings)
    body |= {'stream': True, **_WORDS.get(str(self.kind), {}), **settings}
    begun, first = time.perf_counter(), None
    text, reason, accepted, forwards = '', None, None, None
    tokens: list[int] = []
    for event in self._events(body):
      if event.get('choices'):
        (choice,) = event['choices']
        text += choice.get('text') or ''
        tokens += choice.get('token_ids') or choice.get('tokens') or []
        reason = choice.get('finish_reason') or reason
        evidence = choice.get('specdec') or {}
        if 'forwards' in evidence:
          forwards = evidence['forwards']
          own = evidence['origins']
          accepted = sum(own.values()) - own['target']
        if first is None and (text or tokens):
          first = time.perf_counter() - begun
      if (timings := event.get('timings')) and 'predicted_n' in timings:
        accepted = timings.get('draft_n_accepted', 0)
    seconds = time.perf_counter() - begun if first is None else first
    return Reply(text, tokens or None, reason, seconds, accepted, forwards)


def _configured(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Fields of `settings_of` for the server of transformers."""
  names = 'top_k', 'top_p', 'min_p', 'temperature'
  draws = settings['temperature'] > 0
  config = {name: settings[name] for name in names if draws}
  config |= {'do_sample': draws, 'eos_token_id': settings['stop_token_ids']}
  if 'repetition_penalty' in settings:
    config['repetition_penalty'] = settings['repetition_penalty']
  return {
    'seed': settings['seed'],
    'generation_config': text_files.to_json(config),
  }


def settings_of(
  sampling: specdec.Sampling, seed: int, eos_ids: Sequence[int]
) -> dict[str, Any]:
  """The fields of a request that choose tokens, known to all servers.

  Raises:
    ValueError: an option has no field that all know.
  """
  if sampling.logit_bias is not None:
    raise ValueError('servers take no --logit_bias from here; leave it out')
  fields = {
    'seed': seed,
    'temperature': sampling.temperature,
    'top_k': sampling.top_k or 0,
    'top_p': 1.0 if sampling.top_p is None else sampling.top_p,
    'min_p': 0.0 if sampling.min_p is None else sampling.min_p,
    'stop_token_ids': [*eos_ids],
  }
  if sampling.repetition_penalty is not None:
    fields['repetition_penalty'] = sampling.repetition_penalty
  return fields


def ids_of(reply: Reply, eos_ids: Sequence[int], tokenizer: Any) -> list[int]:
  """The new ids; if the server returns none, its text is tokenised."""
  ids = reply.tokens
  if ids is None:
    ids = tokenizer(reply.text, add_special_tokens=False)['input_ids']
  # Some servers leave out the token that ended the text.
  ended = reply.finish_reason == 'stop' and eos_ids
  return [*ids, eos_ids[0]] if ended and not {*ids} & {*eos_ids} else ids


class EndpointArm:
  """Decodes by a server, all prompts of a batch at once; a `timing.Arm`.

  Attributes:
    first_seconds: of every prompt so far, until something was said.
  """

  def __init__(
    self,
    endpoint: Endpoint,
    task: task_lib.Task,
    eos_ids: Sequence[int],
    tokenizer: Any,
  ):
    self._endpoint, self._eos_ids = endpoint, eos_ids
    self._tokenizer = tokenizer
    self._settings = settings_of(task.sampling, task.seed, eos_ids)
    self.first_seconds: list[float] = []

  def __call__(
    self, prompts: Sequence[Sequence[int]], limit: int
  ) -> specdec.Generation:
    before = self._endpoint.accepted_so_far()
    # Some make at least one token.
    ask = lambda prompt: self._endpoint.complete(
      self._endpoint.to_prompt(prompt, self._tokenizer),
      max(limit, 1),
      **self._settings,
    )
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
      replies = [*threads.map(ask, prompts)]
    rows = [ids_of(one, self._eos_ids, self._tokenizer) for one in replies]
    rows = [row[:limit] for row in rows]
    if limit:
      self.first_seconds += [reply.first_seconds for reply in replies]
    accepted = sum(reply.accepted or 0 for reply in replies)
    if before is not None:
      accepted = (self._endpoint.accepted_so_far() or 0) - before
    forwards = sum(map(len, rows)) - accepted
    if all(reply.forwards is not None for reply in replies):
      forwards = sum(reply.forwards or 0 for reply in replies)
    return arms_lib.as_generation(rows, self._eos_ids, forwards)
