"""Reserve TCP ports, so that two runs that start at the same time do not choose the same ones.

A launcher chooses a port long before the process that will listen on it has started. `PortClaims` reserves
the port as long as the run lives, and other launchers of this user choose another one. A reservation is an
abstract socket: it is no file, and it disappears with its process.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import urllib.request
from contextlib import AbstractContextManager
from http.client import HTTPResponse

from stretto.base.errors import ConfigError

SCOPE = f"stretto-port-{os.getuid()}"
"""Prefix of the sockets' names: reservations are shared by the launchers of one user."""


class PortClaims:
    """Ports that this process has reserved, until close() or the end of the process."""

    def __init__(self, scope: str | None = None) -> None:
        self._scope = SCOPE if scope is None else scope
        self._names: dict[int, socket.socket] = {}

    def claim(self, host: str, port: int) -> bool:
        """Reserve a port; False if it is in use or already reserved, also by this object."""
        if port in self._names or not is_free(host, port):
            return False
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if sys.platform == "linux":  # other systems have no abstract sockets and no launcher
                name.bind(f"\0{self._scope}-{port}")
        except OSError:
            name.close()
            return False
        self._names[port] = name
        return True

    def close(self) -> None:
        for name in self._names.values():
            name.close()
        self._names.clear()


def in_url(host: str) -> str:
    """A host in the form that URLs have: an IPv6 address in brackets, everything else unchanged."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_ipv6(host: str) -> bool:
    """Whether a host, given as an address or a name, has only IPv6 addresses."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ":" in host
    return all(family == socket.AF_INET6 for family, *_ in infos)


def is_free(host: str, port: int) -> bool:
    """Whether this machine can listen on a port now.

    Raises: ConfigError if the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or isinstance(error, socket.gaierror):
                raise ConfigError(
                    f"cannot listen on {host!r}: {error.strerror}; give an address of this machine."
                ) from error
            return False
    return True


def open_near(host: str, port: int, num_tried: int = 20) -> socket.socket | None:
    """A listening socket at the first free port from `port` on, else at any port; None if the machine cannot listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for each in [*range(port, port + num_tried), 0]:
        try:
            return socket.create_server((host, each), family=family)
        except OSError:
            continue
    return None


def is_own_address(host: str) -> bool:
    """Whether `host` is an address of this machine, that is, a process can listen on it."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_url(request: str | urllib.request.Request, timeout_s: float) -> AbstractContextManager[HTTPResponse]:
    """Send a request to a server of the run, never through the environment's proxy, which leads out of the cluster.

    Raises: OSError (urllib.error.HTTPError for a status from 400 on).
    """
    return _DIRECT.open(request, timeout=timeout_s)


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the route to another host; None without a route or such a name. Sends nothing."""
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
    except OSError:
        pass
    return None
