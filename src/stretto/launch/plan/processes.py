"""The processes of a run as data: one machine (plan.py) and several nodes (nodes.py) have the same, placed otherwise.

In: a resolved root and the devices of each process. Out: `ProcessSpec`s, which launch/run/supervisor.py starts.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stretto.base import process
from stretto.base.paths import RunDir
from stretto.base.secret import Secret
from stretto.check.backend import trainer_python
from stretto.config.root import InferenceConfig, RLConfig
from stretto.config.sections.engines import HOLD_VAR
from stretto.config.sections.inference import KEY_VAR, InferenceSection
from stretto.launch.plan.placement import GPU_HOST_THREADS, MOST_THREADS
from stretto.launch.plan.specs import EngineSpec, EnginesPlan

ENGINE_RESTARTS = 3
RENDEZVOUS_PORT = 29500  # where the ranks of one machine meet; the first free port from here


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `name` is its role, with its rank if there are several."""

    role: str
    rank: int
    num_ranks: int
    argv: tuple[str, ...]
    env: dict[str, str]
    devices: tuple[str, ...]
    """CUDA names of the GPUs that it sees; empty: CPU only."""
    threads: int
    ports: dict[str, int]
    """Ports that it listens on, by purpose."""
    max_restarts: int = 0
    """How often it is restarted when it ends; the run goes on meanwhile."""
    node: int = 0
    """Which of the plan's hosts it runs on."""
    waits_for_devices: bool = False
    """Whether it is started only when the engines, which have its devices, sleep."""
    imports_early: bool = False
    """Whether it is started beside the orchestrator, and waits for its checks when everything is imported."""

    @property
    def name(self) -> str:
        return self.role if self.num_ranks == 1 else f"{self.role}_{self.rank}"


def stretto_process(
    role: str, run: RunDir, config: str, gpus: Sequence[str], threads: int, env: Mapping[str, str],
    ports: dict[str, int], *, verb: str | None = None, rank: int = 0, num_ranks: int = 1, python: str | None = None,
    **more: Any,
) -> ProcessSpec:  # fmt: skip
    """A process that runs `stretto VERB` with a config of the run.

    env: variables besides those for threads and devices. verb: None if it is the role. python: None for this one.
    more: fields of ProcessSpec.
    """
    argv = (python or sys.executable, "-m", "stretto", verb or role, "@", str(run.config(config)))
    env = {**process.thread_env(threads), **process.device_env(gpus), **env}
    return ProcessSpec(role, rank, num_ranks, argv, env, tuple(gpus), threads, ports, **more)


# -- orchestrator, and the ranks that train --


def orchestrator_process(cfg: RLConfig, run: RunDir, key_env: Mapping[str, str]) -> ProcessSpec:
    """key_env: the keys of the engines that it calls."""
    ports = {"control": cfg.control.port}
    if cfg.rollout_transport.type == "zmq":
        ports["rollouts"] = cfg.rollout_transport.port
    return stretto_process("orchestrator", run, "run", (), 1, key_env, ports)


def rank_processes(
    cfg: RLConfig, run: RunDir, role: str, gpus: Sequence[Sequence[str]], hosts: Sequence[str], port: int,
    *, lost_after_s: float | None = None, first_node: int = 0,
) -> list[ProcessSpec]:  # fmt: skip
    """The ranks of the trainer, or of a critic of its own: equally many on each host.

    gpus: by rank. port: where the ranks meet. lost_after_s: see [deployment]; None if all are on this machine.
    """
    num_ranks = len(gpus)
    specs = []
    for rank in range(num_ranks):
        node, local = divmod(rank, num_ranks // len(hosts))
        env, ports = rank_env(rank, local, num_ranks, hosts[0], port), {}
        if lost_after_s is not None and num_ranks > 1:
            env |= nodes_env(rank, num_ranks // len(hosts), hosts, lost_after_s)
            ports = {"rendezvous": port} if rank == 0 else {}
        if rank == 0 and role == "trainer":
            if lost_after_s is not None and cfg.weight_broadcast.type == "collective":
                ports["weights"] = cfg.weight_broadcast.port
            if cfg.critic_placement is not None:
                ports["critic"] = cfg.critic_placement.port
        # Ranks of other nodes wait for the first one before they take memory.
        waits = role == "trainer" and cfg.trainer_waits_for_devices and node == 0

        threads = cfg.trainer.num_threads or 1
        own = gpus[rank]
        specs.append(
            stretto_process(
                role,
                run,
                "run",
                own,
                threads,
                env,
                ports,
                rank=rank,
                num_ranks=num_ranks,
                python=trainer_python(cfg.trainer),
                node=first_node + node,
                waits_for_devices=waits,
                imports_early=not waits and cfg.service is None,
            )
        )
    return specs


def rank_env(rank: int, local_rank: int, num_ranks: int, host: str, port: int) -> dict[str, str]:
    """The environment variables that torch.distributed reads; none for a single rank."""
    if num_ranks == 1:
        return {}
    env = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(num_ranks)}
    return env | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def nodes_env(rank: int, num_local: int, hosts: Sequence[str], lost_after_s: float) -> dict[str, str]:
    """What a rank gets to know of the nodes; num_local: ranks per node."""
    env = {"LOCAL_WORLD_SIZE": str(num_local), process.LOST_AFTER_VAR: str(lost_after_s)}
    return env | ({process.TRAIN_NODES_VAR: " ".join(hosts)} if rank == 0 else {})


# -- engines, routers, cache stores --


def engine_processes(
    section: InferenceSection, engines: EnginesPlan, run: RunDir, *, is_held: bool, first_node: int = 0,
    gpus: Sequence[str] | None = None, key_env: Mapping[str, str] = MappingProxyType({}),
) -> list[ProcessSpec]:  # fmt: skip
    """Engines, routers and the store as processes; each node's GPUs are assigned in order.

    is_held: routers send an engine nothing until it has loaded the run's weights. gpus: CUDA's names of the GPUs if
    all processes are on one machine; None: every node numbers its GPUs from 0. key_env: the key that engines and
    routers require.
    """
    specs: list[ProcessSpec] = []
    used: dict[int, int] = {}
    for rank, engine in enumerate(engines.engines):
        first = used.get(engine.node, 0) if engine.first_gpu is None else engine.first_gpu
        used[engine.node] = first + engine.num_gpus
        own = [str(gpu) for gpu in range(first, first + engine.num_gpus)]
        own = own if gpus is None else [gpus[int(gpu)] for gpu in own] if gpus else []
        spec = engine_process(section, engines, run, rank, own, is_held=is_held, key_env=key_env)
        specs.append(dataclasses.replace(spec, node=first_node + engine.node))
    return specs + helper_processes(engines, first_node, key_env)


def engine_process(
    section: InferenceSection, engines: EnginesPlan, run: RunDir, rank: int, gpus: Sequence[str], *,
    is_held: bool, key_env: Mapping[str, str],
) -> ProcessSpec:  # fmt: skip
    """One process of an engine; for the arguments see `engine_processes`."""
    engine, count = engines.engines[rank], len(engines.engines)
    threads = section.num_threads or engine_threads(section)
    restarts = ENGINE_RESTARTS * (count > 1) if section.max_restarts is None else section.max_restarts
    env = engine.env | ({HOLD_VAR: "1"} if is_held else {}) | dict(key_env)
    gpus = () if section.device == "cpu" else gpus
    return stretto_process(
        "inference", run, engine.name, gpus, threads, env, _engine_ports(engine),
        rank=rank, num_ranks=count, max_restarts=restarts, imports_early=is_held,
    )  # fmt: skip


def engine_threads(section: InferenceSection) -> int:
    """CPU threads of an engine, as if every node had as many cores as this one."""
    on_one = max(1, section.deployment.num_processes // section.deployment.num_nodes)
    most = MOST_THREADS if section.device == "cpu" else GPU_HOST_THREADS
    return max(1, min(most, process.num_cores() // on_one))


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


def helper_processes(
    engines: EnginesPlan, first_node: int = 0, router_env: Mapping[str, str] = MappingProxyType({})
) -> list[ProcessSpec]:
    """Cache stores, routers and registrars as processes.

    first_node: the number of their node 0. router_env: the engines' key, which routers require, too.
    """
    roles = {"kv_store": engines.stores, "router": engines.routers, "registrar": engines.registrars}
    specs = []
    for role, helpers in roles.items():
        for rank, helper in enumerate(helpers):
            env = process.thread_env(1) | helper.env | ({} if role == "kv_store" else dict(router_env))
            ports = {} if helper.port is None else {"http": helper.port}
            spec = ProcessSpec(role, rank, len(helpers), helper.argv, env, (), 1, ports, ENGINE_RESTARTS)
            specs.append(dataclasses.replace(spec, node=first_node + helper.node))
    return specs


def section_of(cfg: InferenceConfig, engine: EngineSpec) -> InferenceConfig:
    """The config of one engine's process."""
    return cfg.model_copy(update={key: getattr(engine.section, key) for key in type(engine.section).model_fields})


# -- keys --


def client_key_env(section: InferenceSection, client_var: str, variable: str | None = None) -> dict[str, str]:
    """The engine's API key for its clients, as an environment: from the config, else from client_var; {} if none.

    variable: the variable that gets the key; None: client_var.
    """
    key = section.api_key or os.environ.get(client_var)
    return {variable or client_var: key} if key else {}


def engine_key_env(section: InferenceSection, client_var: str | None) -> dict[str, str]:
    """The environment in which an engine finds the key that its clients send, and no other key.

    client_var: the variable that its clients read; None if it has no clients.
    """
    others = {} if client_var == KEY_VAR else {KEY_VAR: ""}
    return others | ({} if client_var is None else client_key_env(section, client_var, KEY_VAR))


def with_engine_key(cfg: RLConfig, secret: Secret | None) -> tuple[InferenceSection | None, list[str]]:
    """[inference] with the API key of a run's engines; also a note that says where it comes from.

    The key is that of the config, else of the environment; without both, every node derives the same key from the
    run's secret. A derived key is passed in the environment of processes, and is not in the configs that are written.
    """
    section = cfg.inference
    if section is None or section.api_key is not None:
        return section, []
    if os.environ.get(variable := cfg.orchestrator.client.api_key_var):
        return section, [f"the engines' key is that of {variable}: it must be set on every node"]
    if secret is not None:
        section = section.model_copy(update={"api_key": secret.text_key("inference.api_key")})
    note = "inference.api_key is made from the run's secret: engines answer the run's own processes alone"
    return section, [note]
