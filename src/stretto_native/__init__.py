"""Kernels in C for CPUs, of the engine's pass and of the training step, compiled on the machine that runs them."""
