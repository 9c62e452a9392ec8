"""The ranks of `sft` as processes, on one machine or on several, and the GPU of each. ranks.py starts them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.ports import LOOPBACK
from stretto.check.nodes import check_hosts
from stretto.config.root import SFTConfig
from stretto.config.sections.deployment import NodesDeployment
from stretto.launch.plan.processes import ProcessSpec, nodes_env, rank_env
from stretto.launch.plan.table import process_table

HOSTS_KEY = "deployment.hosts"


def plan_ranks(cfg: SFTConfig, words: Sequence[str] = ()) -> tuple[list[str], list[ProcessSpec]]:
    """Hosts and ranks of [deployment] type = "multi_node"; each node numbers its GPUs from 0.

    Raises: ConfigError if hosts are missing, too many, or given twice.
    """
    shape = cfg.deployment
    assert isinstance(shape, NodesDeployment), shape
    if shape.hosts is None and not cfg.dry_run:
        raise ConfigError(
            f'deployment.type = "multi_node" needs {HOSTS_KEY}: the addresses of the nodes, in the same order on every '
            "node; a --dry-run needs none"
        )
    hosts = shape.hosts or [f"node-{node}" for node in range(shape.num_train_nodes)]
    check_hosts(hosts, HOSTS_KEY)
    each = cfg.num_ranks // shape.num_train_nodes
    gpus = [[str(rank % each)] if shape.gpus_per_node else [] for rank in range(cfg.num_ranks)]
    port = shape.rendezvous_port
    return hosts, [rank_process(cfg, words, own, port, rank, each, hosts) for rank, own in enumerate(gpus)]


def find_gpus(cfg: SFTConfig) -> list[str]:
    """The GPU of each rank; [] if ranks run on the CPU, or if the config neither names nor counts GPUs.

    Raises: ConfigError if GPUs are missing.
    """
    if cfg.deployment.type == "multi_node":  # each node finds its own
        return []
    gpus, ids, count = process.visible_gpus(), cfg.trainer_gpu_ids, cfg.deployment.num_train_gpus
    if not gpus:
        return []
    if ids is None:
        ids = [] if count is None else list(range(count))
    if missing := [index for index in ids if index >= len(gpus)]:
        raise ConfigError(
            f"trainer_gpu_ids or deployment.num_train_gpus ask for GPU {', '.join(map(str, missing))}, but this "
            f"machine shows {len(gpus)}; leave the key out, name others, or set CUDA_VISIBLE_DEVICES."
        )
    return [gpus[index] for index in ids]


def rank_process(
    cfg: SFTConfig, words: Sequence[str], devices: Sequence[str], port: int, rank: int, num_local: int = 0,
    hosts: Sequence[str] = (LOOPBACK,),
) -> ProcessSpec:  # fmt: skip
    """A rank; num_local: ranks per machine, 0 if all are on this one."""
    num_local = num_local or cfg.num_ranks
    node, local = divmod(rank, num_local)
    argv = (sys.executable, "-m", "stretto", "sft", *words)
    threads = cfg.num_threads or max(1, process.num_cores() // num_local)
    env = process.thread_env(threads) | rank_env(rank, local, cfg.num_ranks, hosts[0], port)
    env |= process.device_env(devices) | {"LOCAL_WORLD_SIZE": str(num_local)}
    if isinstance(shape := cfg.deployment, NodesDeployment):
        env |= nodes_env(rank, num_local, hosts, shape.lost_after_s)
    ports = {"rendezvous": port} if len(hosts) > 1 and rank == 0 else {}
    return ProcessSpec("sft", rank, cfg.num_ranks, argv, env, tuple(devices), threads, ports, node=node)


def table(cfg: SFTConfig) -> str:
    """What a dry run shows of ranks on several machines."""
    hosts, specs = plan_ranks(cfg)
    return process_table(specs, hosts)
