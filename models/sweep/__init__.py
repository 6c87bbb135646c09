"""Plain, chain and staged decoding over one axis at a time, and predicted."""
