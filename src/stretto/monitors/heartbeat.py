"""A GET request after every step, for a service that raises an alarm when requests stop."""

from __future__ import annotations

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from stretto.config.sections.monitors import HeartbeatSection
from stretto.monitors.monitor import Monitor, Source

logger = logging.getLogger(__name__)
TIMEOUT_S = 10.0


class HeartbeatMonitor(Monitor):
    """Sends the requests; the next step tries again after a failure, which is logged once."""

    def __init__(self, section: HeartbeatSection, source: Source) -> None:
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
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # an open socket
            if not self._is_failing:
                logger.warning("monitors.heartbeat.url = %s: %s", self._section.url, error)
            self._is_failing = True
