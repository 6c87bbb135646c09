"""Drafting heads from folders and GGUF files."""

from models.checkpoints.heads.heads import load as load
from models.checkpoints.heads.heads import locate as locate
from models.checkpoints.heads.heads import save as save
