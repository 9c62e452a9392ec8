"""What a node checks before it starts its processes of a run on several nodes: GPUs, hosts, the shared run directory.

Each message names the node. Ports, and addresses that are wrong by themselves, are checked in launch/plan/nodes.py.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.files import read_json
from stretto.base.paths import RunDir
from stretto.config.load import write_json
from stretto.config.root import RLConfig
from stretto.launch.plan.processes import ProcessSpec

SHARED_TIMEOUT_S = 60.0  # another node may be started this long before the first one
PROBE_TIMEOUT_S = 5.0
PROBE_PORT = 9  # "discard": whether anything listens there is of no interest
NUM_PROBES = 64
POLL_S = 0.1
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
MAX_NAMED = 4


def num_gpus(specs: Sequence[ProcessSpec]) -> int:
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
    return (
        f"this machine shows {visible} GPUs, and {needed} of them are used; to use more, raise a degree of "
        "inference.parallel or inference.deployment.num_replicas"
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


def needs_shared(cfg: RLConfig, specs: Sequence[ProcessSpec]) -> str | None:
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
