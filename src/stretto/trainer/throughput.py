"""Tokens per second over wall time, without padding, averaged over the last steps."""

from __future__ import annotations

from collections import deque

NUM_STEPS = 10


class Throughput:
    """Tokens per second over the last NUM_STEPS steps, including waiting."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)

    def add(self, num_tokens: int, time_s: float) -> float:
        """Add a step; tokens per second including it."""
        self._steps.append((num_tokens, time_s))
        return self.per_second

    @property
    def per_second(self) -> float:
        time_s = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / time_s if time_s > 0 else 0.0
