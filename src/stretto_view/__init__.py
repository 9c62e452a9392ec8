"""The contents of a run's directory: as rows for scripts, as text in a terminal, as a page in a browser."""
