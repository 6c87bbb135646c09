"""Drafting heads from folders and GGUF files."""
