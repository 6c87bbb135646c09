"""Shape of Gemma 1, 2 and 3 (text), which `models.nn.llama` computes."""

import dataclasses
import math

from models.nn import llama as nn_llama


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(nn_llama.LlamaConfig):
  """Shape of a Gemma (arXiv 2503.19786, section 2).

  A class of its own, because checkpoints store the scales of norms minus one.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    self._set('embedding_scale', math.sqrt(self.width))
