"""Model families in Flax NNX, the Hugging Face bridge, and text in, text out.

`models.load` is where to begin.
"""

from models.text.drafters import DraftSettings
from models.text.generator import Generator
from models.text.generator import load
from models.text.plan import Plan
from models.text.result import TextGeneration

__all__ = ('DraftSettings', 'Generator', 'Plan', 'TextGeneration', 'load')
