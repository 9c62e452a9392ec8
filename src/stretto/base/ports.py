"""TCP ports between choosing and listening: two runs that start together must not choose the same ones.

A launcher knows a port is free long before the process that will listen on it has started. `PortClaims`
holds a lock per port for as long as the run lives; other launchers of this user take another port
meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path

from stretto.base.errors import ConfigError


class PortClaims:
    """Ports this process has set aside. They are given back by close(), or when the process ends."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path(tempfile.gettempdir()) / f"stretto-ports-{os.getuid()}"
        self._fds: dict[int, int] = {}

    def claim(self, host: str, port: int) -> bool:
        """Set a port aside; False when somebody listens on it or has set it aside, this object included."""
        if port in self._fds or not is_free(host, port):
            return False
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._directory / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._fds[port] = fd
        return True

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def is_free(host: str, port: int) -> bool:
    """Whether this machine can listen on a port now.

    Raises: ConfigError when the host is no address of this machine.
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


def is_own_address(host: str) -> bool:
    """Whether this machine has this address: whether one could listen on it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False
