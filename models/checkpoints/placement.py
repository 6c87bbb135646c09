"""How the weights of a network are held, and on which devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.nn import block_drafter
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib


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
    on_host: whether parameters stay on the host, in the format alone.
  """

  form: matrices_lib.WeightFormat
  packed: bool = False
  layout: sharding_lib.Layout = sharding_lib.Layout()
  outputs: np.ndarray | None = None
  on_host: bool = False

  def hold(
    self,
    path: tuple[Any, ...],
    tensor: checkpoint_lib.StoredTensor,
    config: Any,
    dtype: jax.typing.DTypeLike | None,
  ) -> Any:
    """Reads a parameter, and puts it on the devices as products read it.

    Args:
      path: of the parameter in the module.
      tensor: of the file.
      config: the shape of the network.
      dtype: of an array; None: a matrix, which has the format.

    Raises:
      ValueError: the tensor cannot be read or rounded.
    """
    host: Any
    if dtype is not None:
      host = matrices_lib.fill(tensor.blocks(), tensor.shape, dtype=dtype)
    elif not self.form.keeps_blocks or (host := tensor.in_blocks()) is None:
      # Rows that are looked up cost little, so they have eight bits, too.
      heads = {config.embedding, config.looked_up, 'lm_head'}
      heads |= {*block_drafter.LOOKED_UP}
      make = heads.intersection(path) and self.form.of_head
      host = (make or self.form.from_blocks)(tensor.blocks(), tensor.shape)
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
      outputs=self.form.from_blocks([(slice(None), rows)], rows.shape),
      index=matrices_lib.index_of(ids, matrix.shape[0]),
    )
    few = matrices_lib.as_operand(few, packed=self.packed)
    return self.layout.put_parameter(('lm_head',), few, config)


def make(
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
