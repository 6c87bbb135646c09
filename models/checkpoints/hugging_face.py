"""Folders of models as Hugging Face has them: JSON and safetensors."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np
import safetensors
import transformers

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints import folder_tokenizer
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import adapter
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import matrices as matrices_lib
from specdec.text import text_files

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_ROWS = 1 << 12  # Rows in blocks of few bits that are expanded at once.
_FLOATS = {
  'F32': 'float32',
  'F16': 'float16',
  'BF16': 'bfloat16',
  'F64': 'float64',
}


@contextlib.contextmanager
def opened(file: pathlib.Path) -> Iterator[Any]:
  """A safetensors file; ValueError if it has another format."""
  try:
    with safetensors.safe_open(file, 'numpy') as mapped:
      yield mapped
  except (OSError, safetensors.SafetensorError) as error:
    text_files.refuse_stand_in(file)
    raise ValueError(f'{file} is not a safetensors file: {error}') from error


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Location and type of a stored tensor."""

  file: pathlib.Path
  key: str  # The name in the file.
  dtype: str
  stored_shape: tuple[int, ...]
  part: tensor_parts.Part = tensor_parts.Part()
  transposed: bool = False  # Whether its axes are stored in reverse.
  convert: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
  num_heads: int | None = None  # See `rope.order_of_rows`.

  @property
  def name(self) -> str:
    return self.part.of(self.key)

  @property
  def shape(self) -> tuple[int, ...]:
    shape = self.stored_shape[self.part.expert is not None :]
    outputs, *rest = shape[::-1] if self.transposed else shape
    return (len(range(outputs)[self.part.rows]), *rest)

  def blocks(self) -> Iterator[blocks_lib.Rows]:
    """Yields indices of n rows and their values, `[n, in]` or `[n]`."""
    if self.dtype not in _FLOATS:
      raise ValueError(
        f'it has dtype {self.dtype}, expected one of {sorted(_FLOATS)}'
      )
    return self.rows()

  def rows(self) -> Iterator[blocks_lib.Rows]:
    """Yields the same as `blocks`, of a tensor of any type.

    The file is mapped again for every block: pages of a mapping that were
    touched stay resident until it is closed, and would double the peak memory.
    """
    if self.part.expert == 0 and self.stored_shape[0] != self.part.experts:
      raise ValueError(
        f'it has {self.stored_shape[0]} experts, expected {self.part.experts}'
      )
    return tensor_parts.by_rows(self.shape, self.num_heads, self._read)

  def _read(self, start: int, end: int) -> np.ndarray:
    first, by = self.part.rows.start or 0, self.part.rows.step or 1
    rows = slice(first + by * start, first + by * (end - 1) + 1, by)
    stack = () if self.part.expert is None else (self.part.expert,)
    with opened(self.file) as mapped:
      stored = mapped.get_slice(self.key)
      if not self.transposed:
        return self.convert(stored[*stack, rows])
      # An older safetensors knows no ellipsis.
      inner = (slice(None),) * (len(self.shape) - 1)
      return self.convert(stored[*stack, *inner, rows].T)

  def in_blocks(self) -> None:
    """There are no blocks of few bits."""


class Packed:
  """A matrix in blocks of few bits; see `checkpoint.StoredTensor`."""

  def in_blocks(self) -> blocks_lib.BlockMatrix:
    raise NotImplementedError

  def blocks(self) -> Iterator[blocks_lib.Rows]:
    """Yields indices of n rows and their values, `[n, in]`."""
    matrix = self.in_blocks()
    for start in range(0, len(matrix.words), _ROWS):
      rows = slice(start, start + _ROWS)
      words = matrix.words[rows]
      yield rows, blocks_lib.expand(words, matrix.kind, matrix.width, np)


@dataclasses.dataclass(frozen=True)
class _Blocks(Packed):
  """A matrix in MXFP4: a tensor of blocks and a tensor of exponents.

  A block has 32 inputs, neighbours in the halves of a byte; in a GGUF file it
  is the exponent, and then inputs 16 apart in the halves of a byte.
  """

  blocks_of: Tensor  # `[out, groups, 16]`
  exponents: Tensor  # `[out, groups]`

  @property
  def name(self) -> str:
    return self.blocks_of.name

  @property
  def shape(self) -> tuple[int, ...]:
    outputs, groups = (*self.blocks_of.shape, 0, 0)[:2]
    return outputs, 32 * groups

  def in_blocks(self) -> blocks_lib.BlockMatrix:
    if (shape := self.exponents.shape) != self.blocks_of.shape[:-1]:
      raise ValueError(f'{self.exponents.name} has shape {shape}')
    if {self.blocks_of.dtype, self.exponents.dtype} != {'U8'}:
      raise ValueError('its bytes have another dtype than U8')
    read = lambda tensor: np.concatenate([rows for _, rows in tensor.rows()])
    pairs = read(self.blocks_of)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1)
    low, high = np.split(codes.reshape(*pairs.shape[:-1], 32), 2, axis=-1)
    pieces = [read(self.exponents)[..., None], low | high << 4]
    raw = np.concatenate(pieces, axis=-1).reshape(len(pairs), -1)
    return blocks_lib.from_raw([(slice(None), raw)], self.shape, 'MXFP4')


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
  """A folder with a `config.json`; see `checkpoint.Checkpoint`."""

  path: pathlib.Path

  @staticmethod
  def holds(path: pathlib.Path) -> bool:
    """Whether a path is such a folder."""
    return path.is_dir()

  @functools.cached_property
  @checkpoint_lib.named
  def config(self) -> adapter.Config:
    path = self.path / CONFIG
    if not path.exists():
      files = sorted(self.path.glob('*.gguf'))
      remedy = f'; give a file of it, such as {files[0]}' if files else ''
      raise ValueError(
        f'{self.path} is no model folder: it has no {CONFIG}{remedy}'
      )
    return families.config_from_keys(text_files.read_object(path), path)

  @property
  def family(self) -> families.Family:
    return families.family_of(self.config)

  @functools.cached_property
  @checkpoint_lib.named
  def tokenizer(self) -> transformers.PreTrainedTokenizerBase | None:
    return folder_tokenizer.load_tokenizer(self.path)

  @property
  @checkpoint_lib.named
  def eos_ids(self) -> tuple[int, ...]:
    """The ids of generation_config.json, config.json or the tokenizer."""
    names = ('generation_config.json', CONFIG)
    paths = [self.path / name for name in names if (self.path / name).exists()]
    stated = [
      text_files.read_object(path).get('eos_token_id') for path in paths
    ]
    return checkpoint_lib.usable_ids(self, stated)

  @property
  @checkpoint_lib.named
  def stored_dtypes(self) -> list[str]:
    kinds = [
      tensor.dtype for tensor in self.stored() if len(tensor.stored_shape) > 1
    ]
    names = _FLOATS | {'U8': matrices_lib.STORED}  # Others are refused.
    return list(dict.fromkeys(names.get(kind, kind) for kind in kinds))

  @property
  def files(self) -> list[pathlib.Path]:
    return [self.path / CONFIG, *self._weights()]

  @property
  def size(self) -> int:
    return sum(file.stat().st_size for file in self._weights())

  def tensors(self) -> Iterator[tuple[str, Tensor | _Blocks]]:
    """Yields canonical names and tensors, in the order of the files."""
    config, family = self.config, self.family
    stored = {tensor.name: tensor for tensor in self.stored()}
    for tensor in stored.values():
      canonical = family.canonical_name(tensor.name, config)
      if canonical is None or family.is_unused(canonical, config):
        continue
      parts = family.parts(canonical, config) or {
        canonical: tensor_parts.Part()
      }
      stem = tensor.name.removesuffix(checkpoint_lib.BLOCKS)
      exponents = stored.get(stem + checkpoint_lib.SCALES)
      for name, part in parts.items():
        if exponents is not None:
          both = (tensor, exponents)
          halves = (dataclasses.replace(half, part=part) for half in both)
          yield name, _Blocks(*halves)
          continue
        yield (
          name,
          dataclasses.replace(
            tensor,
            part=part,
            transposed=family.is_transposed(name),
            convert=functools.partial(family.convert, 1, name),
          ),
        )

  def stored(self) -> Iterator[Tensor]:
    """Yields all tensors by their own names, each once.

    If several files have a tensor, the index says which one counts.

    Raises:
      ValueError: the index names another file than has a tensor, or several
        files have a tensor that the index does not name.
    """
    files, index = self._weights(), self._index()
    owner, left_out = dict[str, pathlib.Path](), dict[str, pathlib.Path]()
    for file in files:
      with opened(file) as mapped:
        described = [
          Tensor(file, name, part.get_dtype(), tuple(part.get_shape()))
          for name in mapped.offset_keys()
          for part in (mapped.get_slice(name),)
        ]
      for tensor in described:
        if self.path / index.get(tensor.key, file.name) != file:
          left_out[tensor.key] = file
          continue
        if (first := owner.setdefault(tensor.key, file)) != file:
          raise ValueError(
            f'{first.name} and {file.name} both have the tensor {tensor.key},'
            f' and {_INDEX} does not say which one counts'
          )
        yield tensor
    if lost := sorted(left_out.keys() - owner.keys()):
      raise ValueError(
        f'{_INDEX} says that {index[lost[0]]} has the tensor {lost[0]}, but'
        f' {left_out[lost[0]].name} has it'
      )

  def _index(self) -> dict[str, str]:
    """The file of each tensor by the index; empty if one file has all."""
    if (self.path / WEIGHTS).exists() or not (self.path / _INDEX).exists():
      return {}
    index = text_files.read_object(self.path / _INDEX).get('weight_map')
    if not index or not text_files.fits(index, dict[str, str]):
      raise ValueError(
        f'{self.path / _INDEX} is not an index of shards: its weight_map must'
        f' name the file of each tensor, got {index!r:.60}'
      )
    return index

  def _weights(self) -> list[pathlib.Path]:
    """The files with weights; ValueError if there are none or some lack."""
    if (self.path / WEIGHTS).exists():
      return [self.path / WEIGHTS]
    files = [self.path / name for name in sorted({*self._index().values()})]
    if not files:
      raise ValueError(_no_weights(self.path))
    missing = [file.name for file in files if not file.exists()]
    if missing:
      raise ValueError(f'{self.path} lacks the shards {missing}')
    return files


def _no_weights(folder: pathlib.Path) -> str:
  """An error for a folder without safetensors, with the remedy."""
  suffixes = {'.bin', '.pt', '.pth'}
  pickled = sorted(p.name for p in folder.iterdir() if p.suffix in suffixes)
  if not pickled:
    return (
      f'{folder} has no {WEIGHTS} and no {_INDEX}; no other weights are read'
    )
  return (
    f'{folder} has only pickled weights ({pickled[0]}), which can run code'
    ' when read; convert them where torch is installed: python -c "from'
    ' transformers import AutoModelForCausalLM as M;'
    f" M.from_pretrained('{folder}').save_pretrained('{folder}')\""
  )
