"""What a node checks before it starts its processes: which node it is, ports, GPUs, other hosts, the run directory.

Each message names the node.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from socket import AF_INET, AF_INET6
from typing import Protocol

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.files import read_json
from stretto.base.paths import RunDir
from stretto.base.ports import is_free, is_own_address
from stretto.config.load import write_json
from stretto.config.root import RLConfig

SHARED_TIMEOUT_S = 60.0  # another node may be started this long before the first one
PROBE_TIMEOUT_S = 5.0
PROBE_PORT = 9  # "discard": whether anything listens there is of no interest
NUM_PROBES = 64
POLL_S = 0.1
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
MAX_NAMED = 4
NODE_RANK_VARS = ("SLURM_NODEID", "GROUP_RANK")
"""Environment variables in which schedulers give the number of this node."""
FIRST_NODE_VAR = "STRETTO_FIRST_NODE"
"""Set in a step that has only some of its job's nodes: the number of the first of them."""


class Process(Protocol):
    """A process that a plan has on this node."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def devices(self) -> Sequence[str]: ...
    @property
    def ports(self) -> Mapping[str, int]: ...


def find_node_rank(node_rank: int | None, hosts: Sequence[str], key: str) -> int:
    """The number of this node: node_rank if given, else the scheduler's, else found by this machine's address.

    Raises: ConfigError if none, or more than one, of the addresses is this machine's.
    """
    if node_rank is not None:
        return node_rank
    for name in NODE_RANK_VARS:
        first = int(os.environ.get(FIRST_NODE_VAR, "0")) if name == "SLURM_NODEID" else 0
        if (text := os.environ.get(name, "")).isdigit() and first + int(text) < len(hosts):
            return first + int(text)
    mine = [rank for rank, host in enumerate(hosts) if host == socket.gethostname() or is_own_address(host)]
    if len(mine) == 1:
        return mine[0]
    count = "several of the addresses are" if mine else "none of the addresses is"
    raise ConfigError(f"{key}: {count} this machine's ({', '.join(hosts)}); say which node this is, from 0")


def check_hosts(hosts: Sequence[str], key: str) -> None:
    """Raises: ConfigError if an address is given for two nodes."""
    for node, host in enumerate(hosts):
        if (first := hosts.index(host)) < node:
            raise ConfigError(f"{key}: nodes {first} and {node} are both {host}; give each machine once")


def check_ports(specs: Sequence[Process], node: int, host: str, keys: str) -> None:
    """Check that the ports on which a node's processes will listen are free; keys: the settings of these ports.

    Raises: ConfigError that names the node and the ports that are taken.
    """
    if not is_own_address(host):
        # The user may have given other addresses; a process that cannot listen fails.
        if node == 0 and any("rendezvous" in spec.ports for spec in specs):
            raise ConfigError(
                f"node 0, {host}: that is no address of this machine, where the trainer's ranks would meet; put the "
                "address of the machine with node_rank = 0 first"
            )
        return
    ports = [(port, f"{what} of {spec.name}") for spec in specs for what, port in spec.ports.items()]
    if taken := [f"port {port} ({name})" for port, name in ports if not is_free(host, port)]:
        raise ConfigError(
            f"node {node}, {host}: {' and '.join(taken)} {'is' if len(taken) == 1 else 'are'} taken; end what listens "
            f"there, or give another on all nodes with {keys}"
        )


def check_reachable(hosts: Sequence[str], node: int) -> None:
    """Raises: ConfigError if this node's own name resolves only to addresses that the others cannot reach.

    Debian and others resolve a machine's name to 127.0.1.1, which only that machine can reach.
    """
    host = hosts[node]
    if len(set(hosts)) == 1 or host == "localhost" or host.replace(".", "").isdigit() or ":" in host:
        return
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as cause:
        raise ConfigError(f"node {node}, {host}: this machine cannot resolve that name ({cause})") from cause
    # If a name has addresses of both kinds, servers listen at the IPv4 ones.
    kinds = {kind: [str(at[0]) for family, *_, at in infos if family == kind] for kind in (AF_INET, AF_INET6)}
    addresses = kinds[AF_INET] or kinds[AF_INET6]
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        raise ConfigError(
            f"node {node}, {host}: on this machine that name is {' and '.join(addresses)}, where other nodes cannot "
            "reach it; correct /etc/hosts, or give addresses instead of names."
        )


def num_gpus(specs: Sequence[Process]) -> int:
    """GPUs that processes of one node take."""
    return len({gpu for spec in specs for gpu in spec.devices})


def check_num_gpus(needed: int, node: int, host: str, keys: str) -> None:
    """Check that this machine has the GPUs that its processes take; keys: what the user can lower.

    Raises: ConfigError that names the node and both numbers.
    """
    if needed and (visible := len(process.visible_gpus())) < needed:
        shown = f"shows {visible} GPU{'s' * (visible != 1)}" if visible else "shows no GPU"
        raise ConfigError(
            f"node {node}, {host}: its processes take {needed} GPU{'s' * (needed != 1)}, and this machine {shown}; "
            f"lower {keys}, leave the machine out, or set CUDA_VISIBLE_DEVICES"
        )


def unused_gpus(needed: int) -> str | None:
    """A note if this machine shows more GPUs than are used."""
    if not needed or (visible := len(process.visible_gpus())) <= needed:
        return None
    used = "1 of them is used" if needed == 1 else f"{needed} of them are used"
    return (
        f"this machine shows {visible} GPUs, and {used}; to use more, raise a degree of inference.parallel or "
        "inference.deployment.num_replicas"
    )


def check_others(hosts: Sequence[str], node: int, key: str) -> None:
    """Check that the network has a route from the first node to each other one, and from these to the first.

    A host counts as reachable if nothing listens there, and if it does not answer, since it may be behind a firewall.
    key: the setting with the hosts.

    Raises: ConfigError that names the nodes.
    """
    others = [(rank, host) for rank, host in enumerate(hosts) if rank != node and 0 in (node, rank)]
    if not others:
        return
    with ThreadPoolExecutor(min(NUM_PROBES, len(others))) as pool:
        faults = list(pool.map(lambda each: _fault(each[1]), others))
    unreachable = [f"node {rank}, {host} ({why})" for (rank, host), why in zip(others, faults) if why]
    if unreachable:
        more = f" and {len(unreachable) - MAX_NAMED} more" if len(unreachable) > MAX_NAMED else ""
        raise ConfigError(
            f"{key}: node {node}, {hosts[node]}, cannot reach {'; '.join(unreachable[:MAX_NAMED])}{more}; correct the "
            "addresses or the network, or leave the machine out"
        )


def _fault(host: str) -> str | None:
    """Why the network has no route to a host; None if it has one."""
    try:
        infos = socket.getaddrinfo(host, PROBE_PORT, type=socket.SOCK_STREAM)
    except OSError as cause:
        return f"its name is not known here: {cause.strerror or cause}"
    why = None
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            try:
                probe.connect(address)
            except OSError as cause:
                if cause.errno in UNREACHABLE:
                    why = (cause.strerror or str(cause)).lower()
                    continue
            return None
    return why


# -- the shared run directory --


def needs_shared(cfg: RLConfig, specs: Sequence[Process]) -> str | None:
    """Why the processes of a node other than the first need its run directory; None if they do not."""
    trains = any(spec.role in ("trainer", "critic") for spec in specs)
    if trains and cfg.ckpt is not None:
        return "each trainer rank writes its part of a checkpoint there ([ckpt])"
    if trains and cfg.rollout_transport.type == "filesystem":
        return 'batches are files there (rollout_transport.type = "filesystem")'
    if cfg.weight_broadcast.type == "filesystem" and specs:
        return 'weights are files there (weight_broadcast.type = "filesystem")'
    return None


def announce(run: RunDir, hosts: Sequence[str]) -> None:
    """On the first node, which has claimed the run: write the file by which the others recognise its directory."""
    write_json(run.nodes, {"hosts": [*hosts]})


def check_shared(run: RunDir, hosts: Sequence[str], node: int, what: str, timeout_s: float = SHARED_TIMEOUT_S) -> None:
    """On another node: wait until the first node's run directory is visible here; what: why it is needed.

    Raises: ConfigError that names the node if it is not visible within timeout_s.
    """
    deadline = time.monotonic() + timeout_s
    while read_json(run.nodes).get("hosts") != [*hosts]:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"node {node}, {hosts[node]}: {run} is not the run directory of the first node, {hosts[0]}, after "
                f"{timeout_s:g} s: {what}. Put output_dir on a file system that all nodes share, at the same path, and "
                "start the command on the first node, too"
            )
        time.sleep(POLL_S)
