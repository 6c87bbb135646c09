"""Predicted cost of decoding from the sizes of models and machines alone.

`ModelShape` and `Hardware` (presets: `MODELS`, `HARDWARE`) give the FLOP, bytes
and seconds of a forward. `predict` gives the speed of a `SpeculativeStep` on a
`Deployment`.
"""

from specdec.models.lab.cost_model.forward import forward_cost
from specdec.models.lab.cost_model.forward import ForwardCost
from specdec.models.lab.cost_model.forward import Hardware
from specdec.models.lab.cost_model.forward import ModelShape
from specdec.models.lab.cost_model.presets import HARDWARE
from specdec.models.lab.cost_model.presets import MODELS
from specdec.models.lab.cost_model.speculation import break_even_batch_size
from specdec.models.lab.cost_model.speculation import Deployment
from specdec.models.lab.cost_model.speculation import predict
from specdec.models.lab.cost_model.speculation import Prediction
from specdec.models.lab.cost_model.speculation import SpeculativeStep
from specdec.models.lab.cost_model.speculation import tree_step

__all__ = (
  'HARDWARE',
  'MODELS',
  'Deployment',
  'ForwardCost',
  'Hardware',
  'ModelShape',
  'Prediction',
  'SpeculativeStep',
  'break_even_batch_size',
  'forward_cost',
  'predict',
  'tree_step',
)
