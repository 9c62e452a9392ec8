"""Versions of the weights in the engines: loaded in order, checked, and on GPUs shared with a trainer."""
