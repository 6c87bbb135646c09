"""Model families in Flax NNX, the Hugging Face bridge, and text in, text out.

The folder `models/` is imported as `specdec.models`, which is a link to it: a
package of the common name `models` would clash with one of the user's own. What
users need is in `specdec`; `specdec.load` is where to begin.
"""

import os

# Without it transformers advises to install torch when it is imported; only its
# configs and tokenizers are used here.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
