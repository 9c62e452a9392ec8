"""Speculation of the embedded engine, `[inference.speculation]`: drafts are copied from what sequences already have."""
