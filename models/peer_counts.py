"""What can be counted of transformers' decoding from outside."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from models.roofline import ModelSize
from specdec.statistics import relative_bandwidth


def _read_parameters(model: Any) -> list[Any]:
  """The tensors that a forward reads: not embeddings it looks up in."""
  looked_up = {
    id(module.weight)
    for module in model.modules()
    if type(module).__name__ == 'Embedding'
  } - {id(model.get_output_embeddings().weight)}
  return [one for one in model.parameters() if id(one) not in looked_up]


def _share_read(model: Any, parameter: Any) -> float:
  """How much of a tensor a forward of one position reads.

  The experts of a layer are one tensor `[experts, out, in]`.
  """
  if parameter.ndim < 3:
    return 1.0
  return model.config.num_experts_per_tok / parameter.shape[0]


def num_bytes(tensors: Iterable[Any]) -> int:
  """Of all of them, those that are shared only once if they are listed once."""
  return sum(one.numel() * one.element_size() for one in tensors)


def read_costs(model: Any) -> dict[str, int]:
  """Bytes read per forward and per visible slot of the cache."""
  return {
    'per_forward': round(
      sum(
        _share_read(model, one) * num_bytes([one])
        for one in _read_parameters(model)
      )
    ),
    'per_slot': model_size(model).cache_per_slot * model.dtype.itemsize,
  }


def model_size(model: Any) -> ModelSize:
  """See `models.roofline.ModelSize`."""
  config = model.config
  heads = config.num_attention_heads
  width = getattr(config, 'head_dim', None) or config.hidden_size // heads
  heads = getattr(config, 'num_key_value_heads', None) or heads
  return ModelSize(
    parameters=round(
      sum(
        _share_read(model, one) * one.numel()
        for one in _read_parameters(model)
        if one.ndim > 1
      )
    ),
    cache_per_slot=2 * config.num_hidden_layers * heads * width,
  )


@dataclasses.dataclass
class Forwards:
  """Counts the forwards of a model, as a hook called before each.

  Attributes:
    prompt_length: all of the prompt but its last token is prefill, and does not
      count.
    forwards: of the batch.
    positions: of all rows.
    slots: of the cache that were seen, padding included.
  """

  prompt_length: int
  forwards: int = 0
  positions: int = 0
  slots: int = 0

  def __call__(self, module, args, kwargs):
    del module
    ids = kwargs['input_ids'] if 'input_ids' in kwargs else args[0]
    cache = kwargs.get('past_key_values')
    before = 0 if cache is None else cache.get_seq_length()
    batch_size, length = ids.shape
    prefilled = max(self.prompt_length - 1 - before, 0)
    before, length = before + prefilled, length - prefilled
    self.forwards += 1
    self.positions += batch_size * length
    self.slots += batch_size * (before + length)


def statistics(
  prompts: Sequence[Sequence[int]],
  tokens: Sequence[Sequence[int]],
  target: Forwards,
  draft: Forwards | None,
  costs: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
  """Those of `specdec.statistics.summarize` that can be known from outside.

  Args:
    prompts: of the rows.
    tokens: new ones of the rows, up to what ended them.
    target: its forwards, counted from the prompt on.
    draft: likewise, or None.
    costs: by model, see `read_costs`.
  """
  new_tokens = np.array([len(row) for row in tokens])
  lengths = np.array([len(prompt) for prompt in prompts])
  counted = {'target': target} | ({} if draft is None else {'draft': draft})
  count = lambda forwards, slots: {'forwards': int(forwards), 'slots': slots}
  plain = new_tokens * lengths + new_tokens * (new_tokens - 1) // 2
  reads = {'plain': count(new_tokens.max(initial=0), int(plain.sum()))}
  reads |= {
    name: count(one.forwards, one.slots) for name, one in counted.items()
  }
  return {
    'new_tokens': int(new_tokens.sum()),
    # A row of a batch may be done before the others are.
    'target_forwards': int(np.minimum(new_tokens, target.forwards).sum()),
    'accepted_histogram': None,
    'stage_forwards': {} if draft is None else {'draft': draft.forwards},
    'origins': None,
    'positions': {name: one.positions for name, one in counted.items()},
    'relative_bandwidth': relative_bandwidth(reads, costs),
    'reads': reads,
    'costs': costs,
  }
