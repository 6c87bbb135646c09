"""Matrices of weights, the formats that they are stored in, and products."""
