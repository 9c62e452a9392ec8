"""TensorBoard event files under RUN/tensorboard/<role>, written without TensorFlow or torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from stretto.base.paths import RunDir
from stretto.config.sections.monitors import TensorboardSection


class TensorboardMonitor:
    def __init__(self, run_dir: RunDir, role: str, resumed_step: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(run_dir.path / "tensorboard" / role))
        if resumed_step is not None:  # the viewer drops later steps of earlier incarnations
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(resumed_step + 1, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if not isinstance(value, str)
        ]
        self._add(step, summary=self._summary.Summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


def build(
    section: TensorboardSection, run_dir: RunDir, role: str, run_name: str, resumed_step: int | None
) -> TensorboardMonitor:
    """Build the monitor; takes a second to import the package."""
    return TensorboardMonitor(run_dir, role, resumed_step)
