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

from models.text import chat as chat_lib
from models.text import chat_template
from models.text import constraints as constraints_lib
from models.text import ends as ends_lib
from models.text import pair as pair_lib
from models.text import result as result_lib
from models.text import text_decoding
from models.text import text_options
import specdec
from specdec import arguments as arguments_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A prompt with options of its own; None stands for that of all prompts."""

  prompt: chat_template.Prompt
  max_new_tokens: int | None = None
  seed: int | None = None
  #: It must set the options that the sampling of all prompts sets.
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


@dataclasses.dataclass
class _Waiting:
  """A prompt in a slot."""

  index: int
  prompt: chat_template.Prompt
  ids: list[int]


class ManyDecoding(Iterator[Completion]):
  """The decode of many prompts: an iterator over a `Completion` for each.

  `Generator.generate_many` makes it; `options` are those of `specdec.Slots`.
  """

  def __init__(
    self,
    pair: pair_lib.Pair,
    prompts: Iterable[chat_template.Prompt | Job],
    *,
    batch_size: int,
    context: int | None,
    in_order: bool,
    max_new_tokens: int,
    seed: Any,
    stops: tuple[str, ...],
    constraint: constraints_lib.Constraint,
    **options: Any,
  ):
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
      raise ValueError(
        f'prompts must be several prompts, got {prompts!r:.60}; give a list of'
        ' texts'
      )
    if not arguments_lib.is_integer(seed):
      raise ValueError(
        f'seed must be one integer for all prompts, got {seed!r}; a models.Job'
        ' has a seed of its own'
      )
    arguments_lib.check_count('max_new_tokens', max_new_tokens, least=0)
    self._pair, self._prompts = pair, prompts
    self._limit, self._stops, self._seed = max_new_tokens, stops, seed
    self._constraint, self._eos_ids = constraint, options['eos_ids']
    self._automaton(Job(prompt=''), self._eos_ids)  # Refused at once.
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
    for job in map(_as_job, self._prompts):
      try:
        needed = max(needed, len(self._ids(job)) + self._limit_of(job))
      except (TypeError, ValueError):
        continue  # It will be refused when it is decoded.
    return min(needed, self._pair.target.spec.max_positions)

  def _limit_of(self, job: Job) -> int:
    return self._limit if job.max_new_tokens is None else job.max_new_tokens

  @property
  def num_steps(self) -> int:
    """Batched target forwards so far, those that read prompts apart."""
    return self._slots.num_steps

  def _automaton(self, job: Job, eos_ids: Any) -> Any:
    """The automaton of the prompt's own constraint, or of all."""
    own = constraints_lib.constraint_of(job.regex, job.json_schema)
    return constraints_lib.automaton_of(
      self._constraint if own is None else own,
      self._pair.tokenizer,
      self._pair.target.spec.vocab_size,
      eos_ids,
    )

  def _insert(self, index: int, job: Job) -> tuple[int, _Waiting]:
    """Gives a slot to a prompt; ValueError if it cannot be decoded."""
    ids = self._ids(job)
    vocab_size = self._pair.target.spec.vocab_size
    seed = self._seed + index if job.seed is None else job.seed
    eos_ids = ends_lib.eos_ids_of(job.eos_ids, self._pair.tokenizer, vocab_size)
    slot = self._slots.insert(
      ids,
      text_options.keys_of_seeds([seed], 1)[0],
      max_new_tokens=self._limit_of(job),
      sampling=job.sampling,
      eos_ids=eos_ids,
      automaton=self._automaton(
        job, self._eos_ids if eos_ids is None else eos_ids
      ),
    )
    return slot, _Waiting(index, job.prompt, ids)

  def _completion(
    self, waiting: _Waiting, generation: specdec.Generation
  ) -> Completion:
    result = text_decoding.text_generation(
      self._pair,
      [text_decoding.prompt_text(self._pair, waiting.prompt, waiting.ids)],
      [waiting.ids],
      [self._stops],
      generation,
    )
    return Completion(waiting.index, result, result.errors[0])

  def _as_they_end(self) -> Iterator[Completion]:
    jobs = enumerate(map(_as_job, self._prompts))
    waiting: dict[int, _Waiting] = {}
    more = True
    while more or waiting:
      while more and self._slots.free:
        index, job = next(jobs, (0, None))
        if job is None:
          more = False
          break
        try:
          slot, prompt = self._insert(index, job)
        except (TypeError, ValueError) as error:
          yield Completion(index, None, str(error))
        else:
          waiting[slot] = prompt
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


def _as_job(prompt: chat_template.Prompt | Job) -> Job:
  return prompt if isinstance(prompt, Job) else Job(prompt=prompt)
