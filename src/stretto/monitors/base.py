"""One `log(step, metrics)` for all monitors; none of them can stop or stall a run.

The metrics file is written at once by the caller (tens of microseconds). Each tracker (`Tracker`) has a thread that
builds it and feeds it from a bounded queue, so that neither its seconds of start-up nor a slow network delays the loop
that logs. A monitor that raises is removed with one error line, but a tracker that cannot start ends the start of a new
run. `file.py` defines the format of the metrics file and reads it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stretto import addons
from stretto.base.errors import ConfigError, StrettoError
from stretto.base.paths import RunDir
from stretto.config.sections.monitors import MonitorsSection
from stretto.monitors.file import MetricsFile
from stretto.monitors.heartbeat import HeartbeatMonitor
from stretto.monitors.monitor import Monitor, Source, TableRow, Tracker, Values
from stretto.monitors.prometheus import PrometheusMonitor

logger = logging.getLogger(__name__)

QUEUE_ROWS = 10_000
CLOSE_TIMEOUT_S = 30.0
MONITOR_CLOSE_S = 10.0
"""For processes that others wait for."""
START_TIMEOUT_S = 60.0


class Monitors:
    """Every monitor of one process. Logging never raises and never waits for a tracker."""

    def __init__(self, monitors: dict[str, Monitor]) -> None:
        self._monitors = monitors

    @property
    def has_trackers(self) -> bool:
        """Whether a monitor may show tables and histograms."""
        return any(isinstance(monitor, BackgroundMonitor) for monitor in self._monitors.values())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step; `read_metrics` merges several calls for one step into one row."""
        self._call_each(lambda monitor: monitor.log(step, metrics))

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        """Show rows, which have the same columns, in trackers that have tables; the metrics file has none.

        PNG files in the column `images` are also written to RUN/metrics/images.
        """
        if rows:
            self._call_each(lambda monitor: monitor.log_table(step, name, rows))

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        """Show how the values of each name are distributed, in trackers that have histograms."""
        self._call_each(lambda monitor: monitor.log_histograms(step, values))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write all queued rows and close every monitor, in at most `timeout_s` together."""
        deadline = time.monotonic() + timeout_s

        def close(monitor: Monitor) -> None:
            if isinstance(monitor, BackgroundMonitor):
                monitor.close(max(deadline - time.monotonic(), 0.1))
            else:
                monitor.close()

        self._call_each(close)
        self._monitors.clear()

    def _call_each(self, call: Callable[[Monitor], None]) -> None:
        """Call every monitor; one that raises is removed."""
        for name, monitor in list(self._monitors.items()):
            try:
                call(monitor)
            except Exception as error:  # a tracker's library may raise anything, which ends no run
                message = "monitor %s failed and is off from now on: %s: %s"
                trace = None if isinstance(error, StrettoError | OSError) else error
                logger.error(message, name, type(error).__name__, error, exc_info=trace)
                self._monitors.pop(name, None)


class BackgroundMonitor(Monitor):
    """A tracker in a thread of its own. States: building -> running -> closed; any of them -> failed.

    Only the thread uses the tracker. After a failure, the next `log` or `close` raises its cause.
    """

    def __init__(self, name: str, build: Callable[[], Monitor]) -> None:
        self.name = name
        self._rows: queue.Queue[Callable[[Monitor], None] | None] = queue.Queue(QUEUE_ROWS)
        self._error: Exception | None = None
        self._is_built = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(build,), name=f"monitor-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = dict(metrics)
        self._put(lambda monitor: monitor.log(step, row))

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        copies = list(rows)
        self._put(lambda monitor: monitor.log_table(step, name, copies))

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        copies = dict(values)
        self._put(lambda monitor: monitor.log_histograms(step, copies))

    def _put(self, write: Callable[[Monitor], None]) -> None:
        if self._error:
            raise self._error
        try:
            self._rows.put_nowait(write)
        except queue.Full:
            raise RuntimeError(f"{QUEUE_ROWS} rows are queued; the tracker is stuck or too slow") from None

    def wait_built(self, timeout_s: float) -> Exception | None:
        """Why the tracker could not start; None if it has started, or still starts after `timeout_s`."""
        return None if not self._is_built.wait(timeout_s) else self._error

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=timeout_s)
            self._thread.join(max(deadline - time.monotonic(), 0.1))
        if self._error:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"not done after {timeout_s:.0f} s; its last rows are lost")

    def _run(self, build: Callable[[], Monitor]) -> None:
        try:
            monitor = build()
            self._is_built.set()
            while (write := self._rows.get()) is not None:
                write(monitor)
            monitor.close()
        except Exception as error:  # raised by the next call, in the thread of the caller
            self._error = error
        finally:
            self._is_built.set()


TRACKERS = "stretto.trackers"
"""The group of entry points with trackers, by the name of their section, which is that of the package they need."""
WITHOUT_PACKAGE: dict[str, Callable[[Any, Source], Monitor]] = {
    "heartbeat": HeartbeatMonitor,
    "prometheus": PrometheusMonitor,
}


def find_trackers(section: MonitorsSection, *, is_fed_here: bool = True) -> dict[str, type[Tracker]]:
    """The trackers that have a section and need a package, by name.

    is_fed_here: False where other machines feed them, whose login is not known here.

    Raises: ConfigError if the package of one is missing, or it needs a key and has none.
    """
    offered = addons.registered(TRACKERS)
    found = {}
    for name in [name for name in type(section).model_fields if name in offered]:
        if (settings := getattr(section, name)) is None:
            continue
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"[monitors.{name}] needs the package {name}, which is not installed; "
                f"run pip install 'stretto[{name}]' (in a clone: pip install -e '.[{name}]') or remove the section."
            )
        found[name] = addons.load(TRACKERS, name, f"[monitors.{name}]")
        if is_fed_here:
            found[name].check_login(settings)
    return found


def build_monitors(
    section: MonitorsSection,
    run_dir: RunDir,
    role: str,
    run_name: str,
    *,
    resumed_step: int | None = None,
    has_trackers: bool = True,
) -> Monitors:
    """Build the metrics file of `role` and every monitor that has a section.

    has_trackers: False for a process whose metrics another one sends to the trackers, so that a run is one run there.

    resumed_step: the step after which a resumed run continues; rows of later steps from earlier incarnations of the
    run are superseded. Raises: ConfigError if a tracker's package is missing, or one cannot start a new run.
    """
    trackers = find_trackers(section) if has_trackers else {}
    source = Source(run_dir, role, run_name, resumed_step)
    monitors: dict[str, Monitor] = {}
    try:
        monitors["file"] = MetricsFile(run_dir.metrics(role), resumed_step=resumed_step)
    except OSError as error:
        logger.error("monitor file failed and is off from now on: %s", error)
    kinds: dict[str, Callable[[Any, Source], Monitor]] = {**trackers, **WITHOUT_PACKAGE}
    for name, kind in kinds.items():
        if (settings := getattr(section, name)) is not None:
            monitors[name] = BackgroundMonitor(name, partial(kind, settings, source))
    if resumed_step is None:
        _check_started(monitors, trackers)
    return Monitors(monitors)


def _check_started(monitors: Mapping[str, Monitor], trackers: Mapping[str, type[Tracker]]) -> None:
    """Wait for trackers to start; one that takes long goes on in its thread.

    Raises: ConfigError with the cause if one cannot start; the others are then closed.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    for name, tracker in trackers.items():
        monitor = monitors[name]
        assert isinstance(monitor, BackgroundMonitor)
        error = monitor.wait_built(max(deadline - time.monotonic(), 0.0))
        if error is None:
            continue
        Monitors({other: each for other, each in monitors.items() if other != name}).close()
        cause = f"{type(error).__name__}: {error}".rstrip(". \n")
        advice = f" ({name.upper()}_MODE=offline writes to files)" if tracker.service else ""
        raise ConfigError(
            f"[monitors.{name}] cannot start: {cause}; mend this{advice} or remove the section."
        ) from error
