"""vLLM as an engine: its command, plugins and routes, and one function for each fault or missing feature."""
