"""Kernels of our own for CPU: products, attention and norms of few rows."""
