"""Model families in Flax NNX."""
