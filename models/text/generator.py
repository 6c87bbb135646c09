"""Text in, text out: a target, a drafter and a tokenizer.

lm = models.load('demo', 'demo')
result = lm.generate('import ', max_new_tokens=64)
print(result.text[0], result.stats.block_efficiency)
for new in lm.stream('import ', max_new_tokens=64):
  print(new[0], end='', flush=True)

A prompt is a text, token ids, or the messages of a conversation, to which
`Generator.chat` adds one turn after the other.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import numbers
import os
import types
from typing import Any
from typing import Unpack

import jax
import numpy as np

from models.text.chat import Chat
from models.text.chat import MAX_CONTEXT
from models.text.chat_template import conversation_ids
from models.text.chat_template import is_conversation
from models.text.chat_template import Message
from models.text.chat_template import Prompt
from models.text.drafters import make_drafter
from models.text.drafters import PLANNED
from models.text.drafters import planned_break_even
from models.text.ends import EosIds
from models.text.ends import stops_of_rows
from models.text.ends import StopsOfRows
from models.text.many import Job
from models.text.many import ManyDecoding
from models.text.pair import find_checkpoints
from models.text.pair import load_checkpoints
from models.text.pair import ModelChoice
from models.text.pair import Pair
from models.text.plan import load_plan
from models.text.plan import model_digests
from models.text.plan import Plan
from models.text.result import TextGeneration
from models.text.settings import DraftSettings
from models.text.settings import INNERS
from models.text.text_decoding import TextDecoding
from models.text.text_options import keys_of_seeds
from models.text.text_options import TextOptions
from models.text.text_options import with_ids
import specdec
from specdec import checks
from specdec.decode_options import check_names
from specdec.decode_options import documented

# One prompt, or several.
Prompts = Prompt | Sequence[Prompt]


def as_list(prompts: Any) -> list[Any]:
  """`Prompts` as a list of prompts.

  Raises:
    ValueError: the prompts are none.
  """
  if isinstance(prompts, str) or is_conversation(prompts):
    return [prompts]
  if not isinstance(prompts, Iterable):
    raise ValueError(
      'prompts must be a text, a list of ids, a conversation or several of'
      f' them, got {prompts!r}'
    )
  prompts = list(prompts)
  # Arrays of every shape have `__index__`.
  are_ids = all(
    hasattr(token, '__index__') and np.ndim(token) == 0 for token in prompts
  )
  return [prompts] if prompts and are_ids else prompts


@dataclasses.dataclass(frozen=True)
class Generator:
  """A target, a drafter and a tokenizer: text in, text out.

  The drafter changes the speed, never the text; that of plain decoding is
  `specdec.PLAIN`. `break_even` is the default of that argument of `generate`.
  """

  pair: Pair
  drafter: specdec.Drafter
  break_even: float | None = None

  def _of_ids(self, options: TextOptions, stops: StopsOfRows) -> Any:
    """The options of `specdec`; `stops` are the stop strings of each row."""
    break_even = options.get('break_even')
    return with_ids(self.pair, options, stops) | {
      'break_even': self.break_even if break_even is None else break_even
    }

  @documented(TextOptions)
  def stream(
    self,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    room_for_new_tokens: int | None = None,
    **options: Unpack[TextOptions],
  ) -> TextDecoding:
    """Continues prompts, and lets the text be shown while it grows.

    The arguments are those of `generate`. Iterating over what is returned
    yields the new text of each row, block by block. To cancel, stop iterating;
    its `result` has the text so far, and its `trace` every step.
    """
    check_names(options, TextOptions)
    given = as_list(prompts)
    ids = self.pair.ids_of(given)
    keys = keys_of_seeds(options.pop('seed', 0), len(given))
    stops = stops_of_rows(options.get('stop', ()), len(given))
    decoding = specdec.Decoding(
      self.pair.target,
      keys,
      ids,
      max_new_tokens=max_new_tokens,
      room_for_new_tokens=room_for_new_tokens,
      drafter=self.drafter,
      **self._of_ids(options, stops),
    )
    return TextDecoding(self.pair, decoding, given, stops)

  @documented(TextOptions)
  def generate(
    self,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    room_for_new_tokens: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    **options: Unpack[TextOptions],
  ) -> TextGeneration:
    """Continues prompts.

    Args:
      prompts: a text, a list of ids, a conversation (messages as of
        transformers: dicts with `role` and `content`, which the template of the
        tokenizer puts into words), or several of them, in any mixture.
      max_new_tokens: the limit, one for all rows or one per row.
      room_for_new_tokens: size of the buffers, at least `max_new_tokens`, which
        is the default. Calls with one size share a program.
      should_stop: asked every few steps, from this thread; if it returns True,
        rows that have not ended are cancelled and keep the tokens they have.

    Returns:
      Texts, ids and statistics.

    Raises:
      ValueError: an argument cannot be used; gives the reason.
    """
    decoding = self.stream(
      prompts,
      max_new_tokens=max_new_tokens,
      room_for_new_tokens=room_for_new_tokens,
      **options,
    )
    decoding.run(should_stop)
    return decoding.result()

  @documented(TextOptions)
  def generate_many(
    self,
    prompts: Iterable[Prompt | Job],
    *,
    batch_size: int = 8,
    context: int | None = None,
    in_order: bool = False,
    tree_sizes: Mapping[int, int] = types.MappingProxyType({}),
    reading: int = 512,
    max_new_tokens: int = 128,
    **options: Unpack[TextOptions],
  ) -> ManyDecoding:
    """Continues any number of prompts, some at a time.

    When a prompt ends, the next takes its place in the batch. The tokens of a
    prompt are those of `generate` for it alone, with the same seed. Iterating
    over what is returned yields a `models.Completion` for each prompt; to
    cancel, stop iterating; another loop goes on from there. A prompt that
    cannot be decoded is a completion with an error, and the others go on.

    The options are the same for all prompts, unless one is a `models.Job` with
    others. Prompt i has `seed` + i.

    Args:
      prompts: as for `generate`, or `models.Job`, which has options of its
        own. They are taken when there is room for them, so they may be made
        meanwhile, without end.
      batch_size: prompts that are decoded at once.
      context: the most tokens of a prompt and its continuation; the size of the
        buffers. None: what the prompts need if they are a list, else the
        context of the target, and at most 2,048.
      in_order: whether completions come in the order of the prompts, rather
        than as they end.
      tree_sizes: nodes of the tree by the number of prompts under way, see
        `specdec.Slots`.
      reading: the most tokens of prompts that are read between two steps.
      max_new_tokens: the limit of each prompt.

    Raises:
      ValueError: an argument cannot be used; gives the reason.
    """
    check_names(options, TextOptions)
    checks.check_count('batch_size', batch_size)
    seed = options.pop('seed', 0)
    (stops,) = stops_of_rows(options.get('stop', ()), 1)
    return ManyDecoding(
      self.pair,
      prompts,
      batch_size=batch_size,
      context=context,
      in_order=in_order,
      max_new_tokens=max_new_tokens,
      seed=seed,
      stops=stops,
      drafter=self.drafter,
      tree_sizes=tree_sizes,
      reading=reading,
      **self._of_ids(options, (stops,) * batch_size),
    )

  @documented(TextOptions)
  def chat(
    self,
    messages: Sequence[Message],
    *,
    context: int | None = None,
    max_new_tokens: int = 512,
    **options: Unpack[TextOptions],
  ) -> Chat:
    """Answers the last message of a conversation, and those that follow.

    Every answer is that of `generate` for all messages up to then and the same
    seed: token for token if `verify` is `match`, and otherwise tokens of the
    same distribution. But only what is new is read.

    Args:
      messages: as of transformers: dicts with `role` and `content`.
      context: size of the buffers: the most tokens of the whole conversation.
        None: the context of the target, and at most 2,048.
      max_new_tokens: the limit of each answer.

    Raises:
      ValueError: an argument cannot be used, the tokenizer has no chat
        template, or the messages do not fit into the context.
    """
    largest = self.pair.target.spec.max_positions
    size = min(largest, MAX_CONTEXT) if context is None else context
    if not (isinstance(size, numbers.Integral) and 1 <= size <= largest):
      raise ValueError(
        f'context must be an integer from 1 to {largest}, the context of the'
        f' target; got {context!r}'
      )
    begin = functools.partial(self.stream, room_for_new_tokens=size, **options)
    return Chat(
      begin, self.pair, messages, context=size, max_new_tokens=max_new_tokens
    )


def load(
  target: str = 'demo',
  draft: str | None = 'demo',
  *,
  method: str = 'staged',
  drafting: DraftSettings = DraftSettings(),
  plan: Plan | str | os.PathLike[str] | None = None,
  dtype: jax.typing.DTypeLike = 'auto',
  draft_dtype: jax.typing.DTypeLike | None = None,
  cpu_kernels: bool = True,
  revision: str | None = None,
  mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
  draft_mesh: str = 'auto',
  eos_ids: EosIds | None = None,
  messages: Sequence[Message] | None = None,
) -> Generator:
  """Loads a target and what drafts for it.

  Args:
    target: `demo` (embedded), a folder, a GGUF file or the id of a model on the
      Hugging Face hub.
    draft: the draft model, named in the same way; None for none.
    method: one of `models.text.drafters.METHODS`; `plain` drafts nothing.
    drafting: settings of the method.
    plan: a `models.Plan` or its file, made by scripts/tune.py; takes the place
      of `method` and `drafting`.
    dtype: of the target; for this and the next see
      `models.text.pair.ModelChoice`.
    draft_dtype: of the draft.
    cpu_kernels: whether to use the kernels for CPU.
    revision: of the target, on the hub.
    mesh: several devices.
    draft_mesh: where the draft lies on them.
    eos_ids: tokens that end a text.
    messages: a conversation that the chat template of the target must accept,
      which is checked before the weights are loaded.

  Raises:
    ValueError: a model or the mesh cannot be used, or target, draft and plan do
      not fit together; gives the reason.
  """
  choice = ModelChoice(
    target,
    draft,
    revision=revision,
    dtype=dtype,
    draft_dtype=draft_dtype,
    cpu_kernels=cpu_kernels,
    mesh=mesh,
    draft_mesh=draft_mesh,
    eos_ids=eos_ids,
  )
  if plan is not None and not isinstance(plan, Plan):
    plan = load_plan(plan)
  return _load(choice, method, drafting, plan, messages)


def _load(
  choice: ModelChoice,
  method: str,
  drafting: DraftSettings,
  plan: Plan | None,
  messages: Sequence[Message] | None,
) -> Generator:
  """See `load`."""
  if plan is not None:
    method, drafting = PLANNED, DraftSettings(plan=plan)
  without_draft = plan is not None and not plan.uses_draft
  if without_draft or method in ('plain', *INNERS):
    choice = dataclasses.replace(choice, draft=None)
  target, draft = find_checkpoints(choice)
  if plan is not None:
    plan.check_models(model_digests(target, draft))
  if messages is not None and target.tokenizer is not None:
    conversation_ids(target.tokenizer, messages)
  pair = load_checkpoints(target, draft, choice)
  drafter = make_drafter(method, pair, drafting)
  return Generator(pair, drafter, planned_break_even(method, drafting))
