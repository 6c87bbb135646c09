"""Drafting heads from folders and GGUF files."""

from models.checkpoints.heads.heads import load
from models.checkpoints.heads.heads import locate
from models.checkpoints.heads.heads import save

__all__ = ('load', 'locate', 'save')
