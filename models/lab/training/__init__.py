"""Training of small models and building of n-gram tables."""
