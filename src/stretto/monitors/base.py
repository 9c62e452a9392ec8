"""One `log(step, metrics)` for all monitors; none of them can stop or stall a run.

The metrics file is written at once by the caller (tens of microseconds). Each tracker (`wandb`, `tensorboard`,
`trackio`) has a thread that builds it and feeds it from a bounded queue, so that neither its seconds of start-up nor a
slow network delays the loop that logs. A monitor that raises is removed with one error line. Each tracker has a file
of its own; `file.py` defines the format of the metrics file and reads it.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.paths import RunDir
from stretto.config.sections.monitors import MonitorsSection
from stretto.monitors import heartbeat, prometheus, tensorboard, trackio, wandb
from stretto.monitors.file import MetricsFile
from stretto.monitors.tables import TableRow, Values

logger = logging.getLogger(__name__)

QUEUE_ROWS = 10_000
CLOSE_TIMEOUT_S = 30.0


class Monitor(Protocol):
    """One place where metrics are written."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None: ...

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None: ...

    def close(self) -> None: ...


class Monitors:
    """Every monitor of one process. Logging never raises and never waits for a tracker."""

    def __init__(self, monitors: dict[str, Monitor]) -> None:
        self._monitors = monitors

    @property
    def names(self) -> list[str]:
        """The names of monitors that have not failed."""
        return list(self._monitors)

    @property
    def has_trackers(self) -> bool:
        """Is there a monitor that shows tables and histograms?"""
        return any(isinstance(monitor, BackgroundMonitor) for monitor in self._monitors.values())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step; `read_metrics` merges several calls for one step into one row."""
        for name, monitor in list(self._monitors.items()):
            try:
                monitor.log(step, metrics)
            except Exception as error:
                self._drop(name, error)

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        """Record rows of text, which have the same keys, where a tracker shows such; the metrics file has none.

        Under the key `images`, if there is one, each row has PNG files; those are kept in RUN/metrics/images too.
        """
        for monitor_name, monitor in list(self._monitors.items()) if rows else ():
            try:
                monitor.log_table(step, name, rows)
            except Exception as error:
                self._drop(monitor_name, error)

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        """Record how the values of each name are distributed, where a tracker shows it; the metrics file does not."""
        for name, monitor in list(self._monitors.items()):
            try:
                monitor.log_histograms(step, values)
            except Exception as error:
                self._drop(name, error)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write all queued rows and close every monitor, in at most `timeout_s` together."""
        deadline = time.monotonic() + timeout_s
        for name, monitor in list(self._monitors.items()):
            try:
                if isinstance(monitor, BackgroundMonitor):
                    monitor.close(max(deadline - time.monotonic(), 0.1))
                else:
                    monitor.close()
            except Exception as error:
                self._drop(name, error)
        self._monitors.clear()

    def _drop(self, name: str, error: Exception) -> None:
        what = "monitor %s failed and is off from now on: %s: %s"
        trace = None if isinstance(error, StrettoError | OSError) else error
        logger.error(what, name, type(error).__name__, error, exc_info=trace)
        self._monitors.pop(name, None)


class BackgroundMonitor:
    """A tracker in a thread of its own. States: building -> running -> closed; any of them -> failed.

    Only the thread uses the tracker. After a failure, the next `log` or `close` raises its cause.
    """

    def __init__(self, name: str, build: Callable[[], Monitor]) -> None:
        self.name = name
        self._rows: queue.Queue[Callable[[Monitor], None] | None] = queue.Queue(QUEUE_ROWS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(build,), name=f"monitor-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = dict(metrics)
        self._put(lambda monitor: monitor.log(step, row))

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        kept = list(rows)
        self._put(lambda monitor: monitor.log_table(step, name, kept))

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        kept = dict(values)
        self._put(lambda monitor: monitor.log_histograms(step, kept))

    def _put(self, write: Callable[[Monitor], None]) -> None:
        if self._error:
            raise self._error
        try:
            self._rows.put_nowait(write)
        except queue.Full:
            raise RuntimeError(f"{QUEUE_ROWS} rows are queued; the tracker is stuck or too slow") from None

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
            while (write := self._rows.get()) is not None:
                write(monitor)
            monitor.close()
        except Exception as error:
            self._error = error


TRACKERS = {"wandb": wandb, "tensorboard": tensorboard, "trackio": trackio}
"""By the name of their section, which is that of their package too."""
OWN_TRACKERS = {"heartbeat": heartbeat, "prometheus": prometheus}
"""Those that need no package."""


def find_trackers(section: MonitorsSection) -> list[str]:
    """The trackers that have a section.

    Raises: ConfigError if the package of one is missing.
    """
    names = [name for name in TRACKERS if getattr(section, name) is not None]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"[monitors.{name}] needs the package {name}, which is not installed; "
                f"run pip install 'stretto[{name}]' (in a clone: pip install -e '.[{name}]') or remove the section."
            )
    return names


def build_monitors(
    section: MonitorsSection, run_dir: RunDir, role: str, run_name: str, *, resumed_step: int | None = None
) -> Monitors:
    """Build the metrics file of `role` and every tracker that has a section.

    resumed_step: the step after which a resumed run continues; rows of later steps from earlier incarnations of the
    run are superseded. Raises: ConfigError if a tracker's package is missing.
    """
    trackers: dict[str, Callable[[], Monitor]] = {}
    own = [name for name in OWN_TRACKERS if getattr(section, name) is not None]
    for name in (*find_trackers(section), *own):
        module, settings = (TRACKERS | OWN_TRACKERS)[name], getattr(section, name)
        trackers[name] = lambda m=module, s=settings: m.build(s, run_dir, role, run_name, resumed_step)
    monitors: dict[str, Monitor] = {}
    try:
        monitors["file"] = MetricsFile(run_dir.metrics(role), resumed_step=resumed_step)
    except OSError as error:
        logger.error("monitor file failed and is off from now on: %s", error)
    monitors.update({name: BackgroundMonitor(name, build) for name, build in trackers.items()})
    return Monitors(monitors)
