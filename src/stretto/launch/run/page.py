"""The page beside a run: `stretto view RUN` in a process of its own, which ends with the launcher.

The launcher opens the port and says the address at once; a browser that comes before the process waits for it. The run
needs nothing of the page: if it does not start or dies, nothing else happens.
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
"""Set to 0: no run started from this shell has a page."""
HOST, PORT = "127.0.0.1", 8765
_END_S = 2.0


@contextmanager
def beside(run: RunDir, *, is_wanted: bool) -> Iterator[str | None]:
    """Context in which the run's page is served; its address.

    None if it is not wanted, in a scheduler's job (nobody sits at that machine), or where no port is free.
    """
    if not is_wanted or os.environ.get(VARIABLE) == "0" or JOB_VAR in os.environ:
        yield None
        return
    listener = open_near(HOST, PORT)
    if listener is None:
        yield None
        return
    with listener:  # the page's process has its own: if it dies, browsers are refused and do not wait
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        popen = _start(run, listener)
    try:
        yield None if popen is None else address
    finally:
        if popen is not None:
            _end(popen)


def _start(run: RunDir, listener: socket.socket) -> subprocess.Popen[bytes] | None:
    argv = [sys.executable, "-P", "-m", "stretto", "view", str(run), "--listen-fd", str(listener.fileno())]
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
