"""All that is asked of `rl` before it starts, in a row; the answers are in the other files of this room.

check_run         the config and the models' config.json, where the command is given
check_node        this machine among the hosts of the run
check_processes   ports and GPUs for the processes that a node is to start
check_files       weights, tokenizers and packages for the engines, once models are here
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.base import process
from stretto.base.errors import ConfigError, meant_path
from stretto.check.code import check_code
from stretto.check.models import check_engine_model, check_model, check_served, foreign_engines
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
from stretto.data.hub_model import find_config, is_hub_name
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
    check_shape(cfg)
    _check_name(cfg)
    check_trackers(cfg)


def check_shape(cfg: RLConfig) -> None:
    """Check the model's shape against what trains and serves it."""
    check_model(cfg.model, cfg.num_train_ranks, "model", has_replay=cfg.trainer.enable_router_replay)
    if cfg.num_critic_ranks:
        check_model(cfg.model, cfg.num_critic_ranks, "model, of the ranks in trainer.critic.placement")
    check_engine_model(cfg)
    if cfg.inference is not None:
        is_here = cfg.deployment.type == "single_node" and cfg.slurm is None and cfg.ray is None
        is_cpu = is_here and not process.visible_gpus() and not cfg.asks_for_gpus
        check_served(cfg.inference, cfg.inference.model or cfg.model.name, is_cpu=is_cpu)


def _check_name(cfg: RLConfig) -> None:
    """Raises: ConfigError if there is no such model; called before --clean deletes anything."""
    name = cfg.model.name
    if cfg.model.scratch is not None or find_config(name) is not None:
        return
    if Path(name).expanduser().is_dir():
        raise ConfigError(
            f"[model] name = {name!r}: there is no config.json in that directory, so it holds no model; give a "
            "directory with config, safetensors and tokenizer."
        )
    if not is_hub_name(name):
        raise ConfigError(
            f"[model] name = {name!r}: there is no such directory{meant_path(Path(name), '.')} If a warm-up makes "
            f"the model, run that first (`sft @ ...`); else give a directory with config, safetensors and tokenizer."
        )


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
