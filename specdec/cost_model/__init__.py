"""What decoding costs, from sizes alone: when speculation pays, and why.

Pure functions over frozen records; nothing is run. `ModelShape` and `Hardware`
(presets: `MODELS`, `HARDWARE`) give the bytes, operations and seconds of a
forward; a `Step` (what is drafted, verified and expected to be emitted) on a
`Deployment` gives speed, latency, throughput and memory traffic.
"""

from specdec.cost_model.config import shape_from_config
from specdec.cost_model.forward import forward_cost
from specdec.cost_model.forward import forward_seconds
from specdec.cost_model.forward import ForwardCost
from specdec.cost_model.hardware import Hardware
from specdec.cost_model.presets import HARDWARE
from specdec.cost_model.presets import MODELS
from specdec.cost_model.shapes import Experts
from specdec.cost_model.shapes import LatentAttention
from specdec.cost_model.shapes import ModelShape
from specdec.cost_model.speculation import best_tree
from specdec.cost_model.speculation import break_even_batch_size
from specdec.cost_model.speculation import Deployment
from specdec.cost_model.speculation import predict
from specdec.cost_model.speculation import Prediction
from specdec.cost_model.speculation import Step
from specdec.cost_model.speculation import tree_step

__all__ = (
  'HARDWARE',
  'MODELS',
  'Deployment',
  'Experts',
  'ForwardCost',
  'Hardware',
  'LatentAttention',
  'ModelShape',
  'Prediction',
  'Step',
  'best_tree',
  'break_even_batch_size',
  'forward_cost',
  'forward_seconds',
  'predict',
  'shape_from_config',
  'tree_step',
)
