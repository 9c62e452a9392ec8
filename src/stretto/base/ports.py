"""Reserve TCP ports, so that two runs that start at the same time do not choose the same ones.

A launcher chooses a port long before the process that will listen on it has started. `PortClaims` reserves
the port as long as the run lives, and other launchers of this user choose another one. A reservation is an
abstract socket: it is no file, and it disappears with its process.

`refusal_of` keeps web pages of other sites, open in a browser on the same machine, away from our HTTP servers:
A browser sends requests of any page to any address, 127.0.0.1 too. Three checks refuse them on every route:

- `Origin` or `Sec-Fetch-Site` say that a page of another site sends the request;
- the body has a type that a page may send to other sites without asking (text, forms), which no client of ours uses;
- `Host` is a name, on a server that asks for no key: another site's name may resolve to this machine, and then the
  browser takes that page for one of ours (DNS rebinding).
"""

from __future__ import annotations

import errno
import fcntl
import io
import ipaddress
import os
import re
import socket
import struct
import sys
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from functools import cache
from http.client import HTTPResponse
from typing import Protocol, overload
from urllib.parse import SplitResult, urlsplit

from stretto.base.errors import ConfigError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
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


def taken_text(key: str, port: int) -> str:
    """A sentence about a port that something else has; key: the setting that gives it."""
    return f"{key} = {port} is taken on this machine (`ss -ltnp | grep :{port}` names by whom)"


def open_near(host: str, port: int, num_tried: int = 20) -> socket.socket | None:
    """A listening socket at the first free port from `port` on, else at any port; None if the machine cannot listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for each in [*range(port, port + num_tried), 0]:
        try:
            return socket.create_server((host, each), family=family)
        except OSError:
            continue
    return None


def unused_port() -> int:
    """A port at which nothing listens now, at any address of this machine; it is not reserved."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def addresses_by_interface() -> dict[str, str]:
    """The first IPv4 address of each network interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine that others may reach."""
    return [address for address in addresses_by_interface().values() if not address.startswith("127.")]


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


def is_same_server(url: str, other: str) -> bool:
    """Whether two URLs are one server, seen from this machine: http://localhost:80 and http://127.0.0.1 are.

    All of 127.0.0.1, ::1 and the names and addresses of this machine are one host; 127.0.0.2 is another one.
    """
    one, two = urlsplit(url), urlsplit(other)
    if _port_of(one) != _port_of(two) or one.hostname == two.hostname:
        return _port_of(one) == _port_of(two)
    return bool(_hosts_of(one.hostname or "") & _hosts_of(two.hostname or ""))


def _port_of(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _hosts_of(host: str) -> frozenset[str]:
    """The host and its addresses; of this machine, all of them."""
    if (found := _resolved(host)) & (own := _own_hosts()):
        return found | own
    return found


@cache
def _own_hosts() -> frozenset[str]:
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname().lower()}
    return frozenset(names | _resolved(socket.gethostname()) | set(own_addresses()))


def _resolved(host: str) -> frozenset[str]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    return frozenset({host.lower(), *(str(address[0]) for *_, address in infos)})


_MAX_ERROR_BYTES = 1 << 16
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_url(request: str | urllib.request.Request, timeout_s: float) -> AbstractContextManager[HTTPResponse]:
    """Send a request to a server of the run, never through the environment's proxy, which leads out of the cluster.

    Raises: OSError (urllib.error.HTTPError for a status from 400 on, with the beginning of its body).
    """
    try:
        answer: HTTPResponse = _DIRECT.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:  # its socket would stay open for as long as somebody holds the error
            body = io.BytesIO(error.read(_MAX_ERROR_BYTES))
        raise urllib.error.HTTPError(error.url, error.code, error.msg, error.headers, body) from None
    return answer


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the route to another host; None without a route or such a name. Sends nothing."""
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return None


# -- requests that pages of other sites send --

_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")
_SENT_BY_FORMS = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
_OWN_SITES = frozenset({"same-origin", "none"})


def is_local(host: str) -> bool:
    """Whether a Host header is localhost or a loopback address: no name server can make other names out of these."""
    return is_loopback(_name_of(host))


def is_loopback(host: str) -> bool:
    """Whether only the machine itself reaches this address."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


class Headers(Protocol):
    """The headers of a request, as a mapping or as the standard library's message."""

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, default: str, /) -> str: ...


def refusal_of(method: str, headers: Headers, *, has_key: bool, is_ip_enough: bool = False) -> tuple[int, str] | None:
    """The status and sentence with which a request is refused, or None if it may pass.

    headers: by lower-case or case-insensitive names. has_key: the server asks for a key or token.
    is_ip_enough: other machines may call it too, by its address, which is no name that resolves to another one.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not has_key and not is_local(host) and not (is_ip_enough and _address_of(host)):
        rule = "an IP address" if is_ip_enough else "127.0.0.1"
        return (403, f"Host: {host[:200]!r} is refused: without a key this server answers as localhost or {rule} only")
    if host and not _HOST.fullmatch(host):
        return 400, f"Host: {host[:200]!r} is neither a name nor an address"
    if origin is not None and (not host or _host_of(origin) != host.lower()):
        return 403, f"Origin: {origin[:200]!r} is refused: pages of other sites may not call this server"
    is_opened = method == "GET" and headers.get("sec-fetch-mode") == "navigate"  # a link to the page was followed
    if headers.get("sec-fetch-site", "none") not in _OWN_SITES and not is_opened:
        return 403, "Sec-Fetch-Site is refused: pages of other sites may not call this server"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _SENT_BY_FORMS:
        return 415, f"Content-Type: {kind} is not read here; send `Content-Type: application/json`"
    return None


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(_name_of(host))
    except ValueError:
        return None


def _name_of(host: str) -> str:
    """The name in a Host header; "" if it is no valid one."""
    try:
        return (urlsplit(f"//{host}").hostname or "") if _HOST.fullmatch(host) else ""
    except ValueError:
        return ""


def _host_of(origin: str) -> str | None:
    """Host and port of an Origin header as a Host header has them; None if it has none (`null`)."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
