"""The first Ctrl-C ends training after the current step, the second one stops it at once.

SIGUSR2, which a job sends to all of its processes, asks for the first; however often it comes.
"""

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
        if self.is_set and number == signal.SIGUSR2:
            return
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        logger.warning("%s: finishing this step; send it again to stop now", signal.Signals(number).name)


@contextmanager
def stop_on_signal(*signals: signal.Signals) -> Iterator[StopFlag]:
    """A context in which signals (default: SIGINT, SIGTERM) set a StopFlag."""
    stop = StopFlag()
    numbers = signals or (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
