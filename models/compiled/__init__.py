"""Compiles decoding for accelerators that need not be there, and counts."""
