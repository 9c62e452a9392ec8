"""TCP stores and gloo groups that use one address only, that of the cluster's network.

By default torch's store listens at all addresses of a machine, and gloo at the address of the machine's own name, which
other nodes often cannot reach. The store accepts any connection: it is for private networks.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from stretto.base.errors import WireError
from stretto.base.ports import addresses_by_interface

_INTERFACE_VARS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_chosen: set[str] = set()
"""Values that this process, not the user, has given to these variables."""


def create_store(host: str, port: int, timeout_s: float, title: str) -> TCPStore:
    """A store that listens at `host` only; title: what it is for, in messages.

    Raises: WireError if it cannot listen there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family, backlog=1024) as listener:
            port = listener.getsockname()[1]
            return _open_store(host, port, timeout_s, master_listen_fd=listener.detach(), is_master=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise WireError(
            f"{title}: cannot listen at {host}:{port}: {str(error).splitlines()[0]}; the host must be an address of "
            "the trainer's first rank, and the port free there."
        ) from error


def connect_store(host: str, port: int, timeout_s: float, title: str) -> TCPStore:
    """The store that another process has created; waits until it is there.

    Raises: WireError if it is not there in time.
    """
    try:
        return _open_store(host, port, timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise WireError(
            f"{title}: cannot connect to {host}:{port}: {str(error).splitlines()[0]}; that is the trainer's first "
            "rank, and all other processes of the run must be able to connect to it."
        ) from error


def _open_store(host: str, port: int, timeout_s: float, **master: Any) -> TCPStore:
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), **master)


def use_interface_to(host: str) -> None:
    """Let gloo and NCCL listen only where this machine reaches `host`, unless the user has named an interface."""
    name = find_interface(find_address(host))
    for variable, exactly in zip(_INTERFACE_VARS, ("", "=")):
        if name is not None and variable not in os.environ:
            os.environ[variable] = exactly + name
            _chosen.add(exactly + name)


def gloo_device_to(host: str) -> Any:
    """gloo's listener at the address from which this machine reaches `host`, or at the user's interface."""
    # Not by interface: gloo would use its IPv4 address, while other processes may use IPv6.
    if (name := os.environ.get("GLOO_SOCKET_IFNAME")) and name not in _chosen:
        return ProcessGroupGloo.create_device(interface=name)
    return ProcessGroupGloo.create_device(hostname=find_address(host))


def new_gloo_group(store: TCPStore, prefix: str, rank: int, size: int, timeout_s: float) -> Any:
    """A gloo group that torch does not register, so that the other groups of a process are not affected."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._devices = timedelta(seconds=timeout_s), [gloo_device_to(store.host)]
    return ProcessGroupGloo(PrefixStore(prefix, store), rank, size, options)


def find_address(host: str) -> str:
    """This machine's address on the network through which it reaches `host`.

    Raises: WireError if there is no way to that host.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: the kernel only chooses a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WireError(f"this machine has no route to {host}: {error.strerror or error}.") from error


def find_interface(address: str) -> str | None:
    """The interface that has this address; None if there is none, for example because several share one name."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((line[-1] for line in lines if line[0] == packed), None)
    return next((name for name, own in addresses_by_interface().items() if own == address), None)
