"""One `log(step, metrics)` for every place where metrics go; none of them can stop or stall a run.

The metrics file is written at once by the caller (tens of microseconds). Trackers (`wandb`, `tensorboard`,
`trackio`) are built and fed by a thread of their own each, through a bounded queue, so that neither their
seconds of start-up nor a slow network is felt by the loop that logs. A monitor that raises is dropped with
one error line. What a tracker is lies in its own file; `file.py` holds the format of the metrics file and its
reader.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.monitors import MonitorsSection
from stretto.monitors import tensorboard, trackio, wandb
from stretto.monitors.file import MetricsFile

logger = logging.getLogger(__name__)

QUEUE_ROWS = 10_000
CLOSE_TIMEOUT_S = 30.0


class Monitor(Protocol):
    """One place where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Monitors:
    """Every monitor of one process. Logging never raises and never waits for a tracker."""

    def __init__(self, monitors: dict[str, Monitor]) -> None:
        self._monitors = monitors

    @property
    def names(self) -> list[str]:
        """Monitors that are still on."""
        return list(self._monitors)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step; several calls for one step add up to one row for a reader."""
        for name, monitor in list(self._monitors.items()):
            try:
                monitor.log(step, metrics)
            except Exception as error:
                self._drop(name, error)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write out what is still queued, waiting at most `timeout_s` in all."""
        deadline = time.monotonic() + timeout_s
        for name, monitor in list(self._monitors.items()):
            try:
                if isinstance(monitor, Background):
                    monitor.close(max(deadline - time.monotonic(), 0.1))
                else:
                    monitor.close()
            except Exception as error:
                self._drop(name, error)
        self._monitors.clear()

    def _drop(self, name: str, error: Exception) -> None:
        logger.error("monitor %s failed and is off from here on: %s: %s", name, type(error).__name__, error)
        self._monitors.pop(name, None)


class Background:
    """A tracker that lives in a thread. States: building -> running -> closed, or failed from any of them.

    Only the thread touches the tracker. The next `log` or `close` after a failure raises its cause.
    """

    def __init__(self, name: str, build: Callable[[], Monitor]) -> None:
        self.name = name
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_ROWS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(build,), name=f"monitor-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._error:
            raise self._error
        try:
            self._rows.put_nowait((step, dict(metrics)))
        except queue.Full:
            raise RuntimeError(f"{QUEUE_ROWS} rows wait for it; it is stuck or far too slow") from None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            self._rows.put(None, timeout=timeout_s)
        except queue.Full:
            raise TimeoutError(f"not done after {timeout_s:.0f} s; its last rows are lost") from None
        self._thread.join(max(deadline - time.monotonic(), 0.1))
        if self._error:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"not done after {timeout_s:.0f} s; its last rows are lost")

    def _run(self, build: Callable[[], Monitor]) -> None:
        try:
            monitor = build()
            while (row := self._rows.get()) is not None:
                monitor.log(*row)
            monitor.close()
        except Exception as error:
            self._error = error


def build_monitors(
    section: MonitorsSection, run_dir: RunDir, role: str, run_name: str, *, resumed_step: int | None = None
) -> Monitors:
    """The metrics file of `role` and every tracker that has a section.

    resumed_step: the step a resumed run continues after; rows of later steps that an earlier life of the run
    wrote are superseded. Raises: ConfigError when a tracker's package is missing.
    """
    trackers: dict[str, Callable[[], Monitor]] = {}
    for name, module in (("wandb", wandb), ("tensorboard", tensorboard), ("trackio", trackio)):
        settings = getattr(section, name)
        if settings is None:
            continue
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"[monitors.{name}] needs the package {name}, which is not installed; "
                f"pip install 'stretto[{name}]' or remove the section."
            )
        trackers[name] = lambda m=module, s=settings: m.build(s, run_dir, role, run_name, resumed_step)
    monitors: dict[str, Monitor] = {}
    try:
        monitors["file"] = MetricsFile(run_dir.metrics(role), resumed_step=resumed_step)
    except OSError as error:
        logger.error("monitor file failed and is off from here on: %s", error)
    monitors.update({name: Background(name, build) for name, build in trackers.items()})
    return Monitors(monitors)
