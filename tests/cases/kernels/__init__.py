"""Kernels against their references, and what they choose from."""
