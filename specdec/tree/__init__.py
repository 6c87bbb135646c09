"""The token tree, fixed topologies, and the best topology for given rates."""
