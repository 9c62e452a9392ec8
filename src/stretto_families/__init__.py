"""Families of models that few use, a file each; the network that computes them is the core's."""
