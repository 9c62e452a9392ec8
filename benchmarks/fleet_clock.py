"""A clock for engines: they sample so many tokens per second and no more, as on a device whose speed is known.

Two cores cannot show that more engines sample more. With engines that mostly wait they can, as long as the computing of
all is less than that.
"""

from __future__ import annotations

import os
import sys
import time

RATE_VAR = "STRETTO_TOKENS_PER_S"
LATE_S = 0.3
"""Longest delay that is caught up: of a core that another process has taken meanwhile."""


def install() -> None:
    """Slow the engine of this process down; nothing in a process that is no engine."""
    if RATE_VAR not in os.environ or "inference" not in sys.orig_argv:
        return
    from stretto.inference.embedded.core import EngineCore

    sample, rate = EngineCore._sample_tokens, float(os.environ[RATE_VAR])
    due = 0.0

    def paced(core, batch, logits, finished):
        nonlocal due
        sample(core, batch, logits, finished)
        now = time.perf_counter()
        due = max(due, now - LATE_S) + len(logits) / rate
        time.sleep(max(0.0, due - now))

    EngineCore._sample_tokens = paced
