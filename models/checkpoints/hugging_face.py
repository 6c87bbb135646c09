"""Folders of models: as Hugging Face has them, or with blocks of four bits."""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import shutil
from typing import Any

import numpy as np
import transformers

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints import folder_tokenizer
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import adapter
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import matrices as matrices_lib
from specdec.text import text_files
from specdec.text import whole_files

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_BLOCKS = 'blocks.safetensors'  # A folder of `save` has it.
# `save` copies shape, tokenizer and chat template.
_COPIED = ('*.json', '*.jinja', '*.txt', '*.model')


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
  """A folder with a `config.json`; see `checkpoint.Checkpoint`."""

  path: pathlib.Path

  @staticmethod
  def holds(path: pathlib.Path) -> bool:
    return path.is_dir()

  @functools.cached_property
  @checkpoint_lib.named
  def _read(self) -> tuple[model_type.ModelType, adapter.Config]:
    path = self.path / CONFIG
    if not path.exists():
      files = sorted(self.path.glob('*.gguf'))
      remedy = f'; give a file of it, such as {files[0]}' if files else ''
      raise ValueError(
        f'{self.path} is not a model folder: it has no {CONFIG}{remedy}'
      )
    return families.read(text_files.read_object(path), path)

  @property
  def family(self) -> model_type.ModelType:
    return self._read[0]

  @property
  def config(self) -> adapter.Config:
    return self._read[1]

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
    names = tensor_parts.FLOATS | {
      'U8': matrices_lib.STORED
    }  # Others are refused.
    return list(dict.fromkeys(names.get(kind, kind) for kind in kinds))

  @property
  def files(self) -> list[pathlib.Path]:
    return [self.path / CONFIG, *self._weights()]

  @property
  def size(self) -> int:
    return sum(file.stat().st_size for file in self._weights())

  def tensors(self) -> Iterator[tuple[str, Any]]:
    row, shape = self._read
    stored = {tensor.name: tensor for tensor in self.stored()}
    for tensor in stored.values():
      canonical = model_type.canonical_name(tensor.name, row, shape)
      if canonical is None:
        continue
      stem = tensor.name.removesuffix(tensor_parts.BLOCKS)
      exponents = stored.get(stem + tensor_parts.SCALES)
      for name, part in model_type.parts(canonical, row, shape).items():
        if exponents is not None:
          both = (tensor, exponents)
          halves = (dataclasses.replace(half, part=part) for half in both)
          yield name, tensor_parts.Mxfp4(*halves)
          continue
        reverses = row.is_transposed(name) or model_type.is_convolution(name)
        yield (
          name,
          dataclasses.replace(
            tensor,
            part=part,
            transposed=reverses,
            convert=functools.partial(row.convert, name),
          ),
        )

  def stored(self) -> Iterator[tensor_parts.Tensor]:
    """Yields all tensors by their own names.

    If several files have a tensor, the index says which one counts.
    """
    index = self._index()
    for file in self._weights():
      with tensor_parts.opened(file) as mapped:
        described = [
          tensor_parts.Tensor(
            file, name, part.get_dtype(), tuple(part.get_shape())
          )
          for name in mapped.offset_keys()
          for part in (mapped.get_slice(name),)
        ]
      for tensor in described:
        if self.path / index.get(tensor.key, file.name) == file:
          yield tensor

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
    """The files with weights; ValueError if some or all are missing."""
    if (self.path / WEIGHTS).exists():
      return [self.path / WEIGHTS]
    files = [self.path / name for name in sorted({*self._index().values()})]
    if not files:
      suffixes = {'.bin', '.pt', '.pth'}
      pickled = [p for p in self.path.iterdir() if p.suffix in suffixes]
      if not pickled:
        raise ValueError(
          f'{self.path} has no {WEIGHTS} and no {_INDEX}; no other weights are'
          ' read'
        )
      raise ValueError(
        f'{self.path} has only pickled weights ({min(pickled).name}), which can'
        ' run code when read; convert them where torch is installed: python -c'
        ' "from transformers import AutoModelForCausalLM as M;'
        f" M.from_pretrained('{self.path}').save_pretrained('{self.path}')\""
      )
    missing = [file.name for file in files if not file.exists()]
    if missing:
      raise ValueError(f'{self.path} lacks the shards {missing}')
    return files


def write(
  folder: pathlib.Path,
  keys: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray],
) -> None:
  """Writes `config.json` and the weights; makes the folder if need be."""
  folder.mkdir(parents=True, exist_ok=True)
  whole_files.write_tensors(folder / WEIGHTS, tensors, {'format': 'pt'})
  text = text_files.to_json(keys, indent=2) + '\n'
  whole_files.write_text(folder / CONFIG, text)


@dataclasses.dataclass(frozen=True)
class _Matrix(tensor_parts.Packed):
  """A matrix in blocks; a stored tensor has its words."""

  words: tensor_parts.Tensor
  kind: str  # The kind of its blocks.
  width: int

  @property
  def name(self) -> str:
    return self.words.name

  @property
  def shape(self) -> tuple[int, int]:
    return self.words.shape[0], self.width

  def in_blocks(self) -> blocks_lib.BlockMatrix:
    words = np.empty(self.words.shape, np.uint32)
    for index, rows in self.words.rows():
      words[index] = rows
    blocks_lib.check_finite(words, self.kind)
    return blocks_lib.BlockMatrix(
      words=words, kind=self.kind, width=self.width, dtype='stored'
    )


@dataclasses.dataclass(frozen=True)
class RoundedFolder(HuggingFaceFolder):
  """A folder that `save` wrote; see `checkpoint.Checkpoint`."""

  @staticmethod
  def holds(path: pathlib.Path) -> bool:
    return (path / _BLOCKS).is_file()

  @property
  def stored_dtypes(self) -> list[str]:
    return ['stored', 'bfloat16']

  def tensors(self) -> Iterator[tuple[str, Any]]:
    with tensor_parts.opened(self.path / _BLOCKS) as mapped:
      kinds = mapped.metadata() or {}
    for tensor in self.stored():
      kind, _, width = kinds.get(tensor.name, '').partition(' ')
      yield tensor.name, _Matrix(tensor, kind, int(width)) if kind else tensor

  def _index(self) -> dict[str, str]:
    return {}  # One that was copied is of other weights.

  def _weights(self) -> list[pathlib.Path]:
    return [self.path / _BLOCKS]


def save(
  parameters: Mapping[str, Any],
  source: pathlib.Path,
  folder: pathlib.Path,
) -> None:
  """Writes a folder with parameters in blocks, which is made if need be.

  They are arrays and `BlockMatrix` on the host, by canonical names. All other
  files are copied from the folder `source`.
  """
  folder.mkdir(parents=True, exist_ok=True)
  tensors, kinds = dict[str, np.ndarray](), dict[str, str]()
  for name, value in parameters.items():
    if isinstance(value, blocks_lib.BlockMatrix):
      kinds[name] = f'{value.kind} {value.width}'
      value = value.words
    tensors[name] = value
  for pattern in _COPIED:
    for file in source.glob(pattern):
      shutil.copy(file, folder)
  # Last, because by this file the folder is known.
  whole_files.write_tensors(folder / _BLOCKS, tensors, kinds)
