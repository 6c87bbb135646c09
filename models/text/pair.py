"""A target and its draft, ready to decode text."""

import dataclasses
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import transformers

from models.checkpoints import hub
from models.nn.adapter import as_model
from models.nn.adapter import with_vocab_size
from models.text.token_bytes import TextStream
from models.text.token_bytes import token_bytes
from specdec.model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Pair:
  """What it takes to go from text to text.

  Attributes:
    target: the model whose output is kept.
    draft: drafts for it, or None.
    tokenizer: of both.
    eos_ids: tokens that end a text.
  """

  target: LanguageModel
  draft: LanguageModel | None
  tokenizer: transformers.PreTrainedTokenizerBase
  eos_ids: tuple[int, ...]

  def encode(self, text: str) -> list[int]:
    """Text to token ids."""
    # What is too long for a model is refused when it is decoded.
    return self.tokenizer(text, verbose=False)['input_ids']

  def decode(self, ids: list[int]) -> str:
    """Token ids to text, as it is; special tokens are left out."""
    text = self.tokenizer.decode(
      ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text

  def token_bytes(self) -> tuple[bytes, ...]:
    """What each token adds to a text, see `models.token_bytes`."""
    return token_bytes(self.tokenizer, self.target.spec.vocab_size)

  def pieces(self, ids: list[int]) -> list[str]:
    """The text of each token; together they are `token_bytes.text_of`.

    A token that ends within a character has none, and the one that completes it
    has all of it. If the tokenizer cannot say which bytes its tokens have, they
    are `decode` together, as far as it decodes tokens one by one.
    """
    try:
      stream = TextStream(self.token_bytes())
    except ValueError:
      return self._decoded_pieces(ids)
    pieces = [stream.feed([token]) for token in ids]
    return [*pieces[:-1], pieces[-1] + stream.flush()] if pieces else []

  def token_text(self, token: int) -> str:
    """Of one token alone; U+FFFD for what is part of a character."""
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


def load_tokenizer(
  folder: pathlib.Path,
) -> transformers.PreTrainedTokenizerBase:
  """That of a model.

  Raises:
    ValueError: there is none that can be used.
  """
  if not (folder / 'config.json').exists():
    raise ValueError(f'{folder} is no model folder: it has no config.json')
  if not hub.has_tokenizer(folder):
    raise ValueError(f'{folder} has no tokenizer; copy that of the model there')
  try:
    return transformers.AutoTokenizer.from_pretrained(folder)
  except (OSError, ValueError) as error:
    raise ValueError(f'{folder} has no usable tokenizer: {error}') from error


def _eos_ids(
  folder: pathlib.Path, tokenizer, vocab_size: int
) -> tuple[int, ...]:
  """From generation_config.json, else config.json, else the tokenizer.

  Ids outside the vocabulary are passed over: configs in the wild keep GPT-2's
  50256 with smaller vocabularies.
  """
  stated = []
  for name in ('generation_config.json', 'config.json'):
    path = folder / name
    if path.exists():
      try:
        stated.append(json.loads(path.read_text('utf-8')).get('eos_token_id'))
      except (AttributeError, ValueError) as error:
        raise ValueError(f'{path} is not a JSON object: {error}') from error
  for eos in (*stated, tokenizer.eos_token_id):
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    usable = tuple(token for token in ids if 0 <= token < vocab_size)
    if usable:
      return usable
  return ()


def _check_padding(target, draft, tokenizer, draft_folder):
  """Refuses vocabularies that differ by more than padding."""
  sizes = (target.spec.vocab_size, draft.spec.vocab_size)
  if sizes[0] == sizes[1]:
    return
  if not hub.has_tokenizer(draft_folder) or len(tokenizer) > min(sizes):
    raise ValueError(
      f'the target has a vocabulary of {sizes[0]} tokens, the draft'
      f' {draft_folder} of {sizes[1]}, and nothing says that the difference is'
      f' padding (the tokenizer of the target has {len(tokenizer)} tokens);'
      ' choose a draft with the same tokenizer, and its tokenizer in the folder'
    )


def _check_same_tokens(target_folder, draft_folder, tokenizer):
  """Refuses a draft whose token ids mean other text: it would never agree."""
  if not hub.has_tokenizer(draft_folder):
    return  # A bare draft; its vocabulary size is checked later.
  ours = tokenizer.get_vocab()
  theirs = load_tokenizer(draft_folder).get_vocab()
  if ours == theirs:
    return
  differing = sum(theirs.get(token) != index for token, index in ours.items())
  raise ValueError(
    f'the tokenizers of the target {target_folder} ({len(ours)} tokens) and'
    f' the draft {draft_folder} ({len(theirs)} tokens) differ in {differing}'
    " of the target's tokens; choose a draft with the same tokenizer"
  )


def load_pair(
  target: str,
  draft: str | None,
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  draft_dtype: jax.typing.DTypeLike | None = None,
  revision: str | None = None,
) -> Pair:
  """Loads a target, its tokenizer and perhaps a draft.

  Args:
    target: `demo`, a folder or a hub id, see `hub.locate`.
    draft: likewise, but `demo` is the embedded draft; or None.
    dtype: of the target's matrices: float32, bfloat16 or int8, see
      `hub.load_module`.
    draft_dtype: of the draft's; default: as the target.
    revision: of the target, on the hub.

  Returns:
    The pair.

  Raises:
    ValueError: a folder cannot be used, or the tokenizers differ. Vocabularies
      of one tokenizer may differ by padding; the draft then gets the target's.
  """
  folder = hub.locate(target, revision=revision)
  tokenizer = load_tokenizer(folder)
  draft_model = None
  target_model = as_model(hub.load_module(folder, dtype=dtype))
  if draft is not None:
    draft_folder = hub.locate(hub.draft_name(draft))
    _check_same_tokens(folder, draft_folder, tokenizer)
    draft_model = as_model(
      hub.load_module(draft_folder, dtype=draft_dtype or dtype)
    )
    _check_padding(target_model, draft_model, tokenizer, draft_folder)
    draft_model = with_vocab_size(draft_model, target_model.spec.vocab_size)
  return Pair(
    target=target_model,
    draft=draft_model,
    tokenizer=tokenizer,
    eos_ids=_eos_ids(folder, tokenizer, target_model.spec.vocab_size),
  )


def vocabulary_digest(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
  """Equal for tokenizers whose ids mean the same tokens, 32 hex digits."""
  vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
  return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
