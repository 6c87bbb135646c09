"""The opened files of a choice of models, before weights are read.

`open_sources` finds the files, and `pair.load_weights` reads the weights.
"""

import dataclasses
import functools

from absl import logging
import numpy as np
import transformers

from specdec import arguments as arguments_lib
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import heads
from specdec.models.checkpoints.heads import mtp
from specdec.models.nn import dtypes
from specdec.models.nn import sharding as sharding_lib
from specdec.models.nn.cpu import build
from specdec.models.text import choice as choice_lib
from specdec.models.text import vocabulary as vocabulary_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
  """Models whose files were found and whose shapes are known.

  Attributes:
    choice: what was chosen.
    target: the checkpoint of the target.
    draft: the checkpoint of the draft model, if there is one.
    head: the files of the drafting head, if there is one.
    placement: how the target is held.
    draft_placement: how the draft or the head is held, if there is one.
  """

  choice: choice_lib.ModelChoice
  target: checkpoint_lib.Checkpoint
  draft: checkpoint_lib.Checkpoint | None
  head: heads.Stored | None
  placement: checkpoint_lib.Placement
  draft_placement: checkpoint_lib.Placement

  @property
  def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
    """The target's tokenizer; ValueError if it has none that can be used."""
    if self.target.tokenizer is None:
      raise ValueError(
        f'{self.target.path} has no tokenizer; copy the files of the tokenizer'
        ' there'
      )
    return self.target.tokenizer

  @functools.cached_property
  def eos_ids(self) -> tuple[int, ...]:
    """The tokens that end a text; ValueError if one cannot be used."""
    if self.choice.eos_ids is None:
      return self.target.eos_ids
    size = len(self.tokenizer)
    ids = vocabulary_lib.ids_of_eos(self.choice.eos_ids, self.tokenizer, size)
    vocab_size = self.target.config.vocab_size
    return tuple(arguments_lib.to_ids('eos_ids', ids, vocab_size))

  @functools.cached_property
  def shared(self) -> vocabulary_lib.SharedTokens | None:
    """The tokens that target and draft share, if their tokenizers differ.

    Raises:
      ValueError: see `vocabulary.of_checkpoints`.
    """
    if self.draft is None:
      return None
    return vocabulary_lib.of_checkpoints(self.target, self.draft)

  @functools.cached_property
  def draft_outputs(self) -> np.ndarray | None:
    """`[N]` int, the tokens whose logits the draft or head computes; None: all.

    They are tokens of the draft's own vocabulary.
    """
    draft = self.draft
    tokenizer: transformers.PreTrainedTokenizerBase | None = self.tokenizer
    if draft is None and self.head is None:
      return None
    if draft is not None and self.shared is not None:
      tokenizer = draft.tokenizer
    config = (draft or self.target).config
    return vocabulary_lib.tokens_of(
      self.choice.draft_vocab, tokenizer, config.vocab_size
    )

  @property
  def proposed(self) -> np.ndarray | None:
    """`[N]` int32, ascending: the target's tokens that the draft can propose.

    None: all.
    """
    outputs, shared = self.draft_outputs, self.shared
    if outputs is None and shared is None:
      return None
    same = np.arange(self.target.config.vocab_size)
    same = same if shared is None else shared.same
    has_output = same >= 0 if outputs is None else np.isin(same, outputs)
    return np.flatnonzero(has_output).astype(np.int32)

  @property
  def hidden(self) -> tuple[int, ...]:
    """The hidden states of the target that the head reads."""
    return tuple(sorted({*self.head.config.reads})) if self.head else ()

  @property
  def is_exact(self) -> bool:
    """Whether drafted tokens always equal the tokens of plain decoding."""
    form = self.placement.form
    has_kernels = self.placement.packed and form.has_kernels
    return has_kernels or form.name == 'float32'


def open_sources(choice: choice_lib.ModelChoice) -> Sources:
  """Finds the files of the chosen models, and reads the models' shapes.

  Raises:
    ValueError: a model cannot be found, its shape or format is not supported,
      the head is for another target, or the mesh cannot be used.
  """
  target = hub.locate(choice.target, revision=choice.revision)
  config, draft = target.config, None
  head: heads.Stored | None = None
  if choice.head == choice_lib.OWN:
    head = heads.own(target)
  elif choice.head == dtypes.AUTO:
    try:
      head = mtp.find(target.path, config)
      _ = head and head.config
    except ValueError as error:
      logging.warning('the MTP layer is not used (head=none): %s', error)
      head = None
  elif choice.head is not None:
    head = heads.locate(choice.head, config)
  elif choice.draft == choice_lib.SELF:
    draft = target
  elif choice.draft is not None:
    draft = hub.locate(hub.draft_name(choice.draft))
    config = draft.config
  layout = sharding_lib.make_layout(choice.mesh)
  packed = choice.cpu_kernels and build.is_available()
  if packed and layout.num_devices > 1:
    packed = False
    message = 'cpu_kernels need one device; with %d devices XLA computes'
    logging.log_first_n(logging.WARNING, message, 1, layout.num_devices)
  form = checkpoint_lib.resolve_dtype(choice.dtype, target, packed=packed)
  draft_form, drafting = form, head.stored if head else draft
  if drafting is not None:
    draft_form = checkpoint_lib.resolve_draft_dtype(
      choice.draft_dtype,
      drafting,
      target=form,
      packed=packed,
      is_self=draft is target,
    )
  if draft is target and draft_form == form:
    raise ValueError(
      f'draft={choice.draft} in {form.name}, the format of the target, costs'
      ' what the target does; choose a draft_dtype of fewer bits, or a smaller'
      ' draft'
    )
  draft_layout = sharding_lib.draft_layout(
    layout,
    'replicated' if head else choice.draft_mesh,
    functools.partial(hub.layer_bytes, config, draft_form),
  )
  return Sources(
    choice=choice,
    target=target,
    draft=draft,
    head=head,
    placement=checkpoint_lib.Placement(form, packed, layout),
    draft_placement=checkpoint_lib.Placement(draft_form, packed, draft_layout),
  )
