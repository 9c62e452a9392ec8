"""Whole runs. That this file is here lets the folders below import runs.py and envs.py."""
