"""Model families in Flax NNX, the Hugging Face bridge, and text in, text out.

`models.load` is where to begin.
"""

from models.drafters import DraftSettings
from models.generator import Generator
from models.generator import load
from models.plan import Plan
from models.text_generation import TextGeneration

__all__ = ('DraftSettings', 'Generator', 'Plan', 'TextGeneration', 'load')
