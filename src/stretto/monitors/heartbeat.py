"""A GET request after every step: a service that hears none for a while alarms somebody."""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base.paths import RunDir
from stretto.config.sections.monitors import HeartbeatSection

logger = logging.getLogger(__name__)
TIMEOUT_S = 10.0


class HeartbeatMonitor:
    """A request that fails is tried again with the next step: a service that is away for a while ends nothing."""

    def __init__(self, section: HeartbeatSection) -> None:
        self._section = section
        self._next_at = 0.0
        self._is_failing = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + self._section.min_interval_s
        try:
            urllib.request.urlopen(self._section.url, timeout=TIMEOUT_S).close()
            self._is_failing = False
        except (OSError, ValueError) as error:
            if not self._is_failing:
                logger.warning("monitors.heartbeat.url = %s: %s", self._section.url, error)
            self._is_failing = True

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A heartbeat has no content."""

    def close(self) -> None:
        """Nothing is open between two requests."""


def build(
    section: HeartbeatSection, run_dir: RunDir, role: str, run_name: str, resumed_step: int | None
) -> HeartbeatMonitor:
    """Build the monitor."""
    return HeartbeatMonitor(section)
