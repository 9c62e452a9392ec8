"""Mistakes in real packages as tasks: making them, and the environment that has them repaired."""
