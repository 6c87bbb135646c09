"""How close a choice was: what explains a token that rounding flipped."""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.arguments import check_sampling
from specdec.masks import causal_mask
from specdec.model import Model
from specdec.repetition import init_seen
from specdec.sampling import adjust_logits
from specdec.sampling import filter_logits
from specdec.sampling import position_noise
from specdec.sampling import Sampling


@jax.jit
def _margin(model, row_key, tokens, length, sampling):
  definition = model.definition
  num_slots = tokens.shape[1]
  cache = definition.init_cache(1, num_slots)
  positions = jnp.arange(num_slots)[None]
  mask = causal_mask(jnp.zeros(1, jnp.int32), num_slots, num_slots)
  logits, _ = model.apply(tokens, positions, mask, cache)
  noise = position_noise(
    row_key[None], length[None, None], definition.vocab_size, sampling
  )
  last = lax.dynamic_slice_in_dim(logits, length - 1, 1, axis=1)
  seen = None
  if sampling.repetition_penalty is not None:
    seen = init_seen(tokens, length[None], definition.vocab_size)[:, None]
  last = adjust_logits(last, sampling, seen)
  best = lax.top_k(filter_logits(last, sampling) + noise, 2)[0][0, 0]
  return best[0] - best[1]


def choice_margin(
  model: Model, row_key: jax.Array, tokens: Sequence[int], sampling: Sampling
) -> float:
  """The gap between the best two scores for the token after `tokens`.

  A score is a logit over the temperature plus noise (`specdec.sampling`), so at
  temperature 0 this is the gap between the best two logits, in nats.

  Args:
    model: whose choice it is.
    row_key: the row's key, as `specdec.decode` has it.
    tokens: the sequence so far.
    sampling: as decoded with; of this row, see `Sampling.of_row`.

  Returns:
    At least 0.
  """
  size = 1 << (len(tokens) - 1).bit_length()
  padded = np.zeros((1, size), np.int32)
  padded[0, : len(tokens)] = tokens
  length = jnp.array(len(tokens), jnp.int32)
  sampling = check_sampling(sampling, 1, model.definition.vocab_size)
  return float(_margin(model, row_key, padded, length, sampling))
