"""Many prompts, one after the other in the slots of one batch.

for completion in lm.generate_many(prompts, batch_size=8, max_new_tokens=64):
  print(completion.index, completion.error or completion.result.text[0])
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import specdec
from specdec import arguments as arguments_lib
from specdec.models.text import chat_template
from specdec.models.text import constraints as constraints_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import result as result_lib
from specdec.models.text import text_decoding
from specdec.models.text import text_options
from specdec.models.text import text_store
from specdec.models.text import vocabulary as vocabulary_lib
from specdec.text import automaton as automaton_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A prompt with options of its own; None: the common option."""

  prompt: chat_template.Prompt
  max_new_tokens: int | None = None
  seed: int | None = None
  sampling: specdec.Sampling | None = None
  eos_ids: vocabulary_lib.EosIds | None = None
  regex: str | None = None
  json_schema: str | Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """The completion of a prompt, or its error."""

  index: int  #: Its number, from 0.
  #: It has one row; None if the prompt is refused.
  result: result_lib.TextGeneration | None
  error: str | None  #: Why it is refused, or what went wrong in decoding it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
  """The options of prompts that have none of their own."""

  seed: int  #: The seed of prompt 0; prompt i has `seed` + i.
  max_new_tokens: int
  stops: tuple[str, ...]  #: The stop strings of all prompts.
  constraint: constraints_lib.Constraint


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inserted:
  index: int
  prompt: chat_template.Prompt
  ids: list[int]
  section: int  # The section in which the text begins.


def _job(prompt: chat_template.Prompt | Job) -> Job:
  return prompt if isinstance(prompt, Job) else Job(prompt=prompt)


class ManyDecoding(Iterator[Completion]):
  """The decode of many prompts: an iterator over a `Completion` for each.

  `Generator.generate_many` makes it; `specdec.Slots` takes the `options`.
  """

  def __init__(
    self,
    pair: pair_lib.Pair,
    prompts: Iterable[chat_template.Prompt | Job],
    defaults: Defaults,
    *,
    context: int | None,
    in_order: bool,
    eos_ids: Sequence[int],
    store: text_store.TextStore | None = None,
    **options: Any,
  ):
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
      raise ValueError(
        f'prompts must be several prompts, got {prompts!r:.60}; give a list of'
        ' texts'
      )
    if not arguments_lib.is_integer(defaults.seed):
      raise ValueError(
        f'seed must be one integer for all prompts, got {defaults.seed!r}; a'
        ' specdec.Job has a seed of its own'
      )
    limit = defaults.max_new_tokens
    arguments_lib.check_count('max_new_tokens', limit, least=0)
    self._pair, self._prompts = pair, prompts
    self._defaults, self._eos_ids = defaults, eos_ids
    self._store = store
    self._automaton(defaults.constraint, eos_ids)  # Refused at once.
    self._slots = specdec.Slots(
      pair.target,
      context=self._context() if context is None else context,
      eos_ids=eos_ids,
      **options,
    )
    self._completions = self._ordered() if in_order else self._as_they_end()

  def _ids(self, prompt: chat_template.Prompt) -> list[int]:
    if isinstance(prompt, str) and not prompt:
      raise ValueError('the prompt is empty; give at least one character')
    (ids,) = self._pair.ids_of([prompt])
    vocab_size = self._pair.target.spec.vocab_size
    return arguments_lib.to_prompt('the prompt', ids, vocab_size)

  def _limit(self, job: Job) -> int:
    limit = job.max_new_tokens
    return self._defaults.max_new_tokens if limit is None else limit

  def _context(self) -> int:
    """The size of the buffers: what a list of prompts needs, or the default."""
    largest = min(
      self._pair.target.spec.max_positions, text_decoding.MAX_CONTEXT
    )
    if not isinstance(self._prompts, Sequence):
      return largest
    needed = 1
    for job in map(_job, self._prompts):
      try:
        needed = max(needed, len(self._ids(job.prompt)) + self._limit(job))
      except (TypeError, ValueError):
        continue  # It will be refused when it is decoded.
    return min(needed, self._pair.target.spec.max_positions)

  def _automaton(
    self, constraint: constraints_lib.Constraint, eos_ids: Sequence[int]
  ) -> automaton_lib.Automaton | None:
    vocab_size = self._pair.target.spec.vocab_size
    return constraints_lib.automaton_of(
      constraint, self._pair.tokenizer, vocab_size, eos_ids
    )

  def _insert(self, index: int, job: Job) -> tuple[int, _Inserted]:
    """Gives a slot to a prompt; ValueError if it cannot be decoded."""
    ids, seed, eos_ids = self._ids(job.prompt), job.seed, job.eos_ids
    if seed is None:
      seed = self._defaults.seed + index
    if eos_ids is not None:
      eos_ids = vocabulary_lib.ids_of_eos(
        eos_ids, self._pair.tokenizer, self._pair.target.spec.vocab_size
      )
    constraint = constraints_lib.constraint_of(job.regex, job.json_schema)
    automaton = self._automaton(
      constraint or self._defaults.constraint,
      self._eos_ids if eos_ids is None else eos_ids,
    )
    (section,) = text_options.first_sections(
      self._pair, [job.prompt], [automaton is not None]
    )
    slot = self._slots.insert(
      ids,
      text_options.keys_of_seeds([seed], 1)[0],
      max_new_tokens=self._limit(job),
      sampling=job.sampling,
      eos_ids=eos_ids,
      automaton=automaton,
      section=section,
    )
    return slot, _Inserted(
      index=index, prompt=job.prompt, ids=ids, section=section
    )

  @property
  def num_steps(self) -> int:
    """Batched target forwards so far, without those that only read prompts."""
    return self._slots.num_steps

  def _completion(
    self, prompt: _Inserted, generation: specdec.Generation
  ) -> Completion:
    if self._store is not None:
      self._store.add_decoded(generation.tokens)
      self._slots.change_drafters(self._store.refreshed)
    result = text_decoding.text_generation(
      self._pair,
      [text_decoding.prompt_text(self._pair, prompt.prompt, prompt.ids)],
      [prompt.ids],
      [self._defaults.stops],
      [prompt.section],
      generation,
    )
    return Completion(prompt.index, result, result.errors[0])

  def _as_they_end(self) -> Iterator[Completion]:
    jobs = enumerate(map(_job, self._prompts))
    waiting: dict[int, _Inserted] = {}
    more = True
    while more or waiting:
      while more and self._slots.free:
        numbered = next(jobs, None)
        if numbered is None:
          more = False
          break
        try:
          slot, prompt = self._insert(*numbered)
          waiting[slot] = prompt
        except (TypeError, ValueError) as error:
          yield Completion(numbered[0], None, str(error))
      for slot, generation in self._slots.advance().items():
        yield self._completion(waiting.pop(slot), generation)

  def _ordered(self) -> Iterator[Completion]:
    early, expected = dict[int, Completion](), 0
    for completion in self._as_they_end():
      early[completion.index] = completion
      while expected in early:
        yield early.pop(expected)
        expected += 1

  def __next__(self) -> Completion:
    """The next completions, as they end or in the order of the prompts."""
    return next(self._completions)
