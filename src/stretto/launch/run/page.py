"""The page beside a run: `stretto view RUN` in a process of its own, which ends with the launcher.

The launcher opens the port and prints the address at once. The process imports the page when a browser connects, which
waits for it: a run at which nobody looks does not pay for that. The run does not need the page: it goes on if the page
does not start or dies.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stretto.base import process
from stretto.base.paths import RunDir
from stretto.base.ports import open_near
from stretto.base.rundir import JOB_VAR

logger = logging.getLogger(__name__)

VARIABLE = "STRETTO_VIEW"
"""Set to 0, runs that are started from this shell have no page."""
HOST, PORT = "127.0.0.1", 8765
_END_S = 2.0
# Runs in the page's process until the first browser connects.
_AWAIT = """
import os, select, sys
select.select([int(sys.argv[1])], [], [])
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@contextmanager
def beside(run: RunDir, *, is_wanted: bool) -> Iterator[str | None]:
    """Context in which the run's page is served; yields its address.

    Without a page, in a scheduler's job (no browser runs on that machine), or if no port is free, it yields None.
    """
    if not is_wanted or os.environ.get(VARIABLE) == "0" or JOB_VAR in os.environ:
        yield None
        return
    listener = open_near(HOST, PORT)
    if listener is None:
        yield None
        return
    with listener:  # closed here, so that browsers are refused and do not wait if the page's process dies
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        popen = _start(run, listener)
    try:
        yield None if popen is None else address
    finally:
        if popen is not None:
            _end(popen)


def _start(run: RunDir, listener: socket.socket) -> subprocess.Popen[bytes] | None:
    fd = str(listener.fileno())
    view = ["-P", "-m", "stretto", "view", str(run), "--listen-fd", fd]
    argv = [sys.executable, "-I", "-S", "-c", _AWAIT, fd, *view]
    run.logs.mkdir(parents=True, exist_ok=True)
    try:
        with run.log("view").open("ab") as output:
            return subprocess.Popen(
                process.bound(argv),
                env={**os.environ, **process.thread_env(1)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the launcher, which may have a step to finish
                pass_fds=(listener.fileno(),),
            )
    except OSError as error:
        logger.warning("no page beside this run: %s", error)
        return None


def _end(popen: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        popen.terminate()
    try:
        popen.wait(_END_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
