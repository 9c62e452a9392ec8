"""Plans a run over several machines: [deployment] type = "multi_node".

Every node gets the same config, computes the same plan, and runs its own processes of it. There is no remote login,
and nodes share only the network (and a file system if a transport or checkpoints need one). So ports are those of the
config, and the plan depends on nothing that differs between machines. Nodes, in the order of `deployment.hosts`:

    first                 orchestrator, trainer ranks, console
    num_train_nodes - 1   trainer ranks; on these and the first node also the ranks of a critic without nodes of its own
    num_critic_nodes      ranks of a critic that has nodes of its own
    after these           inference: one replica after another, each as inference.deployment says and with its router on
                          its first node. Dynamo's frontend requires no key: it is on the first of all nodes, where only
                          that machine's processes reach it
    last                  frozen models, several on a node where they fit
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import LOOPBACK
from stretto.base.secret import Secret
from stretto.check.nodes import check_hosts
from stretto.config.root import RLConfig
from stretto.config.sections.deployment import MultiNodeDeployment
from stretto.config.sections.engines import EngineGroups
from stretto.launch.plan.beside import engines_beside
from stretto.launch.plan.engines import plan_replicas
from stretto.launch.plan.placement import (
    GPU_HOST_THREADS,
    MOST_THREADS,
    replaced,
    share_gpu_memory,
    with_canary_tolerance,
    with_engines,
)
from stretto.launch.plan.plan import LaunchPlan, with_run
from stretto.launch.plan.processes import (
    ProcessSpec,
    client_key_env,
    engine_key_env,
    engine_processes,
    engine_threads,
    orchestrator_process,
    rank_processes,
    with_engine_key,
)
from stretto.launch.plan.specs import EnginesPlan

IDLE = "GPUs of the nodes are given to nobody"
MAX_IDLE_NODES = 4
"""Nodes with idle GPUs that a note names."""


def plan_nodes(
    cfg: RLConfig, run: RunDir, resume_step: int | None = None, secret: Secret | None = None, *,
    in_pods: bool = False,
) -> LaunchPlan:  # fmt: skip
    """Plan the processes of all nodes.

    secret: the run's, from which the engines' API key is made if the user gave none; None in a dry run. in_pods: the
    nodes are pods, and their GPUs are counted by the chart's values.
    """
    shape = cfg.deployment
    assert isinstance(shape, MultiNodeDeployment), shape
    hosts = node_hosts(cfg)
    cfg = _with_addresses(cfg, hosts[0])
    shared: list[str] = []
    if cfg.colocate is not None and shape.gpus_per_node:
        cfg = share_gpu_memory(cfg, {"0"}, shared)
    keyed, notes = with_engine_key(cfg, secret)
    notes += shared
    engines = _engines(cfg, hosts[cfg.first_infer_node :])
    has_gpus, samples = bool(shape.gpus_per_node), cfg.inference is not None and cfg.inference.device != "cpu"
    cfg = with_canary_tolerance(cfg, trains_on_gpus=has_gpus, samples_on_gpus=has_gpus and samples)
    if engines is not None:
        cfg = with_engines(cfg, engines)
    beside = engines_beside(cfg)
    cfg = beside.with_hosts(cfg, hosts[cfg.num_nodes - cfg.num_model_nodes :])
    cfg = _with_threads(with_run(cfg, resume_step), shape)
    others, client_env = beside.node_processes(cfg, run, secret)
    if keyed is not None:
        client_env |= client_key_env(keyed, cfg.orchestrator.client.api_key_var)
    processes = [orchestrator_process(cfg, run, client_env), *_ranks(cfg, run, hosts)]
    if engines is not None and cfg.inference is not None and keyed is not None:
        key = engine_key_env(keyed, cfg.orchestrator.client.api_key_var)
        started = engine_processes(
            cfg.inference, engines, run, first_node=cfg.first_infer_node, is_held=True, key_env=key
        )
        router = cfg.inference.router
        is_first = router is not None and not router.requires_key
        processes += [
            dataclasses.replace(spec, node=0) if spec.role == "router" and is_first else spec for spec in started
        ]
    processes += others
    # Groups of engines name the GPUs that they leave (`idle_gpus`), or are refused.
    has_groups = cfg.inference is not None and isinstance(cfg.inference.deployment, EngineGroups)
    if not has_groups and not in_pods:
        notes += idle_gpus(processes, node_gpus(cfg), "inference.")
    return LaunchPlan.of(run, cfg, engines, processes, hosts=hosts, notes=notes)


def node_gpus(cfg: RLConfig) -> list[int]:
    """GPUs of each node: as [deployment] counts them, or those of the fullest on all nodes of a job of Slurm."""
    shape, section = cfg.deployment, cfg.inference
    assert isinstance(shape, MultiNodeDeployment), shape
    if not shape.gpus_per_node:
        return [0] * cfg.num_nodes
    critic = shape.gpus_per_node if shape.critic_gpus_per_node is None else shape.critic_gpus_per_node
    beside = critic if cfg.num_critic_ranks and not shape.num_critic_nodes else 0
    counts = [shape.gpus_per_node + beside] * shape.num_train_nodes + [critic] * (shape.num_critic_nodes or 0)
    samples = section is not None and section.device != "cpu"
    engine = (shape.infer_gpus_per_node or shape.gpus_per_node) if samples else 0
    counts += [engine] * (cfg.num_nodes - cfg.num_model_nodes - len(counts))
    counts += [shape.gpus_of_models] * cfg.num_model_nodes
    return counts if cfg.slurm is None else [max(counts)] * len(counts)


def idle_gpus(processes: Sequence[ProcessSpec], counts: Sequence[int], prefix: str) -> list[str]:
    """A note if processes leave GPUs of nodes to nobody.

    counts: GPUs of each node. prefix: of the engines' keys.
    """
    used = [{gpu for spec in processes if spec.node == node for gpu in spec.devices} for node in range(len(counts))]
    left = {node: count - len(own) for node, (count, own) in enumerate(zip(counts, used)) if count > len(own)}
    if not left:
        return []
    where = ", ".join(f"{num} of {counts[node]} on node {node}" for node, num in [*left.items()][:MAX_IDLE_NODES])
    more = f" and {len(left) - MAX_IDLE_NODES} more nodes" if len(left) > MAX_IDLE_NODES else ""
    return [
        f"{sum(left.values())} of {sum(counts)} {IDLE} ({where}{more}): raise {prefix}parallel.dp or tp, or "
        f"{prefix}deployment.num_replicas, or lower {prefix and 'deployment.infer_gpus_per_node or '}"
        f"{'' if prefix else 'deployment.'}gpus_per_node"
    ]


def node_hosts(cfg: RLConfig) -> list[str]:
    """Addresses of all nodes; in a dry run without addresses, names such as node-0.

    Raises: ConfigError if the config has none and this is not a dry run.
    """
    shape = cfg.deployment
    assert isinstance(shape, MultiNodeDeployment), shape
    if shape.hosts is not None:
        check_hosts(shape.hosts, "deployment.hosts")
        return shape.hosts
    if not cfg.dry_run:
        raise ConfigError(
            'deployment.type = "multi_node" needs deployment.hosts: the addresses of the nodes, the trainer\'s first, '
            "in the same order on every node; a --dry-run needs none"
        )
    return [f"node-{node}" for node in range(cfg.num_nodes)]


def on_visible_gpus(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Processes of this node with CUDA's names of its visible GPUs: GPU 0 of the plan is the first visible one."""
    names, visible = process.visible_gpus(), []
    for spec in specs:
        gpus = [names[int(gpu)] for gpu in spec.devices]
        env = spec.env | process.device_env(gpus)
        visible.append(dataclasses.replace(spec, devices=tuple(gpus), env=env))
    return visible


# -- addresses --


def _with_addresses(cfg: RLConfig, head: str) -> RLConfig:
    """The root in which wires listen on the first node, unless the user gave another address."""
    for wire in ("control", "rollout_transport", "weight_broadcast"):
        if getattr(getattr(cfg, wire), "host", None) == LOOPBACK:
            cfg = replaced(cfg, f"{wire}.host", head)
    if cfg.critic_placement is not None and cfg.critic_placement.host == LOOPBACK:
        cfg = replaced(cfg, "trainer.critic.placement.host", head)
    return cfg


def _engines(cfg: RLConfig, hosts: Sequence[str]) -> EnginesPlan | None:
    shape, section = cfg.deployment, cfg.inference
    if section is None:
        return None
    assert isinstance(shape, MultiNodeDeployment), shape
    return plan_replicas(section, hosts, shape.num_infer_replicas, is_cpu=section.device == "cpu")


# -- processes --


def _with_threads(cfg: RLConfig, shape: MultiNodeDeployment) -> RLConfig:
    """Fill in CPU threads per process, as if every node had as many cores as this one."""
    on_same = 0 if shape.num_critic_nodes else cfg.num_critic_ranks
    ranks = (cfg.num_train_ranks + on_same) // shape.num_train_nodes
    if cfg.trainer.num_threads is None:
        most = GPU_HOST_THREADS if shape.gpus_per_node else MOST_THREADS
        cfg = replaced(cfg, "trainer.num_threads", max(1, min(most, process.num_cores() // ranks)))
    if cfg.inference is not None and cfg.inference.num_threads is None:
        cfg = replaced(cfg, "inference.num_threads", engine_threads(cfg.inference))
    return cfg


def _ranks(cfg: RLConfig, run: RunDir, hosts: Sequence[str]) -> list[ProcessSpec]:
    """The trainer's ranks, and those of a critic of its own.

    The critic has nodes of its own after the trainer's, or the GPUs after the trainer's on the same nodes.
    """
    shape = cfg.deployment
    assert isinstance(shape, MultiNodeDeployment), shape
    trainers = hosts[: shape.num_train_nodes]
    first = shape.num_train_nodes if shape.num_critic_nodes else 0
    critics = hosts[first : first + (shape.num_critic_nodes or shape.num_train_nodes)]

    def gpus(num_ranks: int, num_nodes: int, first_gpu: int) -> list[list[str]]:
        each = num_ranks // num_nodes
        return [[str(first_gpu + rank % each)] * bool(shape.gpus_per_node) for rank in range(num_ranks)]

    port, lost_after_s = shape.rendezvous_port, shape.lost_after_s
    train_gpus = gpus(cfg.num_train_ranks, len(trainers), 0)
    critic_gpus = gpus(cfg.num_critic_ranks, len(critics), 0 if first else shape.gpus_per_node)
    return [
        *rank_processes(cfg, run, "trainer", train_gpus, trainers, port, lost_after_s=lost_after_s),
        *rank_processes(
            cfg, run, "critic", critic_gpus, critics, port + 1, lost_after_s=lost_after_s, first_node=first
        ),
    ]


def with_config_dir(spec: ProcessSpec, run: RunDir, own: RunDir) -> ProcessSpec:
    """The process with its config read from `own` instead of `run`."""
    argv = tuple(word.replace(str(run.configs), str(own.configs)) for word in spec.argv)
    return dataclasses.replace(spec, argv=argv)
