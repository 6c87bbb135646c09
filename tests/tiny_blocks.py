"""Random matrices in blocks of few bits, and what GGUF files have in common."""

from collections.abc import Mapping
import pathlib
from typing import Any

import gguf
import numpy as np

from specdec.models.nn import blocks as blocks_lib


def raw_rows(
  rng: np.random.Generator, kind: str, count: int, width: int
) -> np.ndarray:
  """Rows `[count, bytes]` uint8 of any bits, and of factors of any size.

  Some of the factors are denormal.
  """
  layout = blocks_lib.KINDS[kind]
  shape = count, -(-width // layout.file_inputs)
  raw = rng.integers(0, 256, (*shape, layout.bytes), dtype=np.uint8)
  start = 0
  for name, size in layout.fields.items():
    if name in ('d', 'dm'):
      sizes = 10.0 ** rng.uniform(-6, -3, (*shape, size // 2))
      factors = sizes * rng.choice([-1, 1], sizes.shape)
      half = factors.astype(np.float16)
      raw[..., start : start + size] = half.view(np.uint8)
    if name == 'e':
      raw[..., start] = rng.integers(108, 119, shape)
    start += size
  return raw.reshape(count, -1)


def matrix(
  rng: np.random.Generator, kind: str, shape: tuple[int, int]
) -> blocks_lib.BlockMatrix:
  """A matrix `[out, in]` on the host."""
  rows = slice(None), raw_rows(rng, kind, *shape)
  return blocks_lib.from_raw([rows], shape, kind)


def set_keys(
  writer: gguf.GGUFWriter, arch: str, keys: Mapping[str, Any]
) -> None:
  """Sets keys of an architecture; keys with these names are replaced."""
  for key, value in keys.items():
    kind = gguf.GGUFValueType.get_type(value)
    writer.kv_data[0].pop(f'{arch}.{key}', None)
    writer.add_key_value(f'{arch}.{key}', value, kind)


_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 4)


def stored_name(name: str, renames: Mapping[str, str]) -> str:
  """The name of a tensor in a file, by gguf's table or by parts of the name."""
  stem, _, end = name.rpartition('.')
  if base := _NAMES.get_name(stem):
    return f'{base}.{end}'
  for ours, theirs in renames.items():
    name = name.replace(ours, theirs)
  return name


_SIZES = ('context_length', 'embedding_length', 'feed_forward_length')
_SIZES += ('attention.head_count', 'attention.head_count_kv')
_SIZES += ('attention.key_length',)


def drafter_writer(
  path: pathlib.Path,
  arch: str,
  sizes: tuple[int, ...],
  keys: Mapping[str, Any],
) -> gguf.GGUFWriter:
  """A writer of a drafter's file that has its `_SIZES` and other keys."""
  writer = gguf.GGUFWriter(path, arch)
  writer.add_layer_norm_rms_eps(1e-6)
  set_keys(writer, arch, dict(zip(_SIZES, sizes, strict=True)) | dict(keys))
  return writer


def finish(writer: gguf.GGUFWriter) -> None:
  """Writes the file whose keys and tensors a writer has."""
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
