"""A run over several machines as one plan: [deployment] type = "multi_node".

Every node is given the same config, computes the same plan, and runs the processes that are its own; nobody logs in
anywhere, and nothing is shared but the network (and a file system, where a transport or checkpoints need one). So
ports are those of the config, and nothing of this machine is looked at. Nodes, in the order of `deployment.hosts`:

    first                 orchestrator, trainer ranks, console
    num_train_nodes - 1   trainer ranks
    the rest              inference: replica after replica, as inference.deployment says, a router on each's first
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Sequence

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import is_own_address
from stretto.config.deployment import MultiNodeDeployment
from stretto.config.engines import HOLD_VAR
from stretto.config.inference import InferenceSection
from stretto.config.roots import RLConfig
from stretto.launch.engines import EngineSpec, EnginesPlan, plan_replicas
from stretto.launch.placement import GPU_HOST_THREADS, MOST_THREADS, replaced, with_canary_tolerance
from stretto.launch.plan import ENGINE_RESTARTS, Plan, ProcessSpec, rank_env

LOOPBACK = "127.0.0.1"
RANK_VARIABLES = ("SLURM_NODEID", "GROUP_RANK")
"""Where schedulers say which of the nodes this is."""


def plan_nodes(cfg: RLConfig, run: RunDir, resume_step: int | None = None) -> Plan:
    """The processes of all nodes."""
    shape = cfg.deployment
    assert isinstance(shape, MultiNodeDeployment), shape
    hosts = hosts_of(cfg)
    cfg = _with_addresses(cfg, hosts[0])
    engines = _engines(cfg, hosts[shape.num_train_nodes :])
    cfg = _with_engine_addresses(with_canary_tolerance(cfg), engines)
    if cfg.resume is not None:
        resume = cfg.resume.model_copy(update={"step": resume_step})
        cfg = cfg.model_copy(update={"resume": resume})
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"name": cfg.run_name})})
    cfg = _with_threads(cfg, shape)
    processes = [_orchestrator(cfg, run), *_trainers(cfg, run, hosts)]
    if engines is not None and cfg.inference is not None:
        processes += engine_processes(
            cfg.inference, engines, run, first_node=shape.num_train_nodes, is_held=True
        )
    return Plan.of(run, cfg, engines, processes, hosts=hosts)


def hosts_of(cfg: RLConfig) -> list[str]:
    """Addresses of all nodes.

    Raises: ConfigError where none are given and processes shall be started.
    """
    shape = cfg.deployment
    assert isinstance(shape, MultiNodeDeployment), shape
    if shape.hosts is not None:
        return shape.hosts
    if not cfg.dry_run:
        raise ConfigError(
            'deployment.type = "multi_node" needs deployment.hosts: the addresses of the nodes, the trainer\'s first, '
            "in the same order on each; --dry-run does without"
        )
    nodes = 0 if cfg.inference is None else cfg.inference.deployment.num_nodes
    return [f"node-{node}" for node in range(shape.num_train_nodes + shape.num_infer_replicas * nodes)]


def own_rank(node_rank: int | None, hosts: Sequence[str], key: str) -> int:
    """Which of the nodes this machine is: what is given, else what a scheduler says, else by its address.

    Raises: ConfigError when none, or several, of the addresses are this machine's.
    """
    if node_rank is not None:
        return node_rank
    for name in RANK_VARIABLES:
        if (text := os.environ.get(name, "")).isdigit() and int(text) < len(hosts):
            return int(text)
    mine = [rank for rank, host in enumerate(hosts) if host == socket.gethostname() or is_own_address(host)]
    if len(mine) == 1:
        return mine[0]
    found = "several of the addresses are" if mine else "none of the addresses is"
    raise ConfigError(f"{key}: {found} this machine's ({', '.join(hosts)}); say which node this is, from 0")


# -- addresses --


def _with_addresses(cfg: RLConfig, head: str) -> RLConfig:
    """Wires end on the first node, unless another address is given."""
    for wire in ("control", "rollout_transport", "weight_broadcast"):
        section = getattr(cfg.orchestrator, wire)
        if getattr(section, "host", None) == LOOPBACK:
            for place in (wire, f"orchestrator.{wire}", f"trainer.{wire}"):
                cfg = replaced(cfg, f"{place}.host", head)
    return cfg


def _engines(cfg: RLConfig, hosts: Sequence[str]) -> EnginesPlan | None:
    shape, section = cfg.deployment, cfg.inference
    if section is None:
        return None
    assert isinstance(shape, MultiNodeDeployment), shape
    return plan_replicas(section, hosts, shape.num_infer_replicas, is_cpu=section.device == "cpu")


def _with_engine_addresses(cfg: RLConfig, engines: EnginesPlan | None) -> RLConfig:
    if engines is None:
        return cfg
    urls, admin = ([f"{url}/v1" for url in found] for found in (engines.base_urls, engines.admin_urls))
    cfg = replaced(cfg, "orchestrator.client.base_url", urls if len(urls) > 1 else urls[0])
    return replaced(cfg, "orchestrator.client.admin_base_url", admin)


# -- processes --


def _with_threads(cfg: RLConfig, shape: MultiNodeDeployment) -> RLConfig:
    """CPU threads of a process: all nodes are taken to be like this machine."""
    ranks = cfg.num_train_ranks // shape.num_train_nodes
    if cfg.trainer.num_threads is None:
        most = GPU_HOST_THREADS if shape.gpus_per_node else MOST_THREADS
        cfg = replaced(cfg, "trainer.num_threads", max(1, min(most, process.num_cores() // ranks)))
    if cfg.inference is not None and cfg.inference.num_threads is None:
        cfg = replaced(cfg, "inference.num_threads", _engine_threads(cfg.inference))
    return cfg


def _engine_threads(section: InferenceSection) -> int:
    shape = section.deployment
    on_one = max(1, shape.num_processes // shape.num_nodes)
    most = MOST_THREADS if section.device == "cpu" else GPU_HOST_THREADS
    return max(1, min(most, process.num_cores() // on_one))


def _orchestrator(cfg: RLConfig, run: RunDir) -> ProcessSpec:
    ports = {"control": cfg.orchestrator.control.port}
    if cfg.orchestrator.rollout_transport.type == "zmq":
        ports["rollouts"] = cfg.orchestrator.rollout_transport.port
    env = {**process.thread_env(1), **process.device_env([])}
    if cfg.inference is not None and cfg.inference.api_key is not None:
        env[cfg.orchestrator.client.api_key_var] = cfg.inference.api_key
    return ProcessSpec("orchestrator", 0, 1, _argv("orchestrator", run, "orchestrator"), env, (), 1, ports)


def _trainers(cfg: RLConfig, run: RunDir, hosts: Sequence[str]) -> list[ProcessSpec]:
    shape = cfg.deployment
    assert isinstance(shape, MultiNodeDeployment), shape
    ranks = cfg.num_train_ranks
    each = ranks // shape.num_train_nodes
    threads = cfg.trainer.num_threads or 1
    specs = []
    for rank in range(ranks):
        node, local = divmod(rank, each)
        gpus = (str(local),) if shape.gpus_per_node else ()
        env = {**process.thread_env(threads), **process.device_env(gpus)}
        env |= rank_env(rank, local, ranks, hosts[0], shape.rendezvous_port)
        argv = _argv("trainer", run, "trainer")
        ports = {"rendezvous": shape.rendezvous_port} if rank == 0 and ranks > 1 else {}
        if rank == 0 and cfg.weight_broadcast.type == "collective":
            ports["weights"] = cfg.trainer.weight_broadcast.port
        specs.append(ProcessSpec("trainer", rank, ranks, argv, env, gpus, threads, ports, node=node))
    return specs


def engine_processes(
    section: InferenceSection, engines: EnginesPlan, run: RunDir, *, first_node: int = 0, is_held: bool
) -> list[ProcessSpec]:
    """Engines, routers and the store; GPUs are given out node by node, from the first.

    is_held: engines are let in by routers when they were given a run's weights.
    """
    specs: list[ProcessSpec] = []
    used: dict[int, int] = {}
    threads = section.num_threads or _engine_threads(section)
    several = len(engines.engines) > 1
    restarts = section.max_restarts if section.max_restarts is not None else ENGINE_RESTARTS * several
    for rank, engine in enumerate(engines.engines):
        first = used.get(engine.node, 0)
        used[engine.node] = first + engine.num_gpus
        gpus = () if section.device == "cpu" else tuple(str(first + gpu) for gpu in range(engine.num_gpus))
        env = {**process.thread_env(threads), **process.device_env(gpus), **engine.env}
        env |= {HOLD_VAR: "1"} if is_held else {}
        specs.append(
            ProcessSpec(
                "inference",
                rank,
                len(engines.engines),
                _argv("inference", run, engine.name if several else "inference"),
                env,
                gpus,
                threads,
                _engine_ports(engine),
                restarts,
                first_node + engine.node,
            )
        )
    for role, helpers in (("kv_store", engines.stores), ("router", engines.routers)):
        for rank, helper in enumerate(helpers):
            env, ports, node = (
                process.thread_env(1) | helper.env,
                {"http": helper.port},
                first_node + helper.node,
            )
            spec = ProcessSpec(
                role, rank, len(helpers), helper.argv, env, (), 1, ports, ENGINE_RESTARTS, node
            )
            specs.append(spec)
    return specs


def _engine_ports(engine: EngineSpec) -> dict[str, int]:
    ports = {"http": engine.section.server.port}
    extra = engine.section.vllm_extra
    if extra.get("data_parallel_start_rank") == 0:
        ports["data_parallel_rpc"] = extra["data_parallel_rpc_port"]
    if (channel := engine.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT")) is not None:
        ports["nixl"] = int(channel)
    return ports


def _argv(verb: str, run: RunDir, config: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "stretto", verb, "@", str(run.config(config)))


def moved(spec: ProcessSpec, run: RunDir, own: RunDir) -> ProcessSpec:
    """The process with its config in another directory."""
    argv = tuple(word.replace(str(run.configs), str(own.configs)) for word in spec.argv)
    return dataclasses.replace(spec, argv=argv)
