"""Checkpoints in the formats of Hugging Face, read and written."""
