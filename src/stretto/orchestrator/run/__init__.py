"""A run in motion: its parts, the loop over batches and versions, and what is told about it."""
