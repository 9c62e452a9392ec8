"""`stretto view [RUN ...]`: serves the page until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from stretto.base.errors import ConfigError
from stretto.base.ports import in_url, open_near
from stretto.view import state
from stretto.view.page.app import build
from stretto.view.page.library import Library

HOST, PORT = "127.0.0.1", 8765
NICENESS = 19
"""The page must not take CPU time from a run on this machine."""
_SHUTDOWN_S = 0.5


def view(words: Sequence[str]) -> int:
    """Serve the page of some runs."""
    parser = argparse.ArgumentParser(
        prog="stretto view",
        description="Show runs in a browser: live or finished ones, read from their directories.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", nargs="*", type=Path, help="run directories, or directories that hold runs (default: outputs)"
    )
    parser.add_argument(
        "--host",
        default=HOST,
        help=f"address to listen at ({HOST}); any other needs the token that is printed",
    )
    parser.add_argument("--port", type=int, help=f"port ({PORT}, or the next that is free; 0: any)")
    parser.add_argument(
        "--listen-fd", type=int, help=argparse.SUPPRESS
    )  # passed by a launcher, which has printed the address
    given = parser.parse_args(list(words))
    os.nice(NICENESS)
    places = given.run or [Path("outputs")]
    if not state.find(places):
        raise ConfigError(
            f"{', '.join(map(str, places))}: no run there; a run is a directory with configs/run.json."
        )
    if given.listen_fd is not None:
        asyncio.run(serve(Library(places), socket.socket(fileno=given.listen_fd), ""))
        return 0
    listener = listen(given.host, given.port)
    token = "" if is_loopback(given.host) else secrets.token_urlsafe(24)
    print(f"view  {address(listener, token)}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Library(places), listener, token))
    return 0


async def serve(library: Library, listener: socket.socket, token: str) -> None:
    """Answer requests until SIGTERM or Ctrl-C."""
    runner = web.AppRunner(build(library, token), access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
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
        return socket.create_server(
            (host, port or 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at --host {host}, --port {port or 'any'}: {error}; give an address of this machine, or "
            "another port."
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def address(listener: socket.socket, token: str) -> str:
    """What to type into a browser."""
    host, port = listener.getsockname()[:2]
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else in_url(host)
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


if __name__ == "__main__":
    sys.exit(view(sys.argv[1:]))
