"""Ctrl-C once: finish the step. Twice: stop now."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class StopFlag:
    """Set by the first signal; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_set = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        logger.warning("%s: finishing this step; once more stops now", signal.Signals(number).name)


@contextmanager
def finish_on_signal(*signals: signal.Signals) -> Iterator[StopFlag]:
    """While inside, these signals (default: SIGINT and SIGTERM) ask to finish instead of interrupting."""
    stop = StopFlag()
    numbers = signals or (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
