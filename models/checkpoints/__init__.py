"""Reads and writes checkpoints in the format of Hugging Face."""
