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
from specdec.models.text import chat as chat_lib
from specdec.models.text import chat_template
from specdec.models.text import constraints as constraints_lib
from specdec.models.text import ends as ends_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import result as result_lib
from specdec.models.text import text_decoding
from specdec.models.text import text_options
from specdec.models.text import text_store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A prompt with options of its own; None: the common option."""

  prompt: chat_template.Prompt
  max_new_tokens: int | None = None
  seed: int | None = None
  sampling: specdec.Sampling | None = None
  eos_ids: ends_lib.EosIds | None = None
  regex: str | None = None
  json_schema: str | Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """The completion of a prompt, or its error."""

  index: int  #: Its number, from 0.
  #: It has one row; None if the prompt is refused.
  result: result_lib.TextGeneration | None
  error: str | None  #: Why it is refused, or what went wrong in decoding it.


# A prompt in a slot: its index, the prompt, its ids, and the first section of
# its text.
_Waiting = tuple[int, chat_template.Prompt, list[int], int]


class ManyDecoding(Iterator[Completion]):
  """The decode of many prompts: an iterator over a `Completion` for each.

  `Generator.generate_many` makes it. `default` has the options of prompts that
  have none of their own; `specdec.Slots` takes the `options`.
  """

  def __init__(
    self,
    pair: pair_lib.Pair,
    prompts: Iterable[chat_template.Prompt | Job],
    default: Job,
    *,
    batch_size: int,
    context: int | None,
    in_order: bool,
    stops: tuple[str, ...],
    store: text_store.TextStore | None = None,
    **options: Any,
  ):
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
      raise ValueError(
        f'prompts must be several prompts, got {prompts!r:.60}; give a list of'
        ' texts'
      )
    if not arguments_lib.is_integer(default.seed):
      raise ValueError(
        f'seed must be one integer for all prompts, got {default.seed!r}; a'
        ' specdec.Job has a seed of its own'
      )
    arguments_lib.check_count('max_new_tokens', default.max_new_tokens, least=0)
    self._pair, self._prompts = pair, prompts
    self._default, self._stops, self._store = default, stops, store
    self._eos_ids = options['eos_ids']
    self._automaton(default, None)  # Refused at once.
    self._slots = specdec.Slots(
      pair.target,
      num_slots=batch_size,
      context=self._context() if context is None else context,
      **options,
    )
    self._completions = self._ordered() if in_order else self._as_they_end()

  def _ids(self, job: Job) -> list[int]:
    if isinstance(job.prompt, str) and not job.prompt:
      raise ValueError('the prompt is empty; give at least one character')
    ids = self._pair.ids_of([job.prompt])[0]
    vocab_size = self._pair.target.spec.vocab_size
    return arguments_lib.to_prompt('the prompt', ids, vocab_size)

  def _context(self) -> int:
    """The size of the buffers: what a list of prompts needs, or the default."""
    largest = min(self._pair.target.spec.max_positions, chat_lib.MAX_CONTEXT)
    if not isinstance(self._prompts, Sequence):
      return largest
    needed = 1
    for prompt in self._prompts:
      job = self._job(0, prompt)
      try:
        needed = max(needed, len(self._ids(job)) + job.max_new_tokens)
      except (TypeError, ValueError):
        continue  # It will be refused when it is decoded.
    return min(needed, self._pair.target.spec.max_positions)

  # Any: a type checker would not know that its seed and its limit are set.
  def _job(self, index: int, prompt: chat_template.Prompt | Job) -> Any:
    """The `Job` of a prompt, with an option wherever there is a default."""
    seed = (self._default.seed or 0) + index
    default = dataclasses.replace(self._default, seed=seed)
    if not isinstance(prompt, Job):
      return dataclasses.replace(default, prompt=prompt)
    given = {
      name: value for name, value in vars(prompt).items() if value is not None
    }
    if {'regex', 'json_schema'} & given.keys():
      default = dataclasses.replace(default, regex=None, json_schema=None)
    return dataclasses.replace(default, **given | {'prompt': prompt.prompt})

  @property
  def num_steps(self) -> int:
    """Batched target forwards so far, without those that only read prompts."""
    return self._slots.num_steps

  def _automaton(self, job: Job, eos_ids: Any) -> Any:
    """The automaton of the constraint of a prompt."""
    return constraints_lib.automaton_of(
      constraints_lib.constraint_of(job.regex, job.json_schema),
      self._pair.tokenizer,
      self._pair.target.spec.vocab_size,
      self._eos_ids if eos_ids is None else eos_ids,
    )

  def _insert(
    self, index: int, prompt: chat_template.Prompt | Job
  ) -> tuple[int, _Waiting]:
    """Gives a slot to a prompt; ValueError if it cannot be decoded."""
    job = self._job(index, prompt)
    ids, vocab_size = self._ids(job), self._pair.target.spec.vocab_size
    eos_ids = ends_lib.eos_ids_of(job.eos_ids, self._pair.tokenizer, vocab_size)
    automaton = self._automaton(job, eos_ids)
    (section,) = text_decoding.first_sections(
      self._pair, [job.prompt], [automaton is not None]
    )
    slot = self._slots.insert(
      ids,
      text_options.keys_of_seeds([job.seed], 1)[0],
      max_new_tokens=job.max_new_tokens,
      sampling=job.sampling,
      eos_ids=eos_ids,
      automaton=automaton,
      section=section,
    )
    return slot, (index, job.prompt, ids, section)

  def _completion(
    self, waiting: _Waiting, generation: specdec.Generation
  ) -> Completion:
    index, prompt, ids, section = waiting
    if self._store is not None:
      self._store.add(generation.tokens)
      self._slots.change_drafters(self._store.refreshed)
    result = text_decoding.text_generation(
      self._pair,
      [text_decoding.prompt_text(self._pair, prompt, ids)],
      [ids],
      [self._stops],
      [section],
      generation,
    )
    return Completion(index, result, result.errors[0])

  def _as_they_end(self) -> Iterator[Completion]:
    prompts = enumerate(self._prompts)
    waiting: dict[int, _Waiting] = {}
    more = True
    while more or waiting:
      while more and self._slots.free:
        numbered = next(prompts, None)
        if numbered is None:
          more = False
          break
        try:
          slot, inserted = self._insert(*numbered)
        except (TypeError, ValueError) as error:
          yield Completion(numbered[0], None, str(error))
        else:
          waiting[slot] = inserted
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
