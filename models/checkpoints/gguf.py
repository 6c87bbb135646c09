"""Models in GGUF files.

Names are those that llama.cpp's converters write
(github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py).
"""

from collections.abc import Iterator
import dataclasses
import functools
import pathlib
from typing import Any

import transformers

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints import tensor_names
from specdec.models.checkpoints.gguf_parts import gguf_config
from specdec.models.checkpoints.gguf_parts import gguf_header
from specdec.models.checkpoints.gguf_parts import gguf_keys
from specdec.models.checkpoints.gguf_parts import gguf_tensor
from specdec.models.checkpoints.gguf_parts import gguf_tokenizer
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import adapter
from specdec.models.nn import blocks as blocks_lib

SUFFIX = '.gguf'


def config_keys(path: pathlib.Path) -> dict[str, Any]:
  """The keys that the `config.json` of the same model would have.

  Raises:
    ValueError: the architecture or one of its keys is not known, or a key is
      missing; the message names it.
  """
  with checkpoint_lib.naming(path):
    return gguf_keys.config_keys(gguf_header.read_header(path))


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """A file with a whole model; see `checkpoint.Checkpoint`."""

  path: pathlib.Path

  @staticmethod
  def holds(path: pathlib.Path) -> bool:
    """Whether a path is a file that is named or begins as GGUF files do."""
    named = path.suffix.lower() == SUFFIX
    return path.is_file() and (named or gguf_header.begins_as_gguf(path))

  @functools.cached_property
  @checkpoint_lib.named
  def config(self) -> adapter.Config:
    return families.config_from_keys(config_keys(self.path), self.path)

  @property
  def family(self) -> families.Family:
    return families.family_of(self.config)

  @functools.cached_property
  @checkpoint_lib.named
  def tokenizer(self) -> transformers.PreTrainedTokenizerBase | None:
    return gguf_tokenizer.load_tokenizer(self.path)

  @property
  @checkpoint_lib.named
  def eos_ids(self) -> tuple[int, ...]:
    """The ids of the file, or of the tokenizer."""
    stated = gguf_tokenizer.eos_ids(self.path)
    return checkpoint_lib.usable_ids(self, [stated])

  @property
  @checkpoint_lib.named
  def stored_dtypes(self) -> list[str]:
    """See `Checkpoint`.

    Blocks of few bits have scales in float16 and are made from models in either
    16-bit type.
    """
    types = gguf_tensor.quants().GGMLQuantizationType
    tensors = gguf_header.read_header(self.path).tensors.values()
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

  def tensors(self) -> Iterator[tuple[str, gguf_tensor.Tensor]]:
    """Yields canonical names and tensors, in the order of the file."""
    header = gguf_header.read_header(self.path)
    arch_name = gguf_config.architecture_of(header)
    arch = gguf_config.ARCHITECTURES[arch_name]
    config, family, tensor = self.config, self.family, gguf_tensor.Tensor
    heads = {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}
    unread = {gguf_config.ROPE_FACTORS, *gguf_config.LONGROPE.values()}
    unread |= gguf_config.of_further_tokens(header, arch_name)
    for name, info in header.tensors.items():
      if name in unread:
        continue
      canonical = gguf_config.canonical_name(name, arch.names, arch.layers)
      if canonical is None:
        where = f'{self.path}: tensor {name}'
        raise ValueError(f'{where} is not part of a {arch_name}')
      if family.is_unused(canonical, config):
        continue
      if '{}' in canonical:
        for expert in range(info.shape[0]):
          part = tensor_parts.Part(expert=expert)
          yield canonical.format(expert), tensor(info, part)
        continue
      if parts := family.parts(canonical, config):
        yield from ((key, tensor(info, part)) for key, part in parts.items())
        continue
      rotated = heads.get(name.split('.')[-2]) if arch.swaps_rows else None
      is_convolution = tensor_names.is_convolution(canonical)
      yield (
        canonical,
        tensor(info, num_heads=rotated, transposed=is_convolution),
      )
