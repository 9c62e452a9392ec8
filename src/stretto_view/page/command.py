"""`stretto view [RUN ...]`: serves the page until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from stretto import state
from stretto.base.errors import ConfigError
from stretto.base.ports import in_url, is_loopback, open_near
from stretto.config.reading.plain import PlainParser
from stretto_view.page.app import build
from stretto_view.page.library import Library

HOST, PORT = "127.0.0.1", 8765
NICENESS = 19
"""The page must not take CPU time from a run on this machine ..."""
FIRST_S = 3.0
"""... but for the seconds after its start, in which somebody waits for the first view."""
_NOT_OURS = (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN)
_LAST_PORT = 65535
_SHUTDOWN_S = 0.5


def view(words: Sequence[str]) -> int:
    """Serve the page of some runs."""
    parser = PlainParser("view", "Show runs in a browser: live or finished ones, read from their directories.")
    parser.add_argument(
        "run", nargs="*", type=Path, help="run directories, or directories that hold runs (default: outputs)"
    )
    parser.add_argument(
        "--host", default=HOST, help=f"address to listen at ({HOST}); any other needs the token that is printed"
    )
    parser.add_argument("--port", type=int, help=f"port ({PORT}, or the next that is free; 0: any)")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="let the page talk to a run's engines and weights; it then asks for the token that is printed",
    )
    parser.add_argument(
        "--listen-fd", type=int, help=argparse.SUPPRESS
    )  # passed by a launcher, which has printed the address
    given = parser.parse_args(list(words))
    places = given.run or [Path("outputs")]
    if not state.find(places):
        raise ConfigError(state.no_runs_text(places))
    if given.listen_fd is not None:
        give_way()
        asyncio.run(serve(build(Library(places)), socket.socket(fileno=given.listen_fd)))
        return 0
    listener = listen(given.host, given.port)
    token = "" if is_loopback(given.host) and not given.chat else secrets.token_urlsafe(24)
    print(f"view  {address(listener, token)}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(build(Library(places), token, has_chat=given.chat), listener))
    return 0


def give_way() -> None:
    """Let every thread of this process, and all that they start, wait for what else computes."""
    has_list = os.path.isdir("/proc/self/task")  # Linux has a priority for each thread
    for thread in map(int, os.listdir("/proc/self/task")) if has_list else [0]:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


async def serve(app: web.Application, listener: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    asyncio.get_running_loop().call_later(FIRST_S, give_way)
    try:
        await web.SockSite(runner, listener).start()
        await ended.wait()
    finally:
        await runner.cleanup()


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket; without a port at the first free one from PORT on.

    Raises: ConfigError if the address is not this machine's or the port is taken.
    """
    if port is None:
        found = open_near(host, PORT)
        if found is not None:
            return found
    try:
        if port is not None and not 0 <= port <= _LAST_PORT:
            raise OverflowError(port)
        return socket.create_server((host, port or 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen at --host {host}, --port {port or 'any'}: {_why(error)}.") from error


def _why(error: OSError | OverflowError) -> str:
    """What is wrong with an address, and what to do."""
    if isinstance(error, OverflowError):
        return "a port is a number from 0 to 65535; give one, or leave --port out"
    if isinstance(error, socket.gaierror) or error.errno in _NOT_OURS:
        return "that is no address of this machine; give 127.0.0.1, 0.0.0.0 for all, or one that `ip addr` shows"
    if error.errno == errno.EADDRINUSE:
        return "another program listens there; give another port, 0 for any, or leave --port out"
    if error.errno == errno.EACCES:
        return "ports below 1024 are for root; give another"
    return f"{error.strerror or error}; give an address of this machine, or another port"


def address(listener: socket.socket, token: str) -> str:
    """What to type into a browser."""
    host, port = listener.getsockname()[:2]
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else in_url(host)
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


if __name__ == "__main__":
    sys.exit(view(sys.argv[1:]))
