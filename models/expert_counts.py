"""How many distinct experts a decode touches, counted while it runs.

A forward over several tokens loads every expert that any of them was routed to,
so verifying costs a mixture more bytes than plain decoding does. Decoding knows
nothing of experts: the counts travel in the cache, which it only hands on.

    target = counting(module)
    decoding = specdec.start(target, drafter, request, config=config)
    before = decoding.target_cache.counts
    decoding = specdec.advance(...)
    distinct_per_forward(before, decoding.target_cache.counts)
"""

import dataclasses
import functools

from flax import nnx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from models.experts import distinct_experts
from models.language_model import as_model
from models.mixtral import Mixtral
from specdec.cache import KVCache
from specdec.model import LanguageModel
from specdec.model import Model


class ExpertCounts(flax.struct.PyTreeNode):
  """Of all forwards so far, prefill included.

  Attributes:
    touched: `[layers]` int32, distinct experts of each forward, summed.
    forwards: `[]` int32.
  """

  touched: jax.Array
  forwards: jax.Array


class CountingCache(KVCache):
  """A cache that remembers what its forwards touched.

  Attributes:
    counts: see `ExpertCounts`.
  """

  counts: ExpertCounts


@functools.cache
def _counting(definition: LanguageModel, graph: nnx.GraphDef) -> LanguageModel:
  def apply(params, tokens, positions, mask, cache):
    module = nnx.merge(graph, params)
    logits, cache, routings = module.with_routing(
      tokens, positions, mask, cache
    )
    num_experts = module.config.num_experts
    touched = jnp.stack(
      [distinct_experts(one.experts, num_experts) for one in routings]
    )
    counts = ExpertCounts(
      touched=cache.counts.touched + touched,
      forwards=cache.counts.forwards + 1,
    )
    return logits, cache.replace(counts=counts)

  def init_cache(batch_size, num_slots):
    cache = definition.init_cache(batch_size, num_slots)
    return CountingCache(
      keys=cache.keys,
      values=cache.values,
      length=cache.length,
      num_slots=cache.num_slots,
      counts=ExpertCounts(
        touched=jnp.zeros(len(cache.keys), jnp.int32),
        forwards=jnp.zeros((), jnp.int32),
      ),
    )

  return dataclasses.replace(definition, apply=apply, init_cache=init_cache)


def counting(module: Mixtral) -> Model:
  """The model of `as_model`, with a `CountingCache`.

  Args:
    module: a mixture of experts.

  Raises:
    ValueError: it has no experts.
  """
  if not isinstance(module, Mixtral):
    raise ValueError(f'a {type(module).__name__} has no experts to count')
  model = as_model(module)
  graph, _ = nnx.split(module)
  return model.replace(definition=_counting(model.definition, graph))


def distinct_per_forward(
  before: ExpertCounts, after: ExpertCounts
) -> np.ndarray:
  """Distinct experts per forward and layer, `[layers]` float64, on average.

  Args:
    before: counts at some time.
    after: counts later.

  Raises:
    ValueError: there was no forward in between.
  """
  forwards = int(after.forwards) - int(before.forwards)
  if forwards < 1:
    raise ValueError('there was no forward to count')
  touched = np.asarray(after.touched) - np.asarray(before.touched)
  return touched / forwards
