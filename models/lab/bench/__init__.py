"""Measures decoding: time, exactness, and what peers do."""
