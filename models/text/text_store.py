"""A folder of earlier texts, from which drafts are taken.

Every file holds the token ids of some texts, is written whole and never
changed; so several processes may add texts at once. Many small files become one
now and then. The sorted index (`specdec.draft.stored`) is made from the texts
whenever they change, and is not stored: it cannot be out of date.
"""

from collections.abc import Sequence
import os
import pathlib
import time

from absl import logging
import jax
import numpy as np
import safetensors

import specdec
from specdec.draft import candidates
from specdec.draft import lookup
from specdec.text import whole_files

_FORMAT = 'specdec texts 1'

MOST_TOKENS = 1 << 20
"""Tokens of a store, at most; the oldest texts are left out."""
# Files of a store, at most, before they are joined.
_MOST_FILES = 64
# New tokens are indexed once they are this part of all: an eighth.
_FEW = 8


def _last(texts: Sequence[np.ndarray], most_tokens: int) -> list[np.ndarray]:
  """The last texts, together at most so long; the first one may be cut."""
  last = list[np.ndarray]()
  for text in reversed(texts):
    last.append(text[max(text.size - most_tokens, 0) :])
    most_tokens = max(most_tokens - text.size, 0)
  return [text for text in reversed(last) if text.size]


class TextStore:
  """Texts of one tokenizer in a folder, which is made when one is added.

  Args:
    folder: path.
    tokenizer_digest: see `pair.vocabulary_digest`.
    vocab_size: all ids are below it.
    most_tokens: the limit of the store.
    place: the devices of the index; None: the default device.

  Raises:
    ValueError: it is a file; or a file in it cannot be read, is of another
      tokenizer or has ids outside the vocabulary.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    tokenizer_digest: str,
    vocab_size: int,
    most_tokens: int = MOST_TOKENS,
    place: jax.sharding.Sharding | None = None,
  ):
    self._folder, self._digest = pathlib.Path(folder), tokenizer_digest
    self._most_tokens, self._place = most_tokens, place
    self._vocab_size = vocab_size
    if self._folder.exists() and not self._folder.is_dir():
      raise ValueError(f'store={folder} is a file; give a folder')
    self._files: dict[pathlib.Path, list[np.ndarray]] = {}
    self._build()

  def add(self, texts: Sequence[Sequence[int]]) -> None:
    """Adds texts of token ids, of many tokens the last ones.

    Raises:
      OSError: they cannot be written.
      ValueError: another process has added texts of another tokenizer.
    """
    # One token has nothing after it.
    arrays = [np.asarray(text, np.int32) for text in texts if len(text) > 1]
    if arrays:
      self._read()
      # Also where a clock of another machine was ahead.
      stamp = max(time.time_ns(), self._next_stamp())
      self._write(_last(arrays, self._most_tokens), stamp)
      is_large = self._num_tokens() > 2 * self._most_tokens
      if is_large or len(self._paths()) > _MOST_FILES:
        self._join()

  def add_decoded(self, texts: Sequence[Sequence[int]]) -> None:
    """Adds what was decoded; says so, once, if it cannot be added."""
    try:
      self.add(texts)
    except (OSError, ValueError) as error:
      message = 'store=%s: new texts are not added: %s'
      logging.log_first_n(logging.WARNING, message, 1, self._folder, error)

  def index(self) -> lookup.StoredTexts:
    """The index of the texts, also of those that other processes added.

    A few new ones wait for others: sorting a million tokens takes a second.
    """
    if self._read():
      changed = abs(self._num_tokens() - self._num_indexed)
      if changed * _FEW >= self._num_indexed:
        self._build()
    return self._index

  def _num_tokens(self) -> int:
    return sum(text.size for texts in self._files.values() for text in texts)

  def _build(self) -> None:
    index = lookup.StoredTexts.of_texts(self.newest())
    self._num_indexed = self._num_tokens()
    self._index = jax.device_put(index, self._place)

  def refreshed(self, drafter: specdec.Drafter) -> specdec.Drafter:
    """The drafter with this index in place of an older one."""
    try:
      index = self.index()
    except ValueError as error:
      message = 'store=%s: the index stays as it is: %s'
      logging.log_first_n(logging.WARNING, message, 1, self._folder, error)
      index = self._index

    def with_index(stage: specdec.Stage) -> specdec.Stage:
      scorer = stage.scorer
      if not isinstance(scorer, candidates.CandidateScorer):
        return stage
      proposers = tuple(
        index.replace(confidence=proposer.confidence)
        if isinstance(proposer, lookup.StoredTexts)
        else proposer
        for proposer in scorer.proposers
      )
      return stage.replace(scorer=scorer.replace(proposers=proposers))

    return drafter.replace(stages=tuple(map(with_index, drafter.stages)))

  def newest(self) -> list[np.ndarray]:
    """The newest texts up to the limit, each once, the oldest first."""
    self._read()
    texts = dict[bytes, np.ndarray]()
    for path in sorted(self._files, reverse=True):
      for text in reversed(self._files[path]):
        texts.setdefault(text.tobytes(), text)
    return _last([*texts.values()][::-1], self._most_tokens)

  def _paths(self) -> set[pathlib.Path]:
    """The files; the newer ones have greater names."""
    return {*self._folder.glob('texts_[0-9]*_*.safetensors')}

  def _read(self) -> bool:
    """Reads new files and forgets lost ones; whether anything changed."""
    changed = False
    while (paths := self._paths()) != self._files.keys():
      changed = True
      for path in self._files.keys() - paths:
        del self._files[path]
      for path in paths - self._files.keys():
        try:
          self._files[path] = self._texts_of(path)
        except ValueError:
          if path.exists():
            raise
          break  # Another process has just joined it with others.
    return changed

  def _texts_of(self, path: pathlib.Path) -> list[np.ndarray]:
    remedy = 'remove it, or give another folder as store'
    with whole_files.reading(path, remedy):
      with safetensors.safe_open(path, 'numpy') as file:
        metadata = file.metadata() or {}
        if metadata.get('format') != _FORMAT:
          raise ValueError(f'it has no texts of this version ({_FORMAT!r})')
        if metadata.get('tokenizer_blake2b') != self._digest:
          raise ValueError('its texts are tokens of another tokenizer')
        tokens, ends = file.get_tensor('tokens'), file.get_tensor('ends')
      if (tokens.dtype, ends.dtype) != (np.int32, np.int64):
        raise ValueError('its tokens are not ids')
      outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
      if outside.size:
        raise ValueError(
          f'it has the token {outside[0]}, and the target has'
          f' {self._vocab_size} tokens'
        )
      return np.split(tokens, ends[:-1])

  def _next_stamp(self) -> int:
    """A stamp just after the newest file that was read."""
    names = (path.name for path in self._files)
    return 1 + max((int(name.split('_')[1]) for name in names), default=0)

  def _write(self, texts: Sequence[np.ndarray], stamp: int) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)
    name = f'texts_{stamp:020d}_{os.getpid()}.safetensors'
    whole_files.write_tensors(
      self._folder / name,
      {
        'tokens': np.concatenate(texts),
        'ends': np.cumsum([text.size for text in texts]),
      },
      {'format': _FORMAT, 'tokenizer_blake2b': self._digest},
    )

  def _join(self) -> None:
    """Makes one file of all; a text may be in two of them meanwhile."""
    texts, paths = self.newest(), [*self._files]
    # Files that other processes write meanwhile are newer.
    self._write(texts, self._next_stamp())
    for path in paths:
      path.unlink(missing_ok=True)
