"""One logging set-up for every process: text or JSON lines that begin with the process's role.

Lines go to standard error. Under the launcher that is already RUN/logs/<role>.log; a process started alone
writes to its terminal and to the same file. Modules take `logging.getLogger(__name__)` and know nothing of
this.
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

_NOISY = ("asyncio", "aiohttp.access", "matplotlib", "PIL", "urllib3", "filelock", "httpx")


class _TextFormatter(logging.Formatter):
    """`12:03:04.120 INFO    trainer | message`, tracebacks below it."""

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {role} | %(message)s", datefmt="%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self.role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup(
    role: str,
    run_dir: RunDir | None,
    level: str = "info",
    json_logging: bool = False,
    *,
    is_quiet: bool = False,
) -> None:
    """Send log lines to standard error and RUN/logs/<role>.log; call once, first thing in main.

    A quiet process writes to the file alone. Also: a crash in native code prints every thread's stack, and
    so does `kill -USR1 <pid>`, without ending the process.
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
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    try:
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2)
    except (OSError, ValueError):  # standard error has no file descriptor: an embedding program replaced it
        logging.getLogger(__name__).debug("no native stack dumps: standard error is not a file")


def _is_stderr(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), path.stat())
    except OSError:
        return False
