"""Optimizers that few use: Muon, and the signs of gradients."""
