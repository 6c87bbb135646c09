"""Text in, text out: load a target and whoever drafts for it, then decode.

lm = models.load('demo', 'demo')
result = lm.generate('import ', max_new_tokens=64)
print(result.text[0], result.stats['block_efficiency'])
for new in lm.stream('import ', max_new_tokens=64):
  print(new[0], end='', flush=True)
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import numbers
import os
import time
from typing import Any
from typing import TypedDict
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from models.text.drafters import DraftSettings
from models.text.drafters import make_drafter
from models.text.drafters import PLANNED
from models.text.drafters import planned_break_even
from models.text.pair import load_pair
from models.text.pair import Pair
from models.text.pair import vocabulary_digest
from models.text.plan import load_plan
from models.text.plan import model_digests
from models.text.plan import Plan
from models.text.result import TextGeneration
from models.text.token_bytes import text_of
from models.text.token_bytes import TextStream
import specdec
from specdec import checks
from specdec.verify.stop_strings import build_stop_table
from specdec.verify.stop_strings import StopTable

# As the user may give them: one text, one list of ids, or several of either.
Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]


Stops = str | Sequence[str] | Sequence[Sequence[str]]


class TextOptions(TypedDict, total=False):
  """Keyword arguments of `Generator.generate` and `Generator.stream`.

  Attributes:
    max_new_tokens: the limit, one for all or one per row; 128 by default.
    room_for_new_tokens: see `specdec.generation.Options`.
    sampling: how to choose tokens, each value one for all or one per row;
      greedy by default.
    seed: of the sampling, 0 by default. One per row gives a row the same tokens
      in any batch; row 0 of a single seed has those of that seed alone.
    stop: stop strings: one, several, or a list of them per row. The text ends
      before the first of them.
    eos_ids: tokens that end a row; by default those of the target. `()` goes on
      up to the limit.
    verify: see `specdec.generation.Options`.
    children: likewise.
    log_probs: likewise.
    break_even: likewise.
  """

  max_new_tokens: int | Sequence[int]
  room_for_new_tokens: int | None
  sampling: specdec.Sampling
  seed: int | Sequence[int]
  stop: Stops
  eos_ids: Sequence[int]
  verify: str
  children: str | None
  log_probs: bool
  break_even: float | None


def row_keys(seed: int | Sequence[int], batch_size: int) -> jax.Array:
  """The keys of each row, `[B]`; see `TextOptions.seed`.

  Raises:
    ValueError: there are other than B seeds, or one is no integer.
  """
  seeds = list(seed) if isinstance(seed, Sequence) else [seed]
  for one in seeds:
    is_integer = isinstance(one, numbers.Integral) and not isinstance(one, bool)
    # Of larger ones JAX would take the lower 32 bits without a word.
    if not (is_integer and -(2**31) <= one < 2**32):
      raise ValueError(
        f'seed must be an integer of 32 bits, or one per row, got {seed!r}'
      )
  if not isinstance(seed, Sequence):
    return checks.row_keys(jax.random.key(seeds[0]), batch_size)
  if len(seeds) != batch_size:
    raise ValueError(
      f'seed must be one integer or one per row ({batch_size}), got'
      f' {len(seeds)}'
    )
  one_key = lambda one: checks.row_keys(jax.random.key(one), 1)[0]
  return jnp.stack([one_key(one) for one in seeds])


def _is_ids(prompt) -> bool:
  # Arrays say that they can be an index, whatever their shape.
  return not isinstance(prompt, str) and all(
    hasattr(token, '__index__') and np.ndim(token) == 0 for token in prompt
  )


def as_list(prompts: Any) -> list[Any]:
  """`Prompts` as a list of texts and lists of ids.

  Raises:
    ValueError: it is neither.
  """
  if isinstance(prompts, str):
    return [prompts]
  if not isinstance(prompts, Iterable):
    raise ValueError(
      f'prompts must be a text, a list of ids or several of them, got'
      f' {prompts!r}'
    )
  prompts = list(prompts)
  return [prompts] if prompts and _is_ids(prompts) else prompts


def _are_texts(values: Any) -> bool:
  """Whether it is a list of strings."""
  return (
    isinstance(values, Sequence)
    and not isinstance(values, str)
    and all(isinstance(one, str) for one in values)
  )


def stops_of_rows(stop: Any, batch_size: int) -> tuple[tuple[str, ...], ...]:
  """`Stops` as the stop strings of each row.

  Raises:
    ValueError: there are other than B lists, or one has what is no text.
  """
  if isinstance(stop, str):
    stop = [stop]
  if _are_texts(stop):
    stop = [stop] * batch_size
  is_list = isinstance(stop, Sequence) and all(map(_are_texts, stop))
  if not is_list or len(stop) != batch_size:
    raise ValueError(
      'stop must be a string, a list of strings, or one list of strings per row'
      f' ({batch_size}), got {stop!r}'
    )
  for row, strings in enumerate(stop):
    for one in strings:
      if not one or any('\ud800' <= letter <= '\udfff' for letter in one):
        raise ValueError(f'row {row} has the stop string {one!r}; give text')
  return tuple(tuple(strings) for strings in stop)


_MAX_STOP_TABLES = 16


class TextDecoding:
  """A decode whose text can be shown while it goes on; `Generator.stream`.

  Iterating yields the new text of each row after every target forward: whole
  characters, and nothing that may yet turn out to be part of a stop string. All
  of it together is the text of `result`.
  """

  def __init__(
    self,
    generator: 'Generator',
    prompts: Prompts,
    **options: Unpack[TextOptions],
  ):
    """Checks the arguments and feeds the prompts; see `Generator`."""
    unknown = set(options) - set(TextOptions.__annotations__)
    if unknown:
      raise TypeError(
        f'unexpected arguments {sorted(unknown)}; there are'
        f' {sorted(TextOptions.__annotations__)}'
      )
    self._pair = pair = generator.pair
    given = as_list(prompts)
    for row, prompt in enumerate(given):
      if isinstance(prompt, str) and not prompt:
        raise ValueError(f'prompt {row} is empty; give at least one character')
    self._ids = [
      pair.encode(prompt) if isinstance(prompt, str) else prompt
      for prompt in given
    ]
    self._stops = stops_of_rows(options.get('stop', ()), len(given))
    self._streams: list[TextStream] | None = None
    passed: dict[str, Any] = dict(options)
    keys = row_keys(passed.pop('seed', 0), len(given))
    passed['stop'] = generator.stop_table(self._stops)
    passed.setdefault('max_new_tokens', 128)
    passed.setdefault('eos_ids', pair.eos_ids)
    passed.setdefault('break_even', generator.break_even)
    self._decoding = specdec.Decoding(
      pair.target, keys, self._ids, drafter=generator.drafter, **passed
    )
    # They are known to be token ids now.
    self._ids = [list(map(int, ids)) for ids in self._ids]
    self._prompts = [
      prompt if isinstance(prompt, str) else pair.decode(ids)
      for prompt, ids in zip(given, self._ids, strict=True)
    ]

  @property
  def done(self) -> bool:
    """Whether all rows are."""
    return self._decoding.done

  def compile(self) -> None:
    """Compiles all that decoding needs, and decodes nothing."""
    self._decoding.step(0)

  def run(self, should_stop: Callable[[], bool] | None = None) -> None:
    """To the end, without looking; see `specdec.Decoding.run`.

    What comes meanwhile is in `result`, and not in what iterating yields later.
    """
    self._decoding.run(should_stop)

  def __iter__(self) -> Iterator[list[str]]:
    """The new text of each row, step by step, until all are done."""
    # Kept, so that who breaks off can go on later, within a character too.
    if self._streams is None:
      pieces = self._pair.token_bytes()
      self._streams = [TextStream(pieces, stops) for stops in self._stops]
    for new in self._decoding:
      reasons = self._decoding.finish_reasons
      texts = []
      for stream, ids, reason in zip(self._streams, new, reasons, strict=True):
        text = stream.feed(ids)
        texts.append(text if reason is None else text + stream.flush())
      yield texts

  def trace(self) -> list[specdec.Trace]:
    """To the end, like `run`; what happened in every step, row by row."""
    rows = self._decoding.record()
    result = self.result()
    return [
      specdec.Trace(
        prompt=result.prompts[row],
        prompt_tokens=tuple(self._ids[row]),
        labels=result.labels,
        blocks=tuple(blocks),
        pieces=tuple(result.pieces[row]),
        texts={
          token: self._pair.token_text(token)
          for block in blocks
          for token in (*block.tokens, *block.emitted)
        },
        finish_reason=result.finish_reasons[row],
        log_probs=None
        if result.log_probs is None
        else tuple(result.log_probs[row]),
      )
      for row, blocks in enumerate(rows)
    ]

  def result(self) -> TextGeneration:
    """All that was generated so far."""
    generation = self._decoding.result()
    rows = list(zip(generation.tokens, self._stops, strict=True))
    texts = [_text(self._pair, tokens, stops) for tokens, stops in rows]
    pieces = [self._pair.pieces(tokens) for tokens in generation.tokens]
    return TextGeneration(
      prompts=self._prompts,
      text=texts,
      prompt_tokens=self._ids,
      tokens=generation.tokens,
      pieces=list(map(_cut, pieces, map(len, texts))),
      origins=generation.origins,
      labels=generation.labels,
      log_probs=generation.log_probs,
      finish_reasons=generation.finish_reasons,
      errors=generation.errors,
      stats=generation.stats,
    )


def _text(pair: Pair, tokens: Sequence[int], stops: Sequence[str]) -> str:
  try:
    return text_of(pair.token_bytes(), tokens, stops)
  except ValueError:
    if stops:
      raise
    return pair.decode(list(tokens))  # Any tokenizer will do for this.


def _cut(pieces: Sequence[str], length: int) -> list[str]:
  """As much of the pieces as there is text."""
  cut = []
  for piece in pieces:
    cut.append(piece[:length])
    length -= len(cut[-1])
  return cut


@dataclasses.dataclass(frozen=True)
class Generator:
  """A target, whoever drafts for it, and a tokenizer: text in, text out.

  Attributes:
    pair: the models and the tokenizer.
    drafter: guesses for the target; None is plain decoding. It changes the
      speed, never the text.
    break_even: the default of that option: of the plan, or None.
  """

  pair: Pair
  drafter: specdec.Drafter
  break_even: float | None = None
  _stop_tables: dict = dataclasses.field(
    default_factory=dict, repr=False, compare=False
  )

  def stop_table(self, stops: tuple[tuple[str, ...], ...]) -> StopTable | None:
    """For the stop strings of each row; None if there are none.

    Tables are kept: building one takes a moment where the vocabulary is large.

    Raises:
      ValueError: a stop string is empty, or the tokenizer cannot say which
        bytes its tokens have.
    """
    if not any(stops):
      return None
    if stops not in self._stop_tables:
      while len(self._stop_tables) >= _MAX_STOP_TABLES:
        del self._stop_tables[next(iter(self._stop_tables))]
      self._stop_tables[stops] = build_stop_table(
        [[stop.encode() for stop in row] for row in stops],
        self.pair.token_bytes(),
        self.pair.target.spec.vocab_size,
      )
    return self._stop_tables[stops]

  def stream(
    self, prompts: Prompts, **options: Unpack[TextOptions]
  ) -> TextDecoding:
    """Continues prompts, to be watched while it goes on.

    Args:
      prompts: a text, a list of ids, or several of them, in any mixture.
      **options: see `TextOptions`.

    Returns:
      An iterable of the new text of each row, block by block. To cancel, stop
      iterating; its `result` has what there is so far.

    Raises:
      TypeError: an argument is not known.
      ValueError: an argument cannot be used; says which and why.
    """
    return TextDecoding(self, prompts, **options)

  def generate(
    self,
    prompts: Prompts,
    *,
    should_stop: Callable[[], bool] | None = None,
    **options: Unpack[TextOptions],
  ) -> TextGeneration:
    """Continues prompts.

    Args:
      prompts: see `stream`.
      should_stop: see `specdec.generate`.
      **options: see `TextOptions`.

    Returns:
      Texts, ids and statistics.

    Raises:
      TypeError: an argument is not known.
      ValueError: an argument cannot be used; says which and why.
    """
    decoding = TextDecoding(self, prompts, **options)
    decoding.run(should_stop)
    return decoding.result()

  def trace(
    self, prompts: Prompts, **options: Unpack[TextOptions]
  ) -> list[specdec.Trace]:
    """Continues prompts, and tells what happened in every step.

    The texts are those of `generate`. It is slower: every step returns to the
    host. `specdec.viz` draws what comes back.

    Args:
      prompts: see `stream`.
      **options: see `TextOptions`.

    Returns:
      Of each row its trace.

    Raises:
      TypeError: an argument is not known.
      ValueError: an argument cannot be used; says which and why.
    """
    return TextDecoding(self, prompts, **options).trace()

  def timed(
    self, prompts: Prompts, **options: Unpack[TextOptions]
  ) -> TextGeneration:
    """`generate`, compiled before the clock starts.

    Its statistics have `seconds` of decoding too (prompt included, compilation
    not), `tokens_per_second` over all rows, and `compile_seconds`.
    """
    start = time.perf_counter()
    TextDecoding(self, prompts, **options).compile()
    compiled = time.perf_counter()
    result = self.generate(prompts, **options)
    seconds = time.perf_counter() - compiled
    timing = {
      'seconds': seconds,
      'tokens_per_second': result.stats['new_tokens'] / seconds,
      'compile_seconds': compiled - start,
    }
    return dataclasses.replace(result, stats=result.stats | timing)


def load(
  target: str = 'demo',
  draft: str | None = 'demo',
  *,
  method: str = 'staged',
  drafting: DraftSettings = DraftSettings(),
  plan: Plan | str | os.PathLike[str] | None = None,
  dtype: jax.typing.DTypeLike = jnp.float32,
  draft_dtype: jax.typing.DTypeLike | None = None,
  revision: str | None = None,
) -> Generator:
  """Loads a target and whoever drafts for it.

  Args:
    target: `demo` (embedded), a folder or the id of a model on the Hugging Face
      hub.
    draft: likewise; None for none.
    method: one of `models.drafters.METHODS`; `plain` drafts nothing.
    drafting: see there.
    plan: from `models.planner`, or a file made by scripts/tune.py; in place of
      method and settings.
    dtype: of the target: float32, bfloat16 or int8, see `hub.load_module`.
    draft_dtype: of the draft; default: as the target.
    revision: of the target, on the hub.

  Raises:
    ValueError: a model cannot be used, or the two or the plan do not fit; says
      why.
  """
  if plan is not None:
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    method, drafting = PLANNED, DraftSettings(plan=plan)
  pair = load_pair(
    target,
    None if method == 'plain' else draft,
    dtype=dtype,
    draft_dtype=draft_dtype,
    revision=revision,
  )
  if plan is not None:
    vocabulary = vocabulary_digest(pair.tokenizer)
    plan.check_models(
      model_digests(target, draft, vocabulary=vocabulary, revision=revision)
    )
  return Generator(
    pair,
    make_drafter(method, pair, drafting),
    break_even=planned_break_even(method, drafting),
  )
