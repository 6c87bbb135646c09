"""What is asked of a decode: what is static about it, and what is not."""

import dataclasses

import flax.struct
import jax

from specdec.sampling import Sampling
from specdec.stop import StopTable
from specdec.verification.rejection import BEST
from specdec.verification.rejection import CHILDREN

RULES = ('match', 'rejection', 'block')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
  """What is static about a decode: changing it recompiles.

  Attributes:
    max_new_tokens: room in the buffers. The limit itself is dynamic and may be
      anything up to this.
    eos_ids: tokens that end a row; the emitted text includes them.
    verify: one of `RULES`, see `specdec.verification`.
    children: one of `rejection.CHILDREN`; how children come about where the
      rule is not `match`, which wants the best ones.
    log_probs: whether to compute those of the emitted tokens.

  Raises:
    ValueError: the rule or the children are not known, or do not go together.
  """

  max_new_tokens: int = 128
  eos_ids: tuple[int, ...] = ()
  verify: str = 'match'
  children: str = BEST
  log_probs: bool = False

  def __post_init__(self):
    for name, known in (('verify', RULES), ('children', CHILDREN)):
      if getattr(self, name) not in known:
        raise ValueError(
          f'{name} must be one of {known}, got {getattr(self, name)!r}'
        )
    if self.verify == 'match' and self.children != BEST:
      raise ValueError(
        f'verify=match wants the best children, got children={self.children};'
        ' choose verify=rejection to draw them'
      )


class Request(flax.struct.PyTreeNode):
  """What to decode: a batch of prompts, all of it dynamic.

  Attributes:
    prompt: `[B, P]` int32, padded at the end with any valid token.
    prompt_length: `[B]` int32, at least 1.
    limit: `[B]` int32, new tokens per row, at most
      `DecodeConfig.max_new_tokens`.
    row_keys: `[B]` keys, one per row; consumed.
    sampling: validated.
    stop: stop strings, or None.
    break_even: `[]` float32, how many plain steps a speculative one takes;
      decoding goes on plainly while speculation does not emit that many tokens,
      see `specdec.guard`. None: speculation always.
  """

  prompt: jax.Array
  prompt_length: jax.Array
  limit: jax.Array
  row_keys: jax.Array
  sampling: Sampling
  stop: StopTable | None = None
  break_even: jax.Array | None = None
