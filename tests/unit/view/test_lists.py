"""`stretto runs`, `stretto show` and `stretto rollouts`: as text and as JSON."""
