"""Stored models, whatever holds them, and how their weights are held."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any
from typing import Protocol
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import transformers

from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import adapter
from specdec.models.nn import block_drafter
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import dtypes
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib
from specdec.text import whole_files

_Read = TypeVar('_Read')

# Bytes of a draft's files that a processor's cache may hold.
_CACHED = 1 << 26


class StoredTensor(Protocol):
  """A tensor of a checkpoint; matrices are `[out, in]`."""

  @property
  def name(self) -> str:
    """The name that the checkpoint has for it."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  def row_batches(self) -> Iterator[blocks_lib.Rows]:
    """Yields indices of n rows and their values, `[n, in]` or `[n]`.

    Raises:
      ValueError: its type cannot be read, or the file is damaged.
    """

  def in_blocks(self) -> blocks_lib.BlockMatrix | None:
    """The matrix as it is stored, if `models/nn/blocks` has that kind."""


class StoredNetwork(Protocol):
  """A stored model, head or block drafter; see `hub.load_network`."""

  @property
  def path(self) -> pathlib.Path:
    """The folder or file."""

  @property
  def size(self) -> int:
    """Bytes of the files with weights."""

  def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
    """Yields tensors and their canonical names, see `families`.

    Raises:
      ValueError: a file cannot be read, or the name of a tensor is not known.
    """

  @property
  def config(self) -> adapter.Config:
    """The shape; raises ValueError if no family supports it."""

  @property
  def family(self) -> model_type.Family:
    """The record that loads its weights; for a model, its model type."""


class Checkpoint(StoredNetwork, Protocol):
  """A stored model; see `hub.locate`. Each part is read when it is needed."""

  @property
  def files(self) -> Sequence[pathlib.Path]:
    """The files with shape and weights; ValueError if some are missing."""

  @property
  def stored_dtypes(self) -> Sequence[str]:
    """Dtypes that the matrices can be loaded as without much loss.

    `stored` is among them if the file has blocks of few bits that can be used.
    """

  @property
  def tokenizer(self) -> transformers.PreTrainedTokenizerBase | None:
    """The tokenizer, None without one; ValueError if it cannot be used."""

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The tokens that end a text; raises ValueError if an id is invalid."""


def named(read: Callable[[Any], _Read]) -> Callable[[Any], _Read]:
  """Has the errors of a method of `Checkpoint` name the folder or file."""

  @functools.wraps(read)
  def call(stored: Checkpoint) -> _Read:
    with naming(stored.path):
      return read(stored)

  return call


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
  """Has errors name the folder or file; see `whole_files.reading`."""
  with whole_files.reading(path):
    try:
      yield
    except ValueError as error:
      if str(path) in str(error):
        raise
      raise ValueError(f'{path}: {error}') from error


def usable_ids(
  checkpoint: Checkpoint, stated: Sequence[Any]
) -> tuple[int, ...]:
  """The first usable EOS ids among ids, lists of ids and None.

  Without one, the tokenizer's. Ids outside the vocabulary are skipped:
  published configs of small vocabularies often keep GPT-2's 50256.
  """
  of_tokenizer = getattr(checkpoint.tokenizer, 'eos_token_id', None)
  for eos in (*stated, of_tokenizer):
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token) is not int for token in ids):
      raise ValueError(f'eos_token_id={eos!r} is not a token id')
    size = checkpoint.config.vocab_size
    if usable := tuple(token for token in ids if 0 <= token < size):
      return usable
  return ()


def resolve_dtype(
  dtype: jax.typing.DTypeLike,
  checkpoint: Checkpoint,
  *,
  packed: bool = False,
) -> matrices_lib.WeightFormat:
  """The format of a dtype, where `auto` is chosen for a checkpoint.

  It is `stored` for blocks of few bits if the kernels of `models/nn/cpu` are
  used. Otherwise it is the 16-bit type of the checkpoint's matrices if this
  platform computes in it natively, else float32. Blocks of few bits fit either
  16-bit type.

  Raises:
    ValueError: the format is unknown, or it is `stored` and the checkpoint has
      no blocks of few bits.
  """
  if dtype != dtypes.AUTO:
    form = matrices_lib.format_of(dtype)
    if form.keeps_blocks and form.name not in checkpoint.stored_dtypes:
      raise ValueError(
        f'dtype={form.name} is for files in blocks of few bits, such as GGUF,'
        f' and {checkpoint.path} has none; choose another, such as int4'
      )
    return form
  stored, native = checkpoint.stored_dtypes, dtypes.native_dtypes()
  if packed and matrices_lib.STORED in stored:
    return matrices_lib.FORMATS[matrices_lib.STORED]
  in_order = ('bfloat16', 'float16')
  usable = [name for name in in_order if name in {*stored} & native]
  return matrices_lib.FORMATS[usable[0] if usable else 'float32']


def resolve_draft_dtype(
  dtype: jax.typing.DTypeLike | None,
  checkpoint: Checkpoint,
  *,
  target: matrices_lib.WeightFormat,
  packed: bool,
  is_self: bool = False,
) -> matrices_lib.WeightFormat:
  """The format of a draft, where None is chosen for it.

  No format of the draft changes what is decoded, and a forward that reads fewer
  bytes is faster. So if the kernels of `models/nn/cpu` are used, a draft has
  four bits (as stored, if it has blocks) next to a target in bfloat16 or fewer
  bits. A small draft, which the processor's cache holds, has eight next to
  bfloat16. Otherwise a draft has the target's format. The target as its own
  draft has four bits.
  """
  if dtype is not None:
    return resolve_dtype(dtype, checkpoint, packed=packed)
  has_blocks = matrices_lib.STORED in checkpoint.stored_dtypes
  few_bits = matrices_lib.FORMATS[matrices_lib.STORED if has_blocks else 'int4']
  if is_self or target.keeps_blocks:
    return few_bits
  if not packed or target.name not in ('bfloat16', 'int8', 'int4'):
    return target
  if checkpoint.size > _CACHED:
    return few_bits
  return matrices_lib.FORMATS['int8'] if target.name == 'bfloat16' else target


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
  """How the weights of a network are held.

  Attributes:
    form: the format of the matrices.
    packed: whether matrices are packed for the kernels of `models/nn/cpu`,
      which must be available; matrices in float16 are not. Not with several
      devices.
    layout: the devices that hold the tensors.
    outputs: `[N]` int, ascending, the tokens whose logits are computed; other
      logits are -inf. None: all.
    on_host: whether parameters stay on the host: rounded, but not packed.
  """

  form: matrices_lib.WeightFormat
  packed: bool = False
  layout: sharding_lib.Layout = sharding_lib.Layout()
  outputs: np.ndarray | None = None
  on_host: bool = False

  def hold(
    self,
    path: tuple[Any, ...],
    tensor: StoredTensor,
    config: Any,
    dtype: jax.typing.DTypeLike | None,
  ) -> Any:
    """Reads a parameter, and puts it on the devices as products read it.

    An array gets the `dtype`. None means a matrix, which gets the `form`.

    Raises:
      ValueError: the tensor cannot be read or rounded.
    """
    host: Any
    if dtype is not None:
      host = matrices_lib.fill(tensor.row_batches(), tensor.shape, dtype=dtype)
    elif not self.form.keeps_blocks or (host := tensor.in_blocks()) is None:
      # Rows that are looked up cost little, so they have eight bits, too.
      heads = {config.embedding, config.looked_up, 'lm_head'}
      heads |= {*block_drafter.LOOKED_UP}
      make = heads.intersection(path) and self.form.of_head
      host = (make or self.form.from_rows)(tensor.row_batches(), tensor.shape)
    tied = self.outputs is not None and config.tie_embeddings
    head = config.embedding if tied else 'lm_head'
    if self.outputs is not None and path[0] == head:
      host = matrices_lib.few_outputs(host, self.outputs, is_embedding=tied)
    if self.on_host:
      return host
    # Some embeddings are added, not multiplied.
    packed = self.packed and path[0] != config.looked_up
    host = matrices_lib.as_operand(host, packed=packed)
    return self.layout.put_parameter(path, host, config)

  def hold_copy(self, matrix: Any, ids: np.ndarray, config: Any) -> Any:
    """Puts a copy of rows `ids` of an output matrix on the devices."""
    rows = np.asarray(matrices_lib.take_rows(matrix, jnp.asarray(ids)))
    few = matrices_lib.FewOutputs(
      outputs=self.form.from_rows([(slice(None), rows)], rows.shape),
      index=matrices_lib.index_of(ids, matrix.shape[0]),
    )
    few = matrices_lib.as_operand(few, packed=self.packed)
    return self.layout.put_parameter(('lm_head',), few, config)


def placement_of(
  dtype: jax.typing.DTypeLike = jnp.float32, **options: Any
) -> Placement:
  """The placement of a dtype; `options` are the other fields.

  Args:
    dtype: of the matrices, one of `matrices.DTYPES`; norms are float32. `int8`
      rounds all others to eight bits, except position embeddings and routers,
      and the rest is computed in bfloat16; `int4` to four, but embedding and
      head to eight. `stored` leaves matrices in blocks of few bits unchanged.
    options: fields of a `Placement`.

  Raises:
    ValueError: the dtype is not known.
  """
  return Placement(matrices_lib.format_of(dtype), **options)
