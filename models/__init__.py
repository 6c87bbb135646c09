"""Model families in Flax NNX, the Hugging Face bridge, and text in, text out.

`models.load` is where to begin.
"""

import importlib
import os
from typing import Any
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from models.text.generator import Generator as Generator
  from models.text.generator import load as load
  from models.text.many import Completion as Completion
  from models.text.many import Job as Job
  from models.text.plan import Plan as Plan
  from models.text.result import TextGeneration as TextGeneration
  from models.text.settings import DraftSettings as DraftSettings

# Without it transformers advises to install torch when it is imported; only its
# configs and tokenizers are used here.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# Imported when they are asked for: transformers takes seconds, and scripts
# refuse a wrong flag before (`models.text.settings`).
_MODULES = {
  'Completion': 'models.text.many',
  'Job': 'models.text.many',
  'DraftSettings': 'models.text.settings',
  'Generator': 'models.text.generator',
  'Plan': 'models.text.plan',
  'TextGeneration': 'models.text.result',
  'load': 'models.text.generator',
}
__all__ = tuple(_MODULES)


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_MODULES[name]), name)
