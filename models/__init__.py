"""Model families in Flax NNX, the Hugging Face bridge, and text in, text out.

The folder `models/` is imported as `specdec.models`, which is a link to it: a
package of the common name `models` would clash with one of the user's own. What
users need is in `specdec`; `specdec.load` is where to begin.
"""

import os
import warnings

# Without it transformers advises to install torch when it is imported; only its
# configs and tokenizers are used here.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# The name of 0.8, which a clone that is on the path still has in 0.9. It has no
# modules, because two copies of a class would differ.
if __name__ == 'models':
  from specdec import Completion as Completion
  from specdec import DraftSettings as DraftSettings
  from specdec import Generator as Generator
  from specdec import Job as Job
  from specdec import load as load
  from specdec import Plan as Plan
  from specdec import TextGeneration as TextGeneration

  warnings.warn(
    'import specdec instead of models, whose names it has: specdec.load, ...',
    FutureWarning,
    stacklevel=2,
  )
  __path__ = []
