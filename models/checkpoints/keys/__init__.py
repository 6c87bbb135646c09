"""Keys of configurations, and parts of tensors that are stored as one."""
