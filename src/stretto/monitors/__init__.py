"""Where numbers go: `metrics.jsonl` always, trackers as extras."""

from stretto.monitors.base import Monitors, build_monitors
from stretto.monitors.file import read_metrics

__all__ = ["Monitors", "build_monitors", "read_metrics"]
