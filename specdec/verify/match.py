"""Match verification: a node is accepted if the target chose the same token.

The target's choice at every node is a function of its logits and of the
position alone (see `specdec.sampling`), so plain decoding emits the same
tokens, whatever was drafted (arXiv 2408.07978).
"""

import dataclasses

import jax

from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib
from specdec.tree import tree as tree_lib
from specdec.verify import accept


@dataclasses.dataclass(frozen=True)
class MatchRule(accept.Rule):
  """Accepts nodes as long as they are the target's choice; see `Rule`."""

  shares_noise = True
  keeps_tokens = True

  def __call__(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    logits: jax.Array,
    proposals: jax.Array,
    randomness: randomness_lib.Randomness,
    sampling: sampling_lib.SamplingParams,
  ) -> accept.Verdict:
    del proposals
    noise = randomness.noise.at(jax.vmap(tree_lib.pick)(tree.depth, nodes))
    choices = sampling_lib.choose(logits, noise, sampling)
    max_depth = randomness.noise.num_positions - 1
    index, accepted = jax.vmap(tree_lib.accepted_path, (0, 0, 0, None))(
      tree, nodes, choices, max_depth
    )
    # The choices along the path take the place of the nodes.
    verdict = accept.Verdict(index=index, accepted=accepted, chosen=index)
    return verdict.replace(chosen=verdict.along_path(choices))
