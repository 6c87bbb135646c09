"""A target, its draft model and their tokenizer, from checkpoints."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
from typing import Any

from absl import logging
import jax
from jax.sharding import Mesh
import transformers

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import heads
from models.checkpoints import hub
from models.nn import adapter
from models.nn import dtypes
from models.nn import other_tokens
from models.nn import sharding as sharding_lib
from models.nn.cpu import build
from models.text import chat_template
from models.text import draft_vocabulary
from models.text import ends as ends_lib
from models.text import shared_tokens
from models.text import token_bytes as token_bytes_lib
from specdec import checks as checks_lib
from specdec import model as model_lib
from specdec.draft import head as head_lib


@dataclasses.dataclass(frozen=True)
class ModelChoice:
  """The models of a decode, and how they are loaded.

  Attributes:
    target: `demo` (embedded), a folder, a GGUF file or the id of a model on the
      Hugging Face hub.
    draft: the draft model, named in the same way, except that `demo` is the
      embedded draft; None for none.
    revision: of the target, on the hub.
    dtype: of the target: float32, bfloat16, float16, int8, int4 or stored (as a
      GGUF file has it); auto: stored for such files where `cpu_kernels` are
      used, otherwise the 16-bit type of the checkpoint where this platform
      computes in it natively, else float32. In float32 drafted and plain tokens
      are equal, and with `cpu_kernels` in every dtype but float16; else they
      may differ in 16 bits where two logits are as close as rounding
      (docs/cpu.md).
    draft_dtype: of the draft; None: as the target, but where the kernels for
      CPU are used four bits beside bfloat16 and fewer bits, see
      `models.checkpoints.checkpoint.resolve_draft_dtype`.
    draft_vocab: how many of its tokens the draft computes and proposes, or
      which, see `models.text.draft_vocabulary`. None: all.
    cpu_kernels: whether the kernels of `models.nn.cpu` are used on CPU, if they
      can be compiled and there is one device.
    mesh: several devices, as a mesh with the axes `data` (rows) and `model`
      (weights) or as their sizes, {'data': 2, 'model': 4}, whose product is the
      number of devices. None: the default device.
    draft_mesh: `replicated`: every device has the whole draft; `sharded`: it is
      divided as the target is; `auto`: what should be faster by its size.
    eos_ids: tokens that end a text unless a call says otherwise, as ids or as
      texts of one token each. None: as the target's files say; `()`: none.
    head: a drafting head in place of a draft: `demo`, a folder, a GGUF file or
      the id of one on the hub. `draft_dtype` is that of its matrices, and every
      device has all of them.
  """

  target: str = 'demo'
  draft: str | None = 'demo'
  _: dataclasses.KW_ONLY
  revision: str | None = None
  dtype: jax.typing.DTypeLike = dtypes.AUTO
  draft_dtype: jax.typing.DTypeLike | None = None
  draft_vocab: int | Sequence[int] | None = None
  cpu_kernels: bool = True
  mesh: Mesh | Mapping[str, int] | None = None
  draft_mesh: str = 'auto'
  eos_ids: ends_lib.EosIds | None = None
  head: str | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
  """A target, what drafts for it, and the target's tokenizer.

  `eos_ids` are the tokens that end a text, `layout` is that of the target. It
  has a draft model, a drafting head or neither.
  """

  target: model_lib.LanguageModel
  draft: model_lib.LanguageModel | None
  tokenizer: transformers.PreTrainedTokenizerBase
  eos_ids: tuple[int, ...]
  layout: sharding_lib.Layout = sharding_lib.Layout()
  head: head_lib.Head | None = None

  @property
  def drafting_model(self) -> model_lib.Network | None:
    """The draft or the head, if there is one."""
    return self.draft if self.head is None else self.head

  def encode(self, text: str) -> list[int]:
    """Text to token ids; ValueError if the text is not valid Unicode."""
    checks_lib.check_text('the prompt', text)
    # `verbose=False`: a text that is too long is refused when it is decoded.
    return self.tokenizer(text, verbose=False)['input_ids']

  def ids_of(self, prompts: Sequence[chat_template.Prompt]) -> list[Any]:
    """The token ids of texts and conversations; ids stay as they are.

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
      return token_bytes_lib.text_of(self.token_bytes(), ids)
    text = self.tokenizer.decode(
      ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text

  def token_bytes(self) -> tuple[bytes, ...]:
    """The bytes of each token, see `models.text.token_bytes`."""
    return token_bytes_lib.token_bytes(
      self.tokenizer, self.target.spec.vocab_size
    )

  def pieces(self, ids: list[int]) -> list[str]:
    """The text of each token; joined they are `token_bytes.text_of`.

    A character that spans several tokens is the text of the last of them. For a
    tokenizer whose tokens have no bytes of their own the texts come from
    `decode`.
    """
    try:
      stream = token_bytes_lib.TextStream(self.token_bytes())
    except ValueError:
      return self._decoded_pieces(ids)
    pieces = [stream.feed([token]) for token in ids]
    return [*pieces[:-1], pieces[-1] + stream.flush()] if pieces else []

  def token_text(self, token: int) -> str:
    """The text of a single token; U+FFFD for a part of a character."""
    try:
      return self.token_bytes()[token].decode('utf-8', 'replace')
    except ValueError:
      return self.decode([token])

  def _decoded_pieces(self, ids: list[int]) -> list[str]:
    pieces, done = [], 0
    for index in range(len(ids)):
      text = self.decode(ids[done : index + 1])
      complete = index + 1 == len(ids) or not text.endswith('\ufffd')
      pieces.append(text if complete else '')
      done = index + 1 if complete else done
    return pieces


def find_checkpoints(
  choice: ModelChoice,
) -> tuple[checkpoint_lib.Checkpoint, checkpoint_lib.Checkpoint | None]:
  """Locates a target and a draft, and reads their shapes and tokenizers.

  Raises:
    ValueError: a model cannot be located, its shape is not supported, or its
      tokenizer cannot be loaded.
  """
  found = _find(choice.target, choice.revision)
  if found.tokenizer is None:
    raise ValueError(
      f'{found.path} has no tokenizer; copy that of the model there'
    )
  if choice.draft is None or choice.head is not None:
    return found, None
  return found, _find(hub.draft_name(choice.draft))


def _find(name: str, revision: str | None = None) -> checkpoint_lib.Checkpoint:
  found = hub.locate(name, revision=revision)
  # The shape first: it names a wrong key; the tokenizer would not.
  _ = found.config, found.tokenizer
  return found


def _check_padding(
  target: int,
  draft: int,
  num_tokens: int,
  checkpoint: checkpoint_lib.Checkpoint,
) -> None:
  """Refuses vocabulary sizes that differ by more than padding."""
  padded = checkpoint.tokenizer is not None and num_tokens <= min(target, draft)
  if target != draft and not padded:
    raise ValueError(
      f'the target has a vocabulary of {target} tokens, the draft'
      f' {checkpoint.path} of {draft}, and nothing shows that the difference'
      f' is padding (the tokenizer of the target has {num_tokens} tokens);'
      ' choose a draft with the same tokenizer, and its tokenizer in the folder'
    )


def _load_draft(
  draft: checkpoint_lib.Checkpoint,
  shared: shared_tokens.SharedTokens | None,
  target: checkpoint_lib.Checkpoint,
  choice: ModelChoice,
  *,
  dtype: str,
  packed: bool,
  layout: sharding_lib.Layout,
) -> model_lib.LanguageModel:
  """Loads a draft in the vocabulary of a target of this dtype and layout.

  `shared` are the tokens of both, if they have different tokenizers.
  """
  size, tokenizer = target.config.vocab_size, target.tokenizer
  assert tokenizer is not None
  if shared is None:
    _check_padding(size, draft.config.vocab_size, len(tokenizer), draft)
  own_dtype = checkpoint_lib.resolve_draft_dtype(
    choice.draft_dtype, draft, target_dtype=dtype, packed=packed
  )
  layer_bytes = hub.layer_bytes(draft.config, own_dtype)
  own_layout = sharding_lib.draft_layout(layout, choice.draft_mesh, layer_bytes)
  outputs = draft_vocabulary.tokens_of(
    choice.draft_vocab,
    draft.tokenizer if shared else tokenizer,
    draft.config.vocab_size,
  )
  module = hub.read_module(
    draft, dtype=own_dtype, packed=packed, layout=own_layout, outputs=outputs
  )
  own = adapter.as_model(module, own_layout)
  if shared is None:
    return adapter.with_vocab_size(own, size)
  tables = jax.device_put((shared.same, shared.parts), own_layout.everywhere)
  return other_tokens.with_other_tokens(own, *tables)


def load_checkpoints(
  target: checkpoint_lib.Checkpoint,
  draft: checkpoint_lib.Checkpoint | None,
  choice: ModelChoice,
) -> Pair:
  """Loads the weights of models that were found; see `load_pair`."""
  layout = sharding_lib.make_layout(choice.mesh)
  packed = choice.cpu_kernels and build.is_available()
  if packed and layout.num_devices > 1:
    packed = False
    logging.warning(
      'cpu_kernels are for one device; on %d XLA computes',
      layout.num_devices,
    )
  dtype = checkpoint_lib.resolve_dtype(choice.dtype, target, packed=packed)
  tokenizer, size = target.tokenizer, target.config.vocab_size
  assert tokenizer is not None
  shared = None
  if draft is not None:
    shared = shared_tokens.of_checkpoints(target, draft)
  if choice.eos_ids is None:
    ends = target.eos_ids
  else:
    stated = ends_lib.eos_ids_of(choice.eos_ids, tokenizer, len(tokenizer))
    ends = tuple(checks_lib.to_ids('eos_ids', stated, size))
  found_head, hidden = None, tuple[int, ...]()
  if choice.head is not None:
    found_head = heads.locate(choice.head, target.config)
    hidden = tuple(sorted({*found_head.config.reads}))
  module = hub.read_module(target, dtype=dtype, packed=packed, layout=layout)
  model = adapter.as_model(module, layout, hidden)
  draft_model = head = None
  if found_head is not None:
    head = heads.load(
      found_head,
      model,
      dtype=checkpoint_lib.resolve_draft_dtype(
        choice.draft_dtype, found_head.stored, target_dtype=dtype, packed=packed
      ),
      packed=packed,
      layout=dataclasses.replace(layout, divides_weights=False),
    )
  if draft is not None:
    draft_model = _load_draft(
      *(draft, shared, target, choice),
      dtype=dtype,
      packed=packed,
      layout=layout,
    )
  return Pair(model, draft_model, tokenizer, ends, layout, head)


def load_pair(choice: ModelChoice) -> Pair:
  """Loads a target, its tokenizer and a draft, if one is chosen.

  Raises:
    ValueError: a folder or the mesh cannot be used, or the tokenizers share too
      little, see `models.text.shared_tokens`. Vocabularies of one tokenizer may
      differ by padding. Either way the draft gets the target's.
  """
  return load_checkpoints(*find_checkpoints(choice), choice)


def vocabulary_digest(tokenizer: Any) -> str:
  """A digest of a tokenizer's ids and tokens, 32 hex digits."""
  vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
  return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
