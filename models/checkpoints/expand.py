"""Expands a GPT-2 to a wider and deeper one that computes the same function.

The acceptance of draft tokens depends on the function that the target computes,
and the time of a forward on its shape. An expanded small model has the cost of
a large model without a download. Results obtained this way must say so.

Width: every residual coordinate, head and inner feature is repeated r times,
and weights that sum over repeated inputs are divided by r (Net2Net, Chen et al.
2016, arXiv 1511.05641, section 2, with equal copies). Mean and variance, and so
the layer norms, do not change. Depth: appended blocks are copies of the last
one that add zero to the residual stream. Vocabulary: added tokens have a low
logit, the same after every text.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specdec.models.checkpoints import hub
from specdec.models.nn import adapter
from specdec.models.nn import gpt2 as nn_gpt2

_ADDED_LOGIT = -30.0


def _repeat(
  array: np.ndarray, axis: int, factor: int, group: int
) -> np.ndarray:
  """Repeats each group of `group` entries along an axis `factor` times."""
  before, after = array.shape[:axis], array.shape[axis + 1 :]
  groups = array.reshape(*before, -1, group, *after)
  return np.repeat(groups, factor, axis).reshape(*before, -1, *after)


def _widen(
  path: tuple[Any, ...],
  array: np.ndarray,
  factor: int,
  config: nn_gpt2.GPT2Config,
) -> np.ndarray:
  is_embedding = path[-1] == 'embedding'
  if not is_embedding and path != ('lm_head',):
    # Whole heads are repeated, so that their width and scale do not change.
    group = config.head_width if 'c_attn' in path else 1
    array = _repeat(array, 0, factor, group)
  if array.ndim == 2:
    group = config.head_width if path[2:4] == ('attn', 'c_proj') else 1
    array = _repeat(array, 1, factor, group)
  sums_inputs = array.ndim == 2 and not is_embedding
  # A tied head must equal the embedding, so its input is divided instead.
  feeds_tied_head = path[0] == 'ln_f' and config.tie_embeddings
  if sums_inputs or feeds_tied_head:
    array = (array / factor).astype(array.dtype)
  return array


def _row_of_added_tokens(params: Mapping[tuple[Any, ...], Any]) -> np.ndarray:
  """The embedding `[width]` with the logit `_ADDED_LOGIT` after every text.

  The last layer norm gives `x * scale + bias`, and the sum of x is zero. So its
  product with `1 / scale` is the sum of `bias / scale` for every text.
  """
  scale, bias = (
    np.asarray(params['ln_f', name], np.float64) for name in ('scale', 'bias')
  )
  constant = np.sum(bias / scale)
  if abs(constant) < 1e-3:
    raise ValueError(
      'vocab_size: no token can be added to this model: the biases over scales'
      f' of its last layer norm add up to {constant}'
    )
  return _ADDED_LOGIT / constant / scale


def expand(
  module: adapter.Module,
  *,
  width_factor: int,
  num_layers: int,
  vocab_size: int | None = None,
) -> nn_gpt2.GPT2:
  """Widens and deepens a GPT-2 without changing its logits.

  With a power of two as factor only the order of sums changes; with another
  factor the weights are rounded, so the module should be in float32.

  Args:
    module: a GPT-2; shares no arrays with the result.
    width_factor: r, multiplies width, heads and inner width.
    num_layers: number of layers of the result, at least the layers of `module`.
    vocab_size: number of tokens of the result, at least the tokens of `module`
      (the default); added tokens are hardly ever chosen.

  Returns:
    A module of the dtype of `module`.

  Raises:
    ValueError: `width_factor`, `num_layers` or `vocab_size` is too small, the
      module is not a GPT-2, or no token can be added to it.
  """
  if not isinstance(module, nn_gpt2.GPT2):
    raise ValueError(
      f'only a GPT-2 can be expanded, not a {type(module).__name__}'
    )
  old = module.config
  if width_factor < 1:
    raise ValueError(f'width_factor must be at least 1, got {width_factor}')
  sizes = {'num_layers': num_layers, 'vocab_size': vocab_size}
  for name, size in sizes.items():
    least = getattr(old, name)
    if size is not None and size < least:
      raise ValueError(
        f'{name} must be at least the {least} of the model, got {size}'
      )
  config = dataclasses.replace(
    old,
    vocab_size=vocab_size or old.vocab_size,
    width=width_factor * old.width,
    num_heads=width_factor * old.num_heads,
    inner_width=old.inner_width and width_factor * old.inner_width,
    num_layers=num_layers,
  )
  _, params = hub.flat_params(module)
  graph, shapes = hub.flat_params(hub.shape_module(config, module.dtype))
  # One parameter at a time, so that a large model is never held twice.
  expanded = {}
  for path, leaf in shapes.items():
    source = path
    if path[0] == 'h':
      source = 'h', min(path[1], old.num_layers - 1), *path[2:]
    array = _widen(path, np.asarray(params[source]), width_factor, old)
    if source != path and 'c_proj' in path:
      array = np.zeros_like(array)
    expanded[path] = jax.device_put(array.astype(leaf.dtype, copy=False))
  if config.vocab_size > old.vocab_size:
    row = _row_of_added_tokens(expanded)
    for path in (('wte', 'embedding'), ('lm_head',)):
      if path in expanded:
        matrix = expanded[path]
        rest = config.vocab_size - old.vocab_size, config.width
        added = jnp.broadcast_to(jnp.asarray(row, matrix.dtype), rest)
        expanded[path] = jnp.concatenate([matrix, added])
  return nnx.merge(graph, traverse_util.unflatten_dict(expanded))


def expand_pretrained(
  name: str,
  output: pathlib.Path,
  *,
  width_factor: int,
  num_layers: int,
  vocab_size: int | None = None,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> nn_gpt2.GPT2Config:
  """Expands a model and copies its tokenizer, if any, into a new folder.

  For the name see `hub.locate`, for the other arguments `expand`. The expansion
  is done in float32; the stored tensors have `dtype`. Returns the shape of the
  expanded model.
  """
  checkpoint = hub.locate(name)
  tokenizer = checkpoint.tokenizer
  expanded = expand(
    hub.read_module(checkpoint),
    width_factor=width_factor,
    num_layers=num_layers,
    vocab_size=vocab_size,
  )
  hub.save_pretrained(expanded, output, tokenizer=tokenizer, dtype=dtype)
  return expanded.config
