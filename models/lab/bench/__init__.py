"""Measures decoding: time, exactness, acceptance, and what peers do."""
