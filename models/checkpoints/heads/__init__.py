"""Drafting heads from folders and GGUF files."""

from specdec.models.checkpoints.heads.heads import load as load
from specdec.models.checkpoints.heads.heads import locate as locate
from specdec.models.checkpoints.heads.heads import save as save
