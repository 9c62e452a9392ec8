"""What is known about each family of models, without torch: its traits, its config.json, and its weights' names.

A family is one file in `own/`. Families that only transformers computes are rows of others.py.
"""
