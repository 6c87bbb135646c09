"""Text in, text out: a target, a drafter and a tokenizer.

lm = specdec.load('demo', 'demo')
result = lm.generate('import ', max_new_tokens=64)
print(result.text[0], result.stats.block_efficiency)
for new in lm.stream('import ', max_new_tokens=64):
  print(new[0], end='', flush=True)

A prompt is a text, token ids, or the messages of a conversation.
`Generator.chat` adds one turn after the other to a conversation.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import os
import types
from typing import Any
from typing import Unpack

import numpy as np

import specdec
from specdec import arguments as arguments_lib
from specdec import decode_options
from specdec.models.text import chat_template
from specdec.models.text import choice as choice_lib
from specdec.models.text import drafters
from specdec.models.text import fields
from specdec.models.text import many as many_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import result as result_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import sources as sources_lib
from specdec.models.text import text_decoding
from specdec.models.text import text_options
from specdec.models.text import text_store

# One prompt, or several.
Prompts = chat_template.Prompt | Sequence[chat_template.Prompt]


def as_list(prompts: Any) -> list[Any]:
  """`Prompts` as a list of prompts.

  Raises:
    ValueError: the value is neither a prompt nor several prompts.
  """
  if isinstance(prompts, str) or chat_template.is_conversation(prompts):
    return [prompts]
  if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
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

  The drafter changes the speed, never the text; for plain decoding it is
  `specdec.PLAIN`. Of the drafters of a plan, `stream` and `generate` choose one
  for each batch, by its longest prompt, and `chat` one for a whole
  conversation, by its beginning. `generate_many` takes the one for
  requests like the samples that the plan was made from.
  """

  pair: pair_lib.Pair
  drafter: specdec.Drafter | drafters.Planned
  #: Earlier texts; new ones are added.
  store: text_store.TextStore | None = None

  @decode_options.documented(text_options.TextOptions)
  def stream(
    self,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    room_for_new_tokens: int | None = None,
    **options: Unpack[text_options.TextOptions],
  ) -> text_decoding.TextDecoding:
    """Continues prompts, and lets the text be shown while it grows.

    It takes the arguments of `generate`. Iterating over what is returned yields
    the new text of each row, block by block; iterating over its `said()` yields
    the new reasoning, too. To cancel, stop iterating; its `result` has the text
    so far, and its `trace` every step.
    """
    request = text_options.make_request(self.pair, as_list(prompts), options)
    drafter, of_ids = drafters.of_batch(
      self.pair, self.drafter, request.options, len(request.ids), request.ids
    )
    if self.store is not None:
      drafter = self.store.refreshed(drafter)
    decoding = specdec.Decoding(
      self.pair.target,
      request.row_keys,
      request.ids,
      max_new_tokens=max_new_tokens,
      room_for_new_tokens=room_for_new_tokens,
      drafter=drafter,
      **of_ids,
    )
    return text_decoding.TextDecoding(self.pair, decoding, request, self.store)

  @decode_options.documented(text_options.TextOptions)
  def generate(
    self,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    room_for_new_tokens: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    **options: Unpack[text_options.TextOptions],
  ) -> result_lib.TextGeneration:
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

  @decode_options.documented(text_options.TextOptions)
  def generate_many(
    self,
    prompts: Iterable[chat_template.Prompt | many_lib.Job],
    *,
    batch_size: int = 8,
    context: int | None = None,
    in_order: bool = False,
    tree_sizes: Mapping[int, int] = types.MappingProxyType({}),
    reading: int = 512,
    max_new_tokens: int = 128,
    **options: Unpack[text_options.TextOptions],
  ) -> many_lib.ManyDecoding:
    """Continues any number of prompts, some at a time.

    When a prompt ends, the next takes its place in the batch. A prompt gets the
    same tokens as from `generate` for it alone with the same seed. Iterating
    over what is returned yields a `specdec.Completion` for each prompt. To
    cancel, stop iterating; another loop continues from there. A prompt that
    cannot be decoded gives a completion with an error, and the others go on.

    The options are the same for all prompts, unless one is a `specdec.Job` with
    others. Prompt i has `seed` + i.

    Args:
      prompts: as for `generate`, or `specdec.Job`, which has options of its
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
    decode_options.check_names(options, text_options.TextOptions)
    arguments_lib.check_count('batch_size', batch_size)
    (stops,) = text_options.stops_of_rows(options.get('stop', ()), 1)
    of_ids = text_options.with_ids(self.pair, options, (stops,) * batch_size)
    drafter, of_ids = drafters.of_batch(
      self.pair, self.drafter, of_ids, batch_size
    )
    if self.store is not None:
      drafter = self.store.refreshed(drafter)
    seed: Any = options.get('seed', 0)
    (constraint,) = text_options.constraints_of_rows(options, 1)
    return many_lib.ManyDecoding(
      self.pair,
      prompts,
      many_lib.Defaults(
        seed=seed,
        max_new_tokens=max_new_tokens,
        stops=stops,
        constraint=constraint,
      ),
      store=self.store,
      in_order=in_order,
      context=context,
      num_slots=batch_size,
      drafter=drafter,
      tree_sizes=tree_sizes,
      reading=reading,
      **of_ids,
    )

  @decode_options.documented(text_options.TextOptions)
  def chat(
    self,
    messages: Sequence[chat_template.Message],
    *,
    context: int | None = None,
    max_new_tokens: int = 512,
    **options: Unpack[text_options.TextOptions],
  ) -> text_decoding.Chat:
    """Answers the last message of a conversation, and those that follow.

    Every answer equals what `generate` answers to all messages so far with the
    same seed: token for token if `verify` is `match`, otherwise in
    distribution. But only what is new is read.

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
    size = (
      min(largest, text_decoding.MAX_CONTEXT) if context is None else context
    )
    arguments_lib.check_count('context', size, largest)
    begin = functools.partial(self.stream, room_for_new_tokens=size, **options)
    return text_decoding.Chat(
      begin, self.pair, messages, context=size, max_new_tokens=max_new_tokens
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorChoice(choice_lib.ModelChoice):
  """The models of a `Generator`, and how they draft."""

  method: str = fields.described(
    'staged',
    'one of specdec.models.text.settings.METHODS; plain drafts nothing',
  )
  drafting: settings_lib.DraftSettings | None = fields.described(
    None,
    'the settings of the method; default: DraftSettings(), but on CPU trees of'
    ' 8 nodes',
  )
  plan: plan_lib.Plan | str | os.PathLike[str] | None = fields.described(
    None, 'a specdec.Plan or its file, in place of method and drafting'
  )
  messages: Sequence[chat_template.Message] | None = fields.described(
    None,
    'a conversation that the chat template of the target must accept, which is'
    ' checked before the weights are loaded',
  )


@fields.takes_fields(GeneratorChoice)
def load(choice: GeneratorChoice) -> Generator:
  """Loads a target and what drafts for it.

  Raises:
    ValueError: a model or the mesh cannot be used, or target, draft and plan do
      not fit together; gives the reason.
  """
  method, drafting, plan = choice.method, choice.drafting, choice.plan
  if plan is not None and not isinstance(plan, plan_lib.Plan):
    plan = plan_lib.load_plan(plan)
  uses_draft = (plan or settings_lib.method_of(method)).uses_draft
  if drafting is None:
    drafting = settings_lib.with_options(
      settings_lib.DraftSettings(), settings_lib.usual_options()
    )
  if not uses_draft:
    choice = choice.of_target
  sources = sources_lib.open_sources(choice)
  if plan is not None:
    plan.check_models(plan_lib.model_digests(sources))
  if choice.messages is not None:
    chat_template.conversation_ids(sources.tokenizer, choice.messages)
  pair = pair_lib.load_weights(sources)
  if plan is not None:
    settings = [way.drafting for way in plan.ways if way.drafting.store]
    store = drafters.open_store(settings[0], pair) if settings else None
    return Generator(pair, drafters.make_planned(plan, pair, store), store)
  store = drafters.open_store(drafting, pair)
  drafter = drafters.make_drafter(method, pair, drafting, store)
  return Generator(pair, drafter, store)
