"""Match verification: a node is accepted if the target chose the same token.

The target's choice at every node is a function of its logits and of the
position alone (see `specdec.sampling`), so the emitted tokens are those of
plain decoding, whatever was drafted (arXiv 2408.07978).
"""

import dataclasses

import jax

from specdec.sampling import BEST
from specdec.sampling import choose
from specdec.sampling import Randomness
from specdec.sampling import SamplingParams
from specdec.tree.tree import accepted_path
from specdec.tree.tree import pick
from specdec.tree.tree import TokenTree
from specdec.verify.accept import Verdict


@dataclasses.dataclass(frozen=True)
class MatchRule:
  """Accepts nodes as long as they are the target's choice; see `Rule`."""

  shares_noise = True
  children = BEST
  needs_chain = False
  may_draw = False
  keeps_tokens = True

  def __call__(
    self,
    tree: TokenTree,
    nodes: jax.Array,
    logits: jax.Array,
    proposals: jax.Array,
    randomness: Randomness,
    sampling: SamplingParams,
  ) -> Verdict:
    """See `specdec.verify.accept.Rule`."""
    del proposals
    noise = randomness.noise_at(jax.vmap(pick)(tree.depth, nodes))
    choices = choose(logits, noise, sampling)
    max_depth = randomness.noise.shape[1] - 1
    index, accepted = jax.vmap(accepted_path, (0, 0, 0, None))(
      tree, nodes, choices, max_depth
    )
    verdict = Verdict(index=index, accepted=accepted, chosen=index)
    return verdict.replace(chosen=verdict.along_path(choices))
