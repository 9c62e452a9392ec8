"""Weights to engines by broadcast over a network, by the memory of a common GPU, and as changes alone."""
