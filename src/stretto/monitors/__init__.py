"""Where metrics are written: always to `metrics.jsonl`, and to trackers that are configured."""

from stretto.monitors.base import Monitors, build_monitors
from stretto.monitors.file import read_metrics

__all__ = ["Monitors", "build_monitors", "read_metrics"]
