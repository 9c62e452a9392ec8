"""All that is asked of `rl` before it starts, in a row; the answers are in the other files of this room.

check_run         the config and the models' config.json, where the command is given
check_node        this machine among the hosts of the run
check_processes   ports and GPUs for the processes that a node is to start
check_files       weights, tokenizers and packages for the engines, once models are here
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.base.errors import ConfigError
from stretto.check.code import check_code
from stretto.check.models import check_shape, foreign_engines
from stretto.check.nodes import (
    Process,
    check_num_gpus,
    check_others,
    check_ports,
    check_reachable,
    find_node_rank,
    num_gpus,
)
from stretto.check.weights import check_weights_of
from stretto.config.root import RLConfig
from stretto.monitors.base import find_trackers

PORT_KEYS = (
    "control.port, rollout_transport.port, weight_broadcast.port, deployment.rendezvous_port, "
    "inference.server.port, trainer.critic.placement.port"
)
GPU_KEYS = "deployment.gpus_per_node or inference.parallel"
NOT_READY = "NOT READY: "


def check_run(cfg: RLConfig) -> None:
    """Check the user's code, the model's shape against what trains and serves it, and the trackers.

    Raises: ConfigError with the first reason why the run could not start.
    """
    check_code(cfg)
    check_shape(cfg, must_exist=True)
    check_trackers(cfg)


def check_trackers(cfg: RLConfig) -> None:
    """Check that trackers are installed where the orchestrator runs: here, or on a machine with the same home."""
    shape = cfg.deployment
    is_here = cfg.ray is None and not (shape.type == "multi_node" and shape.node_rank)
    find_trackers(cfg.monitors, is_fed_here=is_here)


def check_node(node_rank: int | None, hosts: Sequence[str], *, probes: bool) -> int:
    """The number of this node, after checking that others reach it; probes: and that it reaches them.

    Raises: ConfigError naming the node.
    """
    key = "deployment.hosts"
    node = find_node_rank(node_rank, hosts, "deployment.node_rank")
    check_reachable(hosts, node)
    if probes:
        check_others(hosts, node, key)
    return node


def check_processes(specs: Sequence[Process], node: int, hosts: Sequence[str]) -> None:
    """Raises: ConfigError if this node lacks GPUs or ports for its processes."""
    check_ports(specs, node, hosts[node], PORT_KEYS)
    check_num_gpus(num_gpus(specs), node, hosts[node], GPU_KEYS)


def check_files(cfg: RLConfig) -> Iterator[str]:
    """Check the files of the models that are here; yields warnings.

    Raises: ConfigError for files with which the run would fail, and for engines that are not installed.
    """
    yield from check_weights_of(cfg)
    for text in foreign_engines(cfg):
        if text.startswith(NOT_READY):
            raise ConfigError(f"inference.engine: {text.removeprefix(NOT_READY)}")
