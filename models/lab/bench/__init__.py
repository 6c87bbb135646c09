"""Measures decoding on this machine."""
