"""Versions of the weights in the engines: loaded in order, checked, and in turns with a trainer on the same GPUs."""
