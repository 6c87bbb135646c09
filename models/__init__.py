"""Model families in Flax NNX, the Hugging Face bridge, and text in, text out.

The folder `models/` is imported as `specdec.models`, which is a link to it: a
package of the common name `models` would clash with one of the user's own. What
users need is in `specdec`; `specdec.load` is where to begin.
"""

import importlib
from importlib import machinery
import os
import sys
import types
from typing import Any
import warnings

# Without it transformers advises to install torch when it is imported; only its
# configs and tokenizers are used here.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')


class _OldName:
  """Finds `models.x` as `specdec.models.x`: two copies of a class differ."""

  def find_spec(self, name: str, *_: Any) -> machinery.ModuleSpec | None:
    is_ours = name.startswith('models.')
    return machinery.ModuleSpec(name, self) if is_ours else None  # type: ignore[arg-type]

  def create_module(self, spec: machinery.ModuleSpec) -> types.ModuleType:
    return importlib.import_module(f'specdec.{spec.name}')

  def exec_module(self, module: types.ModuleType) -> None:
    """It was executed when it was created."""


# The name of 0.8, which a clone that is on the path still has in 0.9.
if __name__ == 'models':
  from specdec import Completion as Completion
  from specdec import DraftSettings as DraftSettings
  from specdec import Generator as Generator
  from specdec import Job as Job
  from specdec import load as load
  from specdec import Plan as Plan
  from specdec import TextGeneration as TextGeneration

  warnings.warn(
    'import specdec instead of models: specdec.load, specdec.models.nn, ...',
    FutureWarning,
    stacklevel=2,
  )
  sys.meta_path.insert(0, _OldName())
