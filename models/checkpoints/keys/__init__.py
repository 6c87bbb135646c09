"""What checkpoints say of models: keys of configurations, parts of tensors."""
