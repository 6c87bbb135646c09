"""Text files as a corpus, and batches that are a function of the step."""

from collections.abc import Iterator
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import sysconfig

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec.models.lab.training import kept
from specdec.models.text import fields
from specdec.text import text_files

_SKIPPED_FOLDERS = frozenset({'site-packages', '__pycache__', '.git'})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """A set of text files, split into training and held-out files.

  The folder is searched recursively. Held-out files are chosen by a hash of
  their relative path, so that other files do not change the split.
  """

  folder: str = fields.described(
    '', 'folder of text; empty: the standard library', flag='corpus'
  )
  pattern: str = fields.described('*.py', 'pattern of file names to read')
  held_out_percent: int = 2

  def __post_init__(self):
    if not self.root.is_dir():
      raise ValueError(f'--corpus={self.folder} is not a folder')

  @property
  def root(self) -> pathlib.Path:
    """The folder that is searched."""
    return pathlib.Path(self.folder or sysconfig.get_path('stdlib'))

  def _is_held_out(self, path: pathlib.Path) -> bool:
    # A name may have bytes that are not UTF-8.
    name = os.fsencode(path.relative_to(self.root).as_posix())
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest, 'big') % 100 < self.held_out_percent

  def texts(self, *, held_out: bool) -> Iterator[str]:
    """Yields the UTF-8 files of one split in a fixed order.

    Raises:
      ValueError: there are none; says how many files a corpus should have.
    """
    num_read, num_files = 0, 0
    for path in sorted(self.root.rglob(self.pattern)):
      folders = path.relative_to(self.root).parts
      if _SKIPPED_FOLDERS.intersection(folders) or not path.is_file():
        continue
      num_files += 1
      if self._is_held_out(path) != held_out:
        continue
      try:
        text = text_files.read(path)
      except text_files.NotUtf8:
        continue
      num_read += 1
      yield text
    if num_read:
      return
    where = f'files that match {self.pattern} under {self.root}'
    if not num_files:
      raise ValueError(f'there are no {where}; see --corpus and --pattern')
    part = self.held_out_percent / 100
    split = 'held out to measure the loss' if held_out else 'to train on'
    others = 1 - part if held_out else part
    enough = math.ceil(math.log(0.05) / math.log(others))  # At 19 to 1.
    raise ValueError(
      f'none of the {num_files} {where} is {split}: a hash of its name holds'
      f' each file out with a chance of {part:.0%}, and only UTF-8 is read;'
      f' give {enough} files or more, such as one for each text'
    )

  def tokens(
    self, tokenizer: PreTrainedTokenizerBase, *, held_out: bool
  ) -> np.ndarray:
    """The tokens of one split, int32, with `<|endoftext|>` after each file."""
    if tokenizer.eos_token_id is None:
      raise ValueError('the tokenizer has no end-of-text token; set eos_token')
    tokens = []
    for text in self.texts(held_out=held_out):
      ids = tokenizer.backend_tokenizer.encode(text).ids
      tokens.append(np.array([*ids, tokenizer.eos_token_id], np.int32))
    return np.concatenate(tokens)

  def splits(
    self, workdir: pathlib.Path, tokenizer: PreTrainedTokenizerBase
  ) -> tuple[np.ndarray, np.ndarray]:
    """The training and the held-out tokens, kept in a workdir.

    Raises:
      ValueError: they had to be made again, and the files are others now.
    """
    tokens_of = {
      split: kept.array(
        workdir / f'{split}_tokens.npy',
        functools.partial(self.tokens, tokenizer, held_out=split != 'train'),
      )
      for split in ('train', 'held_out')
    }
    digest = lambda tokens: hashlib.blake2b(tokens, digest_size=8).hexdigest()
    record = {
      split: f'{len(tokens)} tokens, {digest(tokens)}'
      for split, tokens in tokens_of.items()
    }
    kept.write_once(workdir / 'tokens.json', record)
    return tokens_of['train'], tokens_of['held_out']


def training_batch(
  tokens: np.ndarray, *, step: int, seed: int, batch_size: int, length: int
) -> np.ndarray:
  """Random windows, `[batch_size, length + 1]` int32.

  They are a pure function of the arguments, so a resumed run sees the batches
  of an uninterrupted run.
  """
  if len(tokens) <= length:
    raise ValueError(
      f'the training split has {len(tokens)} tokens, fewer than one window of'
      f' {length + 1}; give more files, or a smaller --context'
    )
  rng = np.random.default_rng([seed, step])
  starts = rng.integers(0, len(tokens) - length, batch_size)
  return tokens[starts[:, None] + np.arange(length + 1)]


def held_out_batches(
  tokens: np.ndarray, *, batch_size: int, length: int, limit: int
) -> Iterator[np.ndarray]:
  """Yields at most `limit` batches `[batch_size, length + 1]` of windows."""
  windows = min((len(tokens) - 1) // length, limit * batch_size)
  if windows < 1:
    raise ValueError(
      f'the held-out split has {len(tokens)} tokens, fewer than one window'
      f' of {length + 1}; give more files, or a smaller --context'
    )
  starts = np.arange(windows) * length
  # The last batch wraps around: a shorter one would compile a second program.
  starts = np.resize(starts, -(-windows // batch_size) * batch_size)
  for chunk in starts.reshape(-1, batch_size):
    yield tokens[chunk[:, None] + np.arange(length + 1)]
