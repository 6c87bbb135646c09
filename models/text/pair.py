"""A target, its draft model and their tokenizer, from checkpoints."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

from absl import logging
import jax
from jax.sharding import Mesh
import transformers

from models.checkpoints import gguf
from models.checkpoints import gguf_tokenizer
from models.checkpoints import hub
from models.nn.adapter import as_model
from models.nn.adapter import with_vocab_size
from models.nn.cpu import build
from models.nn.dtypes import AUTO
from models.nn.sharding import draft_layout
from models.nn.sharding import Layout
from models.nn.sharding import make_layout
from models.text.chat_template import conversation_ids
from models.text.chat_template import is_conversation
from models.text.chat_template import Prompt
from models.text.ends import eos_ids_of
from models.text.ends import EosIds
from models.text.token_bytes import is_byte_level
from models.text.token_bytes import text_of
from models.text.token_bytes import TextStream
from models.text.token_bytes import token_bytes
from specdec import checks
from specdec.model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A model folder that was located, with its tokenizer if it has one."""

  folder: pathlib.Path  # Has a `config.json`; or a GGUF file.
  tokenizer: transformers.PreTrainedTokenizerBase | None


@dataclasses.dataclass(frozen=True)
class Pair:
  """A target, a draft model that drafts for it, and the tokenizer of both.

  `eos_ids` are the tokens that end a text, `layout` is that of the target.
  """

  target: LanguageModel
  draft: LanguageModel | None
  tokenizer: transformers.PreTrainedTokenizerBase
  eos_ids: tuple[int, ...]
  layout: Layout = Layout()

  def encode(self, text: str) -> list[int]:
    """Text to token ids; ValueError if the text is not valid Unicode."""
    checks.check_text('the prompt', text)
    # `verbose=False`: a text that is too long is refused when it is decoded.
    return self.tokenizer(text, verbose=False)['input_ids']

  def ids_of(self, prompts: Sequence[Prompt]) -> list[Any]:
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
      elif is_conversation(prompt):
        ids.append(conversation_ids(self.tokenizer, prompt))
      else:
        ids.append(prompt)
    return ids

  def decode(self, ids: list[int]) -> str:
    """Token ids to text, without special tokens."""
    if is_byte_level(self.tokenizer):  # Added tokens would be read as bytes.
      return text_of(self.token_bytes(), ids)
    text = self.tokenizer.decode(
      ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text

  def token_bytes(self) -> tuple[bytes, ...]:
    """The bytes of each token, see `models.text.token_bytes`."""
    return token_bytes(self.tokenizer, self.target.spec.vocab_size)

  def pieces(self, ids: list[int]) -> list[str]:
    """The text of each token; joined they are `token_bytes.text_of`.

    A character that spans several tokens is the text of the last of them. For a
    tokenizer whose tokens have no bytes of their own the texts come from
    `decode`.
    """
    try:
      stream = TextStream(self.token_bytes())
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
  target: str, draft: str | None, *, revision: str | None = None
) -> tuple[Checkpoint, Checkpoint | None]:
  """Locates a target and a draft, see `load_pair`, and loads their tokenizers.

  Raises:
    ValueError: a model cannot be located, or its tokenizer cannot be loaded.
  """
  folder = hub.locate(target, revision=revision)
  if folder.is_dir() and not (folder / 'config.json').exists():
    raise ValueError(f'{folder} is no model folder: it has no config.json')
  hub.config_of(folder)  # It names a wrong key; the tokenizer would not.
  found = Checkpoint(folder, hub.load_tokenizer(folder))
  if found.tokenizer is None:
    raise ValueError(f'{folder} has no tokenizer; copy that of the model there')
  if draft is None:
    return found, None
  folder = hub.locate(hub.draft_name(draft))
  hub.config_of(folder)
  return found, Checkpoint(folder, hub.load_tokenizer(folder))


def _eos_ids(
  folder: pathlib.Path, tokenizer, vocab_size: int
) -> tuple[int, ...]:
  """The EOS ids of generation_config.json, config.json or the tokenizer.

  Ids outside the vocabulary are skipped: published configs of small
  vocabularies often keep GPT-2's 50256.
  """
  stated: list[Any] = []
  if gguf.is_gguf(folder):
    stated.append(gguf_tokenizer.eos_ids(folder))
  for name in ('generation_config.json', 'config.json'):
    path = folder / name
    if path.exists():
      try:
        stated.append(json.loads(path.read_text('utf-8')).get('eos_token_id'))
      except (AttributeError, ValueError) as error:
        raise ValueError(f'{path} is not a JSON object: {error}') from error
  for eos in (*stated, tokenizer.eos_token_id):
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token) is not int for token in ids):
      raise ValueError(f'{folder}: eos_token_id={eos!r} is no token id')
    usable = tuple(token for token in ids if 0 <= token < vocab_size)
    if usable:
      return usable
  return ()


def _check_same_tokens(target: Checkpoint, draft: Checkpoint) -> None:
  """Refuses a draft whose token ids have other meanings."""
  if target.tokenizer is None or draft.tokenizer is None:
    return  # Then only the sizes can be compared, see `_check_padding`.
  ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
  if ours == theirs:
    return
  where = lambda ids, token: ids.get(token, 'none')
  changed = [token for token in ours if theirs.get(token) != ours[token]]
  more = [token for token in theirs if token not in ours]
  counts = {
    "of the target's tokens": len(changed),
    'tokens that only the draft has': len(more),
  }
  differ = ' and '.join(f'{n} {what}' for what, n in counts.items() if n)
  ids = ours if changed else theirs
  first = min(changed or more, key=lambda token: ids[token])
  raise ValueError(
    f'the tokenizers of the target {target.folder} ({len(ours)} tokens) and the'
    f' draft {draft.folder} ({len(theirs)} tokens) differ in {differ}, such as'
    f' {first!r}, whose ids are {where(ours, first)} and'
    f' {where(theirs, first)}; choose a draft with the same tokenizer'
  )


def _check_padding(
  target: int, draft: int, num_tokens: int, checkpoint: Checkpoint
) -> None:
  """Refuses vocabulary sizes that differ by more than padding."""
  padded = checkpoint.tokenizer is not None and num_tokens <= min(target, draft)
  if target != draft and not padded:
    raise ValueError(
      f'the target has a vocabulary of {target} tokens, the draft'
      f' {checkpoint.folder} of {draft}, and nothing shows that the difference'
      f' is padding (the tokenizer of the target has {num_tokens} tokens);'
      ' choose a draft with the same tokenizer, and its tokenizer in the folder'
    )


def load_checkpoints(
  target: Checkpoint,
  draft: Checkpoint | None,
  *,
  dtype: jax.typing.DTypeLike = AUTO,
  draft_dtype: jax.typing.DTypeLike | None = None,
  cpu_kernels: bool = True,
  mesh: Mesh | Mapping[str, int] | None = None,
  draft_mesh: str = 'auto',
  eos_ids: EosIds | None = None,
) -> Pair:
  """Loads the weights of a target and a draft; see `load_pair`."""
  layout = make_layout(mesh)
  packed = cpu_kernels and build.is_available()
  if packed and layout.num_devices > 1:
    packed = False
    logging.warning(
      'cpu_kernels are for one device; on %d XLA computes',
      layout.num_devices,
    )
  dtype = hub.resolve_dtype(dtype, target.folder)
  tokenizer = target.tokenizer
  assert tokenizer is not None
  if draft is not None:
    _check_same_tokens(target, draft)
  if eos_ids is not None:  # Refused before the weights are read.
    eos_ids = eos_ids_of(eos_ids, tokenizer, len(tokenizer))
  load = functools.partial(hub.load_module, packed=packed)
  model = as_model(load(target.folder, dtype=dtype, layout=layout), layout)
  size = model.spec.vocab_size
  draft_model = None
  if draft is not None:
    own_dtype = hub.resolve_draft_dtype(
      draft_dtype, draft.folder, target_dtype=dtype, packed=packed
    )
    layer_bytes = hub.layer_bytes(hub.config_of(draft.folder), own_dtype)
    own_layout = draft_layout(layout, draft_mesh, layer_bytes)
    draft_model = as_model(
      load(draft.folder, dtype=own_dtype, layout=own_layout), own_layout
    )
    own_size = draft_model.spec.vocab_size
    _check_padding(size, own_size, len(tokenizer), draft)
    draft_model = with_vocab_size(draft_model, size)
  ends = _eos_ids(target.folder, tokenizer, size)
  if eos_ids is not None:
    ends = tuple(checks.to_ids('eos_ids', eos_ids, size))
  return Pair(model, draft_model, tokenizer, ends, layout)


def load_pair(
  target: str,
  draft: str | None,
  *,
  dtype: jax.typing.DTypeLike = AUTO,
  draft_dtype: jax.typing.DTypeLike | None = None,
  revision: str | None = None,
  cpu_kernels: bool = True,
  mesh: Mesh | Mapping[str, int] | None = None,
  draft_mesh: str = 'auto',
  eos_ids: EosIds | None = None,
) -> Pair:
  """Loads a target, its tokenizer and a draft, if one is given.

  Args:
    target: `demo`, a folder, a GGUF file or a hub id, see `hub.locate`.
    draft: a name as for the target, except that `demo` is the embedded draft;
      None for no draft.
    dtype: of the target's matrices: float32, bfloat16, float16 or int8, see
      `hub.load_module`, or auto, see `hub.resolve_dtype`.
    draft_dtype: of the draft's matrices; None: see
      `hub.resolve_draft_dtype`.
    revision: of the target, on the hub.
    cpu_kernels: whether the kernels of `models.nn.cpu` are used on CPU, if they
      can be compiled and there is one device.
    mesh: the devices, see `models.nn.sharding.make_mesh`; None for one.
    draft_mesh: see `models.nn.sharding.draft_layout`.
    eos_ids: see `models.load`.

  Raises:
    ValueError: a folder or the mesh cannot be used, or the tokenizers differ.
      Vocabularies of one tokenizer may differ by padding; the draft then gets
      the target's.
  """
  found = find_checkpoints(target, draft, revision=revision)
  return load_checkpoints(
    *found,
    dtype=dtype,
    draft_dtype=draft_dtype,
    cpu_kernels=cpu_kernels,
    mesh=mesh,
    draft_mesh=draft_mesh,
    eos_ids=eos_ids,
  )


def vocabulary_digest(tokenizer: Any) -> str:
  """A digest of a tokenizer's ids and tokens, 32 hex digits."""
  vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
  return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
