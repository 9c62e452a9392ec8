"""What a node checks before it starts processes of a run over several: GPUs, hosts, the shared run directory.

Each message names the node. Ports and addresses that the plan alone shows are checked in launch/plan/nodes.py.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.files import write_atomic
from stretto.base.paths import RunDir
from stretto.config.root import RLConfig
from stretto.launch.plan.plan import ProcessSpec

SHARED_TIMEOUT_S = 60.0  # another node may be started this long before the first one
PROBE_TIMEOUT_S = 5.0
PROBE_PORT = 9  # "discard": whether anything listens there is of no interest
NUM_PROBES = 64
POLL_S = 0.1
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
MAX_NAMED = 4


def check_gpus(specs: Sequence[ProcessSpec], node: int, host: str, ways: str) -> None:
    """Look whether this machine has the GPUs that its processes take; ways: what gives them fewer.

    Raises: ConfigError that names the node and both numbers.
    """
    check_num_gpus(num_gpus(specs), node, host, ways)


def num_gpus(specs: Sequence[ProcessSpec]) -> int:
    """GPUs that processes of one node take."""
    return len({gpu for spec in specs for gpu in spec.devices})


def check_num_gpus(needed: int, node: int, host: str, ways: str) -> None:
    """Raises: ConfigError if this machine shows fewer GPUs than are needed."""
    if needed and (found := len(process.visible_gpus())) < needed:
        shown = f"shows {found} GPU{'s' * (found != 1)}" if found else "shows no GPU"
        raise ConfigError(
            f"node {node}, {host}: its processes take {needed} GPU{'s' * (needed != 1)}, and this machine {shown}; "
            f"lower {ways}, leave the machine out, or set CUDA_VISIBLE_DEVICES"
        )


def unused_gpus(needed: int) -> str | None:
    """A note if this machine shows more GPUs than are used."""
    if not needed or (found := len(process.visible_gpus())) <= needed:
        return None
    return (
        f"this machine shows {found} GPUs, and {needed} of them are used; to use more, raise a degree of "
        "inference.parallel or inference.deployment.num_replicas"
    )


def check_others(hosts: Sequence[str], node: int, key: str) -> None:
    """Look from the first node whether the network has a way to each other, and from these to the first.

    Whether something listens there is not asked, and a host that stays silent may be behind a firewall: both count as
    reachable. key: where the hosts come from.

    Raises: ConfigError that names the nodes.
    """
    seen = enumerate(hosts) if node == 0 else [(0, hosts[0])]
    others = [(rank, host) for rank, host in seen if rank != node]
    if not others:
        return
    with ThreadPoolExecutor(min(NUM_PROBES, len(others))) as pool:
        faults = list(pool.map(lambda each: _fault(each[1]), others))
    found = [f"node {rank}, {host} ({why})" for (rank, host), why in zip(others, faults) if why]
    if found:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise ConfigError(
            f"{key}: node {node}, {hosts[node]}, cannot reach {'; '.join(found[:MAX_NAMED])}{more}; correct the "
            "addresses or the network, or leave the machine out"
        )


def _fault(host: str) -> str | None:
    try:
        found = socket.getaddrinfo(host, PROBE_PORT, type=socket.SOCK_STREAM)
    except OSError as cause:
        return f"its name is not known here: {cause.strerror or cause}"
    why = None
    for family, kind, protocol, _, address in found:
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
    """On the first node, which has claimed the run: write what the others look for."""
    write_atomic(run.nodes, json.dumps({"hosts": [*hosts]}).encode() + b"\n")


def check_shared(
    run: RunDir, hosts: Sequence[str], node: int, what: str, timeout_s: float = SHARED_TIMEOUT_S
) -> None:
    """On another node: wait until the first one's run directory is seen here; what: why that is needed.

    Raises: ConfigError that names the node if it does not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while _announced(run) != [*hosts]:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"node {node}, {hosts[node]}: {run} is not the run directory of the first node, {hosts[0]}, after "
                f"{timeout_s:g} s: {what}. Put output_dir on a file system that all nodes share, at the same path, and "
                "start the command on the first node, too"
            )
        time.sleep(POLL_S)


def _announced(run: RunDir) -> list[str] | None:
    try:
        return json.loads(run.nodes.read_text())["hosts"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
