"""Model families in Flax NNX, and the bridge to Hugging Face folders."""
