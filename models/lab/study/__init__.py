"""Measures decoding: time, exactness, acceptance on known texts."""
