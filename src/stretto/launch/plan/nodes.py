"""Plans a run over several machines: [deployment] type = "multi_node".

Every node gets the same config, computes the same plan, and runs its own processes of it. There is no remote login,
and nodes share only the network (and a file system if a transport or checkpoints need one). So ports are those of the
config, and the plan depends on nothing that differs between machines. Nodes, in the order of `deployment.hosts`:

    first                 orchestrator, trainer ranks, console
    num_train_nodes - 1   trainer ranks; on all of these also a critic's own, unless it has nodes
    num_critic_nodes      ranks of a critic that has nodes of its own
    the rest              inference: one replica after another, as inference.deployment says, each with its router on
                          its first node; Dynamo's frontend, which asks nobody for a key, is on the first of all
                          nodes, where only that machine's processes reach it
    after these           frozen models, several on a node where they fit
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from socket import AF_INET, AF_INET6
from types import MappingProxyType

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import is_free, is_own_address
from stretto.base.secret import Secret
from stretto.config.root import RLConfig
from stretto.config.sections.deployment import MultiNodeDeployment
from stretto.config.sections.engines import HOLD_VAR
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.engines import plan_replicas
from stretto.launch.plan.models import model_threads, started_models, with_model_hosts
from stretto.launch.plan.placement import (
    GPU_HOST_THREADS,
    MOST_THREADS,
    replaced,
    share_gpu_memory,
    with_canary_tolerance,
    with_engines,
)
from stretto.launch.plan.plan import (
    ENGINE_RESTARTS,
    LaunchPlan,
    ProcessSpec,
    client_key_env,
    engine_key_env,
    helper_processes,
    model_process,
    rank_env,
    with_engine_key,
)
from stretto.launch.plan.routers import has_unguarded_router
from stretto.launch.plan.specs import EngineSpec, EnginesPlan

LOOPBACK = "127.0.0.1"
RANK_VARIABLES = ("SLURM_NODEID", "GROUP_RANK")
"""Environment variables in which schedulers give the number of this node."""
FIRST_NODE_VAR = "STRETTO_FIRST_NODE"
"""Set in a step of a job on some of its nodes: the number of the first of them."""


def plan_nodes(
    cfg: RLConfig, run: RunDir, resume_step: int | None = None, secret: Secret | None = None
) -> LaunchPlan:
    """Plan the processes of all nodes.

    secret: the run's, from which the engines' API key is made if the user gave none; None in a dry run.
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
    cfg = _with_engine_addresses(cfg, engines)
    first_model = cfg.num_nodes - cfg.num_model_nodes
    cfg = with_model_hosts(cfg, hosts[first_model:])
    if cfg.resume is not None:
        resume = cfg.resume.model_copy(update={"step": resume_step})
        cfg = cfg.model_copy(update={"resume": resume})
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"name": cfg.run_name})})
    cfg = _with_threads(cfg, shape)
    processes = [_orchestrator(cfg, run, keyed), *_trainers(cfg, run, hosts), *_critics(cfg, run, hosts)]
    if engines is not None and cfg.inference is not None and keyed is not None:
        key = engine_key_env(keyed, cfg.orchestrator.client.api_key_var)
        started = engine_processes(
            cfg.inference, engines, run, first_node=cfg.first_infer_node, is_held=True, key_env=key
        )
        is_first = has_unguarded_router(cfg.inference)
        processes += [
            dataclasses.replace(spec, node=0) if spec.role == "router" and is_first else spec
            for spec in started
        ]
    processes += _models(cfg, run, first_model, keyed)
    return LaunchPlan.of(run, cfg, engines, processes, hosts=hosts, notes=notes)


def node_hosts(cfg: RLConfig) -> list[str]:
    """Addresses of all nodes; names such as node-0 in a dry run that gives none.

    Raises: ConfigError if none are given and this is not a dry run.
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


def find_node_rank(node_rank: int | None, hosts: Sequence[str], key: str) -> int:
    """The number of this node: node_rank if given, else the scheduler's, else found by this machine's address.

    Raises: ConfigError if none, or more than one, of the addresses is this machine's.
    """
    if node_rank is not None:
        return node_rank
    for name in RANK_VARIABLES:
        first = int(os.environ.get(FIRST_NODE_VAR, "0")) if name == "SLURM_NODEID" else 0
        if (text := os.environ.get(name, "")).isdigit() and first + int(text) < len(hosts):
            return first + int(text)
    mine = [rank for rank, host in enumerate(hosts) if host == socket.gethostname() or is_own_address(host)]
    if len(mine) == 1:
        return mine[0]
    found = "several of the addresses are" if mine else "none of the addresses is"
    raise ConfigError(f"{key}: {found} this machine's ({', '.join(hosts)}); say which node this is, from 0")


def check_hosts(hosts: Sequence[str], key: str) -> None:
    """Raises: ConfigError if an address is given for two nodes."""
    for node, host in enumerate(hosts):
        if (first := hosts.index(host)) < node:
            raise ConfigError(f"{key}: nodes {first} and {node} are both {host}; give each machine once")


def on_visible_gpus(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Processes of this node with CUDA's names of the GPUs that it shows: GPU 0 of the plan is the first of them."""
    names = process.visible_gpus()
    return [_with_gpus(spec, [names[int(gpu)] for gpu in spec.devices]) for spec in specs]


def _with_gpus(spec: ProcessSpec, gpus: Sequence[str]) -> ProcessSpec:
    return dataclasses.replace(spec, devices=tuple(gpus), env=spec.env | process.device_env(gpus))


def check_ports(specs: Sequence[ProcessSpec], node: int, host: str, ways: str) -> None:
    """Look whether a node can listen where its processes will; ways: the keys of their ports.

    Raises: ConfigError that names the node and the port that is taken.
    """
    if not is_own_address(host):  # processes may be told to listen elsewhere; one that cannot listen says so
        if node == 0 and any("rendezvous" in spec.ports for spec in specs):
            raise ConfigError(
                f"node 0, {host}: that is no address of this machine, where the trainer's ranks would meet; put the "
                "address of the machine with node_rank = 0 first"
            )
        return
    for spec in specs:
        for what, port in spec.ports.items():
            if not is_free(host, port):
                raise ConfigError(
                    f"node {node}, {host}: port {port} ({what} of {spec.name}) is taken; end what has it, or give "
                    f"another on all nodes with {ways}"
                )


def check_reachable(hosts: Sequence[str], node: int) -> None:
    """Raises: ConfigError if this node's own name leads only to addresses that the others cannot reach.

    Debian and others give a machine's name to 127.0.1.1; what listens there hears this machine alone.
    """
    host = hosts[node]
    if len(set(hosts)) == 1 or host == "localhost" or host.replace(".", "").isdigit() or ":" in host:
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as cause:
        raise ConfigError(f"node {node}, {host}: this machine cannot resolve that name ({cause})") from cause
    # Where a name has addresses of both kinds, servers take the IPv4 ones.
    kinds = {kind: [str(at[0]) for family, *_, at in found if family == kind] for kind in (AF_INET, AF_INET6)}
    addresses = kinds[AF_INET] or kinds[AF_INET6]
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        raise ConfigError(
            f"node {node}, {host}: on this machine that name is {' and '.join(addresses)}, where other nodes cannot "
            "reach it; correct /etc/hosts, or give addresses instead of names."
        )


# -- addresses --


def _with_addresses(cfg: RLConfig, head: str) -> RLConfig:
    """Let wires listen on the first node, unless the user gave another address."""
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


def _with_engine_addresses(cfg: RLConfig, engines: EnginesPlan | None) -> RLConfig:
    if engines is None:
        return cfg
    return with_engines(cfg, engines)


# -- processes --


def _with_threads(cfg: RLConfig, shape: MultiNodeDeployment) -> RLConfig:
    """Fill in CPU threads per process, as if every node had as many cores as this one."""
    ranks = _ranks_of_a_node(cfg, shape)
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


def _orchestrator(cfg: RLConfig, run: RunDir, keyed: InferenceSection | None) -> ProcessSpec:
    ports = {"control": cfg.control.port}
    if cfg.rollout_transport.type == "zmq":
        ports["rollouts"] = cfg.rollout_transport.port
    env = {**process.thread_env(1), **process.device_env([])}
    if keyed is not None:
        env |= client_key_env(keyed, cfg.orchestrator.client.api_key_var)
    return ProcessSpec("orchestrator", 0, 1, _argv("orchestrator", run, "run"), env, (), 1, ports)


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
        if ranks > 1:
            env |= nodes_env(rank, each, hosts[: shape.num_train_nodes], shape.lost_after_s)
        argv = _argv("trainer", run, "run")
        ports = {"rendezvous": shape.rendezvous_port} if rank == 0 and ranks > 1 else {}
        if rank == 0 and cfg.weight_broadcast.type == "collective":
            ports["weights"] = cfg.weight_broadcast.port
        if rank == 0 and cfg.critic_placement is not None:
            ports["critic"] = cfg.critic_placement.port
        # Ranks of other nodes wait for the first one before they take memory.
        waits = cfg.trainer_waits_for_devices and node == 0
        spec = ProcessSpec("trainer", rank, ranks, argv, env, gpus, threads, ports, node=node)
        specs.append(dataclasses.replace(spec, waits_for_devices=waits))
    return specs


def _critics(cfg: RLConfig, run: RunDir, hosts: Sequence[str]) -> list[ProcessSpec]:
    """Ranks of a critic of its own: on the nodes after the trainer's, or on those, on the GPUs after the trainer's."""
    shape, ranks = cfg.deployment, cfg.num_critic_ranks
    assert isinstance(shape, MultiNodeDeployment), shape
    first = shape.num_train_nodes if shape.num_critic_nodes else 0
    places = hosts[first : first + (shape.num_critic_nodes or shape.num_train_nodes)]
    each, skipped = ranks // len(places), 0 if first else shape.gpus_per_node
    threads = cfg.trainer.num_threads or 1
    specs = []
    for rank in range(ranks):
        node, local = divmod(rank, each)
        gpus = (str(skipped + local),) if shape.gpus_per_node else ()
        env = {**process.thread_env(threads), **process.device_env(gpus)}
        env |= rank_env(rank, local, ranks, places[0], shape.rendezvous_port + 1)
        if ranks > 1:
            env |= nodes_env(rank, each, places, shape.lost_after_s)
        ports = {"rendezvous": shape.rendezvous_port + 1} if rank == 0 and ranks > 1 else {}
        argv = _argv("critic", run, "run")
        specs.append(ProcessSpec("critic", rank, ranks, argv, env, gpus, threads, ports, node=first + node))
    return specs


def _models(cfg: RLConfig, run: RunDir, first_node: int, keyed: InferenceSection | None) -> list[ProcessSpec]:
    """The engines of frozen models, which ask for the key of the policy's; a process on each node of one."""
    key_var = cfg.orchestrator.client.api_key_var
    key = {} if keyed is None else engine_key_env(keyed, key_var)
    specs = []
    for name, section in started_models(cfg):
        node, first = cfg.model_places[name]
        nodes = section.deployment.num_nodes
        count = section.gpus_with_idle if nodes == 1 else getattr(section.deployment, "gpus_per_node", 0)
        count *= section.device != "cpu" and cfg.deployment.gpus_per_node > 0
        gpus = [str(gpu) for gpu in range(first, first + count)]
        threads = model_threads(section, {"inference": MOST_THREADS}, gpus)
        spec = model_process(run, name, section, threads, gpus)
        for rank in range(nodes):
            own = {"env": spec.env | key, "node": first_node + node + rank}
            if nodes > 1:
                own |= {"rank": rank, "num_ranks": nodes, "argv": (*spec.argv, "--node-rank", str(rank))}
            specs.append(dataclasses.replace(spec, **own))
    return specs


def _ranks_of_a_node(cfg: RLConfig, shape: MultiNodeDeployment) -> int:
    """Trainer ranks on a node, and a critic's on the same."""
    beside = 0 if shape.num_critic_nodes else cfg.num_critic_ranks
    return (cfg.num_train_ranks + beside) // shape.num_train_nodes


def nodes_env(rank: int, num_local: int, hosts: Sequence[str], lost_after_s: float) -> dict[str, str]:
    """What ranks on several nodes know of these; num_local: ranks of each."""
    env = {"LOCAL_WORLD_SIZE": str(num_local), process.LOST_AFTER_VAR: str(lost_after_s)}
    return env | ({process.TRAIN_NODES_VAR: " ".join(hosts)} if rank == 0 else {})


def engine_processes(
    section: InferenceSection,
    engines: EnginesPlan,
    run: RunDir,
    *,
    first_node: int = 0,
    is_held: bool,
    names: Sequence[str] | None = None,
    key_env: Mapping[str, str] = MappingProxyType({}),
) -> list[ProcessSpec]:
    """Engines, routers and the store as processes; each node's GPUs are assigned in order.

    is_held: routers send an engine nothing until it has loaded the run's weights.
    names: CUDA's names of the GPUs, if all is on one machine; None: every node numbers its GPUs from 0.
    key_env: the key that engines and routers require.
    """
    specs: list[ProcessSpec] = []
    used: dict[int, int] = {}
    threads = section.num_threads or _engine_threads(section)
    several = len(engines.engines) > 1
    restarts = section.max_restarts if section.max_restarts is not None else ENGINE_RESTARTS * several
    for rank, engine in enumerate(engines.engines):
        first = used.get(engine.node, 0) if engine.first_gpu is None else engine.first_gpu
        used[engine.node] = first + engine.num_gpus
        own = range(first, first + engine.num_gpus)
        gpus = () if section.device == "cpu" else tuple(names[gpu] if names else str(gpu) for gpu in own)
        env = {**process.thread_env(threads), **process.device_env(gpus), **engine.env}
        env |= {HOLD_VAR: "1", **key_env} if is_held else key_env
        specs.append(
            ProcessSpec(
                "inference",
                rank,
                len(engines.engines),
                _argv("inference", run, engine.name),
                env,
                gpus,
                threads,
                _engine_ports(engine),
                restarts,
                first_node + engine.node,
            )
        )
    return specs + helper_processes(engines, first_node, key_env)


def _engine_ports(engine: EngineSpec) -> dict[str, int]:
    ports = {"http": engine.section.server.port}
    extra = engine.section.vllm_extra
    if extra.get("data_parallel_start_rank") == 0:
        ports["data_parallel_rpc"] = extra["data_parallel_rpc_port"]
    if extra.get("node_rank") == 0:
        ports["ranks"] = extra["master_port"]
    if (channel := engine.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT")) is not None:
        ports["nixl"] = int(channel)
    return ports


def _argv(verb: str, run: RunDir, config: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "stretto", verb, "@", str(run.config(config)))


def with_config_dir(spec: ProcessSpec, run: RunDir, own: RunDir) -> ProcessSpec:
    """The process with its config read from `own` instead of `run`."""
    argv = tuple(word.replace(str(run.configs), str(own.configs)) for word in spec.argv)
    return dataclasses.replace(spec, argv=argv)
