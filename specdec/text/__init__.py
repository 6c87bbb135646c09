"""Texts on the host and automata over them: constraints and stop strings."""
