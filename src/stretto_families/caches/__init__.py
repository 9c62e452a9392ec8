"""What the embedded engine keeps of sequences, where that is not keys and values."""
