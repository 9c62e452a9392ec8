"""Families of models that few use, or that have other mixers than attention, a file each.

The network around the mixers is that of the core (models/decoder.py).
"""
