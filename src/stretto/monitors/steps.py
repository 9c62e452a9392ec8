"""Times and tokens of a trainer's steps, as metrics."""

from __future__ import annotations

import time
from collections import deque

NUM_STEPS = 10


class Throughput:
    """Tokens per second over the last NUM_STEPS steps, including waiting, without padding."""

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


class StepClock:
    """Measures the steps of an `rl` trainer; the first step begins when it is built."""

    def __init__(self) -> None:
        self._throughput = Throughput()
        self._total_tokens = 0
        self._step_started_at = time.perf_counter()

    def end_step(self, *, num_tokens: int, num_micro_batches: float, wait_s: float, train_s: float) -> dict[str, float]:
        """The metrics of a step that ends now, over all ranks; wait_s: how long it waited for its batch."""
        now = time.perf_counter()
        time_s, self._step_started_at = now - self._step_started_at, now
        self._total_tokens += num_tokens
        return {
            "batch/tokens": num_tokens,
            "batch/micro_batches": num_micro_batches,
            "progress/total_tokens": self._total_tokens,
            "perf/throughput": self._throughput.add(num_tokens, time_s),
            "time/step": time_s,
            "time/wait_for_batch": wait_s,
            "time/train": train_s,
        }
