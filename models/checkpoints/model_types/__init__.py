"""One record per model type: what is particular about it."""
