"""Models in GGUF files.

Names are as llama.cpp's converters write them
(github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py).
"""

from collections.abc import Iterator
import dataclasses
import functools
import pathlib

import transformers

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints.gguf_parts import gguf_file
from specdec.models.checkpoints.gguf_parts import gguf_keys
from specdec.models.checkpoints.gguf_parts import gguf_tokenizer
from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import adapter
from specdec.models.nn import blocks as blocks_lib

SUFFIX = '.gguf'


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """A file with a whole model; see `checkpoint.Checkpoint`."""

  path: pathlib.Path

  @staticmethod
  def holds(path: pathlib.Path) -> bool:
    """Whether a path is a file that is named or begins as GGUF files do."""
    named = path.suffix.lower() == SUFFIX
    return path.is_file() and (named or gguf_file.begins_as_gguf(path))

  @functools.cached_property
  @checkpoint_lib.named
  def _read(self) -> tuple[model_type.ModelType, adapter.Config]:
    keys = gguf_keys.config_keys(gguf_file.read_header(self.path))
    return families.read(keys, self.path)

  @property
  def family(self) -> model_type.ModelType:
    return self._read[0]

  @property
  def config(self) -> adapter.Config:
    return self._read[1]

  @functools.cached_property
  @checkpoint_lib.named
  def tokenizer(self) -> transformers.PreTrainedTokenizerBase | None:
    return gguf_tokenizer.load_tokenizer(self.path)

  @property
  @checkpoint_lib.named
  def eos_ids(self) -> tuple[int, ...]:
    stated = gguf_tokenizer.eos_ids(self.path)
    return checkpoint_lib.usable_ids(self, [stated])

  @property
  @checkpoint_lib.named
  def stored_dtypes(self) -> list[str]:
    """See `Checkpoint`.

    Blocks of few bits have scales in float16 and are made from models in either
    16-bit type.
    """
    types = gguf_file.quants().GGMLQuantizationType
    tensors = gguf_file.read_header(self.path).tensors.values()
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    if kinds == {types.F32}:
      return ['float32']
    exact = {types.BF16: 'bfloat16', types.F16: 'float16'}
    floats = [exact[kind] for kind in exact if kind in kinds]
    if kinds <= {*exact, types.F32}:
      return floats
    computed = any(kind.name in blocks_lib.KINDS for kind in map(types, kinds))
    return ['stored'] * computed + ['bfloat16', 'float16']

  @property
  def files(self) -> list[pathlib.Path]:
    return [self.path]

  @property
  def size(self) -> int:
    return self.path.stat().st_size

  def tensors(self) -> Iterator[tuple[str, gguf_file.Tensor]]:
    header = gguf_file.read_header(self.path)
    _, files = gguf_keys.architecture_of(header)
    config, family = self.config, self.family
    heads = {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}
    unread = {model_type.ROPE_FACTORS, *gguf_keys.LONGROPE.values()}
    unread |= gguf_keys.of_further_tokens(header, files.name)
    for name, info in header.tensors.items():
      if name in unread:
        continue
      canonical = model_type.canonical_of_gguf(name, files.names, files.layers)
      if canonical is None:
        where = f'{self.path}: tensor {name}'
        raise ValueError(f'{where} is not part of a {files.name}')
      if family.is_unused(canonical, config):
        continue
      tensor = gguf_file.Tensor(
        info,
        num_heads=heads.get(name.split('.')[-2]) if files.swaps_rows else None,
        transposed=model_type.is_convolution(canonical),
      )
      for key, part in model_type.parts(canonical, family, config).items():
        yield key, dataclasses.replace(tensor, part=part)
