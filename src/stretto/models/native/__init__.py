"""Kernels in C for float32 on a CPU, compiled on the machine that runs them (kernels.py)."""
