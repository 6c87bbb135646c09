"""A target, what drafts for it, and the target's tokenizer."""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import transformers

from specdec import arguments as arguments_lib
from specdec import model as model_lib
from specdec.draft import block as block_lib
from specdec.draft import head as head_lib
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import block_drafters
from specdec.models.checkpoints.heads import heads
from specdec.models.checkpoints.heads import mtp
from specdec.models.nn import adapter
from specdec.models.nn import dtypes
from specdec.models.nn import other_tokens
from specdec.models.nn import sharding as sharding_lib
from specdec.models.nn.cpu import build
from specdec.models.text import chat_template
from specdec.models.text import choice as choice_lib
from specdec.models.text import sources as sources_lib
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import sections as sections_lib


@dataclasses.dataclass(frozen=True)
class Pair:
  """A target, what drafts for it, and the target's tokenizer.

  `eos_ids` are the tokens that end a text, `layout` is the target's. A draft
  model drafts, a drafting head, or neither.
  """

  target: model_lib.LanguageModel
  draft: model_lib.LanguageModel | None
  tokenizer: transformers.PreTrainedTokenizerBase
  eos_ids: tuple[int, ...]
  layout: sharding_lib.Layout = sharding_lib.Layout()
  head: head_lib.Head | block_lib.BlockDrafter | None = None
  #: Each row after the first adds this to the time of the target's forward, in
  #: the time of the first; 0: not known.
  row_cost: float = 0.0

  @property
  def drafting_model(self) -> model_lib.Network | None:
    """The draft or the head, if there is one."""
    return self.draft if self.head is None else self.head

  def encode(self, text: str) -> list[int]:
    """Text to token ids; ValueError if the text is not valid Unicode."""
    arguments_lib.check_text('the prompt', text)
    # `verbose=False`: a text that is too long is refused when it is decoded.
    return self.tokenizer(text, verbose=False)['input_ids']

  def ids_of(self, prompts: Sequence[chat_template.Prompt]) -> list[Any]:
    """The token ids of texts and conversations; ids are returned.

    Raises:
      ValueError: a text is empty, or a conversation cannot be used.
    """
    ids: list[Any] = []
    for row, prompt in enumerate(prompts):
      if isinstance(prompt, str):
        if not prompt:
          raise ValueError(
            f'prompt {row} is empty; give at least one character'
          )
        ids.append(self.encode(prompt))
      elif chat_template.is_conversation(prompt):
        ids.append(chat_template.conversation_ids(self.tokenizer, prompt))
      else:
        ids.append(prompt)
    return ids

  def decode(self, ids: list[int]) -> str:
    """Token ids to text, without special tokens."""
    # Otherwise added tokens would be read as bytes.
    if token_bytes_lib.is_byte_level(self.tokenizer):
      stream = token_bytes_lib.TextStream(self.token_bytes())
      return stream.finish(ids).text
    text = self.tokenizer.decode(
      ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text

  def token_bytes(self) -> tuple[bytes, ...]:
    """The bytes of each token, see `models/text/token_bytes`."""
    return token_bytes_lib.token_bytes(
      self.tokenizer, self.target.spec.vocab_size
    )

  @property
  def sections(self) -> sections_lib.Sections:
    """The sections of an answer, see `models/text/chat_template`."""
    return chat_template.sections_of(self.tokenizer)

  def section_after(self, prompt: chat_template.Prompt) -> int:
    """The section in which the text after a prompt begins.

    Raises:
      ValueError: a conversation cannot be used.
    """
    plain = len(self.sections) - 1
    if not (plain and chat_template.is_conversation(prompt)):
      return plain
    head = chat_template.answer_head(self.tokenizer, prompt)
    try:
      stream = self.text_stream((), 0)
    except ValueError:  # There are no bytes in which to look for marks.
      return plain
    stream.feed(self.tokenizer(head, add_special_tokens=False)['input_ids'])
    return stream.section

  def text_stream(
    self, stops: Sequence[str], section: int = -1
  ) -> token_bytes_lib.TextStream:
    """A stream of what follows a prompt, from the section where it begins.

    By default it is the last of `sections`, for a text that is not an answer.

    Raises:
      ValueError: the tokens of the tokenizer have no bytes of their own.
    """
    pieces, tokenizer = self.token_bytes(), self.tokenizer
    special = token_bytes_lib.special_tokens(tokenizer, len(pieces))
    return token_bytes_lib.TextStream(
      pieces, stops, special, self.sections, section
    )

  def said(
    self, ids: Sequence[int], stops: Sequence[str] = (), section: int = -1
  ) -> token_bytes_lib.Said:
    """The text of a row, and its reasoning; see `text_stream`."""
    try:
      stream = self.text_stream(stops, section)
    except ValueError:
      if stops:
        raise
      return token_bytes_lib.Said(self.decode(list(ids)))
    return stream.finish(ids)

  def pieces(self, ids: Sequence[int], section: int = -1) -> list[str]:
    """The part of `said` that each token adds, to reasoning or to text.

    A character that spans several tokens is in the piece of the last of them.
    Without bytes of its own each token is decoded alone.
    """
    try:
      stream = self.text_stream((), section)
    except ValueError:
      return [self.decode([token]) for token in ids]
    pieces = [''.join(reversed(stream.feed([token]))) for token in ids]
    rest = ''.join(reversed(stream.flush()))
    return [*pieces[:-1], pieces[-1] + rest] if pieces else []

  def token_text(self, token: int) -> str:
    """The text of a single token; U+FFFD for a part of a character."""
    try:
      return self.token_bytes()[token].decode('utf-8', 'replace')
    except ValueError:
      return self.decode([token])


def load_weights(sources: sources_lib.Sources) -> Pair:
  """Loads the weights of opened models.

  The draft gets the vocabulary of the target.

  Raises:
    ValueError: a tokenizer or a token that ends a text cannot be used, the
      tokenizers share too little, the vocabularies of one tokenizer differ by
      more than padding, or a tensor is unknown, missing, left over or
      misshapen.
  """
  draft, head, placement = None, None, sources.placement
  tokens = sources.tokenizer, sources.eos_ids
  draft_placement = dataclasses.replace(
    sources.draft_placement, outputs=sources.draft_outputs
  )
  module, _ = hub.load_network(sources.target, placement)
  if sources.draft is not None:
    draft_module, _ = hub.load_network(sources.draft, draft_placement)
    draft = _with_target_tokens(draft_module, sources)
  target = adapter.as_model(module, placement.layout, sources.hidden)
  if draft is not None and sources.draft is sources.target:
    draft = draft.replace(params=_shared(draft.params, target.params))
  if draft and draft.spec.weight_bytes > target.spec.weight_bytes:
    logging.warning(
      'a forward of the draft %s reads more than one of the target %s, so'
      ' drafting hardly pays; swap them, or choose a smaller draft',
      sources.choice.draft,
      sources.choice.target,
    )
  if sources.head is not None:
    head = heads.load(sources.head, target, draft_placement)
  row_cost = build.row_cost() if placement.packed else 0.0
  return Pair(target, draft, *tokens, placement.layout, head, row_cost)


def _shared(params: Any, of_target: Any) -> Any:
  """The parameters, with the arrays of the target where they are the same."""
  known = dict(jax.tree_util.tree_leaves_with_path(of_target))

  def share(path: Any, array: jax.Array) -> jax.Array:
    other: Any = known.get(path, array)
    kind = lambda array: (array.shape, array.dtype, array.sharding)
    same = kind(other) == kind(array) and bool(jnp.array_equal(other, array))
    return other if same else array

  return jax.tree_util.tree_map_with_path(share, params)


def _with_target_tokens(
  module: adapter.Module, sources: sources_lib.Sources
) -> model_lib.LanguageModel:
  """A draft that reads and proposes tokens of the target."""
  shared, layout = sources.shared, sources.draft_placement.layout
  draft = adapter.as_model(module, layout)
  place = lambda arrays: jax.device_put(arrays, layout.everywhere)
  if shared is None:
    model = adapter.with_vocab_size(draft, sources.target.config.vocab_size)
  else:
    tables = place((shared.same, shared.parts))
    model = other_tokens.with_other_tokens(draft, *tables)
  proposed = sources.proposed
  if proposed is None:
    return model
  return model.replace(proposed=place(proposed))


def load_pair(choice: choice_lib.ModelChoice) -> Pair:
  """Loads a target, its tokenizer, and a draft or head if one is chosen.

  Raises:
    ValueError: a model or the mesh cannot be used, or the tokenizers share too
      little, see `models/text/vocabulary`. Vocabularies of one tokenizer may
      differ by padding.
  """
  return load_weights(sources_lib.open_sources(choice))


def drawn_pair(choice: choice_lib.ModelChoice) -> Pair:
  """A pair of random weights; it needs only the `config.json` of each model.

  It has no tokenizer, and only a block drafter or an MTP layer can draft, the
  latter by `head=own`. Its forwards take as long as with trained weights.

  Raises:
    ValueError: a shape cannot be read, or the head is of another kind.
  """
  checkpoint, head = hub.locate(choice.target), None
  stored: heads.Stored | None = None
  if checkpoint.path.is_file():
    raise ValueError(
      f'target={choice.target} is a file, but random weights take their shape'
      ' from the config.json of a folder; give a folder, or load the weights of'
      ' the file'
    )
  packed = choice.cpu_kernels and build.is_available()
  if choice.head == choice_lib.OWN:
    stored = mtp.StoredMTP(checkpoint.path, checkpoint.config, drawn=True)
  elif choice.head not in (None, dtypes.AUTO):
    stored = block_drafters.StoredBlockDrafter(
      hub.locate(choice.head).path, checkpoint.config, drawn=True
    )
  placement = checkpoint_lib.placement_of(choice.dtype, packed=packed)
  module, _ = hub.load_network(checkpoint, placement, drawn=True)
  hidden = () if stored is None else stored.config.reads
  target = adapter.as_model(module, hidden=hidden)
  if stored is not None:
    size = choice.draft_vocab_size
    draft_placement = checkpoint_lib.placement_of(
      choice.draft_dtype or choice.dtype,
      packed=packed,
      outputs=None if size is None else np.arange(size),
    )
    head = heads.load(stored, target, draft_placement)
  tokenizer: Any = None
  return Pair(target, None, tokenizer, (), head=head)


def vocabulary_digest(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
  """A digest of a tokenizer's ids and tokens, 32 hex digits."""
  vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
  return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
