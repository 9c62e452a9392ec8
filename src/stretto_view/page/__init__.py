"""The live page: what `stretto view` serves."""
