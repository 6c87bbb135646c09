"""AdamW, or Muon for matrices inside blocks and AdamW for the rest.

The work of Muon does not depend on the tokens of a step. With few of them it is
most of a step.
"""

import functools

import jax
import optax
from optax import contrib

MUON, ADAMW = 'muon', 'adamw'

# Weights are stored [out, in]; the default of optax is [in, out].
_OUT_IN = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)


def _is_block_matrix(path, leaf) -> bool:
  keys = [getattr(entry, 'key', None) for entry in path]
  return leaf.ndim == 2 and keys[0] in ('h', 'layers')


@functools.cache  # Equal optimizers share the compiled step.
def make_optimizer(
  name: str, *, learning_rate: float, warmup_steps: int, num_steps: int
) -> optax.GradientTransformation:
  """`MUON` or `ADAMW`, with linear warm-up and linear decay to zero.

  Updates of Muon (Jordan et al. 2024) are scaled to the root mean square of
  others (Liu et al. 2025, arXiv 2502.16982, eq. 4), so one learning rate, the
  peak, serves all.
  """
  rate = optax.join_schedules(
    [
      optax.linear_schedule(0.0, learning_rate, warmup_steps),
      optax.linear_schedule(learning_rate, 0.0, num_steps - warmup_steps),
    ],
    [warmup_steps],
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    contrib.muon(
      rate,
      muon_weight_dimension_numbers=lambda params: (
        jax.tree_util.tree_map_with_path(
          lambda path, leaf: (
            _OUT_IN if name == MUON and _is_block_matrix(path, leaf) else None
          ),
          params,
        )
      ),
      consistent_rms=0.2,
      weight_decay=0.1,
      adam_b2=0.95,
    ),
  )
