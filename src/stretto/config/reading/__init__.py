"""Reads files and command lines into values with their places; load.py makes a root of them."""
