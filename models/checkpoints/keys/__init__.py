"""Keys of configurations: which are read, without effect, or refused."""
