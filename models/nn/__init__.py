"""Model families in Flax NNX, and the layers that they are made of."""
