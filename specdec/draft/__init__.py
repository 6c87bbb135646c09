"""Drafters: stages, growth of the tree, and one module per kind of scorer."""
