"""Decode loops compiled for accelerators that need not be present, counted."""
