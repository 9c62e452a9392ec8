"""One logging set-up for every process: text or JSON lines that begin with the process's role.

Lines go to standard error. Under the launcher that is already RUN/logs/<role>.log; a process started alone
writes to its terminal and to the same file. Modules just use `logging.getLogger(__name__)`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from stretto.base.paths import RunDir
from stretto.base.status import adopt_pipe, harmless, report

_NOISY = ("asyncio", "aiohttp.access", "matplotlib", "PIL", "urllib3", "filelock", "httpx")
_MAX_ECHOED_CHARS = 600
_WARNING_PERIOD_S = 60.0


class _TextFormatter(logging.Formatter):
    """`12:03:04.120 INFO    trainer | message`, with a traceback below it."""

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {role} | %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))  # messages quote what models and environments have written


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self.role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _ConsoleEcho(logging.Handler):
    """Shows warnings at the run's console, too; each kind (the text without values) once."""

    def __init__(self, role: str) -> None:
        super().__init__(logging.WARNING)
        self._role, self._echoed = role, set[tuple[str, str]]()

    def emit(self, record: logging.LogRecord) -> None:
        kind = (record.name, str(record.msg))
        if kind not in self._echoed:
            self._echoed.add(kind)
            text = record.getMessage().partition("\n")[0][:_MAX_ECHOED_CHARS]
            report("warning", role=self._role, text=text)


def setup(
    role: str, run_dir: RunDir | None, level: str = "info", json_logging: bool = False, *, is_quiet: bool = False
) -> None:
    """Send log lines to standard error and RUN/logs/<role>.log; call once, first thing in main.

    is_quiet: write to the file only. A crash in native code prints every thread's stack; `kill -USR1 <pid>` writes
    them to the log, or to standard error if there is none, without ending the process.
    """
    formatter = _JsonFormatter(role) if json_logging else _TextFormatter(role)
    handlers: list[logging.Handler] = [] if is_quiet else [logging.StreamHandler(sys.stderr)]
    if run_dir is not None and not _is_stderr(run_dir.log(role)):
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(run_dir.log(role)))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    if adopt_pipe():
        handlers.append(_ConsoleEcho(role))
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    try:
        faulthandler.enable(file=2)
        # To the log, because `stretto stacks` reads the stacks there.
        streams = [handler.stream for handler in handlers if isinstance(handler, logging.FileHandler)]
        files = [stream.fileno() for stream in streams if stream is not None]
        faulthandler.register(signal.SIGUSR1, file=files[0] if files else 2)
    except (OSError, ValueError):  # standard error has no file descriptor: the embedding program replaced it
        logging.getLogger(__name__).debug("no native stack dumps: standard error is not a file")


def _is_stderr(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), path.stat())
    except OSError:
        return False


class RateLimitedLogger:
    """Logs at most one warning per period, with the number of those dropped; for warnings that outsiders can cause."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_at = 0.0
        self._num_dropped = 0

    def warning(self, text: str, *values: object) -> None:
        """Log `text % values`, or only count it if the last one is too recent."""
        if (now := time.monotonic()) < self._next_at:
            self._num_dropped += 1
            return
        if self._num_dropped:
            text += f" ({self._num_dropped} more like it in between)"
        self._next_at, self._num_dropped = now + _WARNING_PERIOD_S, 0
        self._logger.warning(text, *values)
