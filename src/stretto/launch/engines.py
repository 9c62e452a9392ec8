"""The engines of a run, and the router before them, as data: which processes on which nodes, with what.

In: a checked [inference] section and the names of its nodes. Out: an `EnginesPlan`. One engine may be several
processes (one a node); a process is a `stretto inference` with a section of its own. Shapes, by
[inference.deployment]:

    single_node        num_replicas engines on the first node
    multi_node         one engine a node; with enable_expert_parallel one engine over all nodes (wide EP), whose
                       every process serves requests and balances over its own devices
    disaggregated      engines that read prompts and engines that write replies, caches travelling by NIXL

Rollouts go to the router, admin calls to the engines: the router would pass an admin call to one of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stretto.base.errors import ConfigError
from stretto.config import router_flags
from stretto.config.engines import (
    ADMITTED,
    STORE_VARIABLE,
    Disaggregated,
    MooncakeOffload,
    MultiNode,
    RouterSection,
    SingleNode,
)
from stretto.config.inference import InferenceSection

Role = Literal["engine", "prefill", "decode"]
BACKEND_OFFSET = 100
NIXL = "NixlConnector"


@dataclass(frozen=True)
class EngineSpec:
    """One `stretto inference` process."""

    name: str
    role: Role
    node: int
    section: InferenceSection
    """Its own: port, parallel degrees of the whole engine, vLLM's options of this process."""
    env: dict[str, str] = field(default_factory=dict)
    num_gpus: int = 1

    def url(self, hosts: Sequence[str]) -> str:
        return f"http://{hosts[self.node]}:{self.section.server.port}"


@dataclass(frozen=True)
class HelperSpec:
    """A process that is no engine: a router, the store's master, a node's part of the store."""

    name: str
    node: int
    argv: tuple[str, ...]
    port: int
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EnginesPlan:
    """All processes of inference, and where to reach them."""

    engines: tuple[EngineSpec, ...]
    routers: tuple[HelperSpec, ...]
    stores: tuple[HelperSpec, ...]
    """Of the caches that all engines share: the master first, then a part on each node."""
    base_urls: tuple[str, ...]
    """Where rollouts go."""
    admin_urls: tuple[str, ...]
    """Every engine's processes that serve HTTP."""


def plan_engines(section: InferenceSection, hosts: Sequence[str], *, is_cpu: bool = False) -> EnginesPlan:
    """The processes of one [inference] section on these nodes.

    Raises: ConfigError when there are fewer nodes than the shape needs, or degrees that do not divide.
    """
    shape = section.deployment
    is_routed = section.router is not None and shape.num_processes > 1
    match shape:
        case MultiNode():
            _need_nodes(hosts, shape.num_nodes, "inference.deployment.num_nodes")
            engines = (
                _wide(section, shape, hosts) if section.enable_expert_parallel else _each(section, shape)
            )
        case Disaggregated():
            _need_nodes(hosts, shape.num_nodes, "inference.deployment")
            engines = _disaggregated(section, shape, hosts, is_cpu=is_cpu)
        case _:
            engines = _replicas(section, is_routed=is_routed)
    engines, stores = _with_offload([_at_home(engine, hosts) for engine in engines], section, hosts)
    admin = tuple(engine.url(hosts) for engine in engines)
    router = section.router
    if not is_routed or router is None:
        return EnginesPlan(tuple(engines), (), stores, admin, admin)
    if router.address is not None:
        return EnginesPlan(tuple(engines), (), stores, (router.address,), admin)
    spec = _router(router, engines, hosts, section)
    return EnginesPlan(tuple(engines), (spec,), stores, (f"http://{hosts[0]}:{spec.port}",), admin)


def plan_replicas(
    section: InferenceSection, hosts: Sequence[str], num_replicas: int, *, is_cpu: bool = False
) -> EnginesPlan:
    """The whole of [inference] several times over, each with nodes and a router of its own.

    [deployment] num_infer_replicas; rollouts are spread over the routers by whoever sends them.
    """
    if num_replicas == 1:
        return plan_engines(section, hosts, is_cpu=is_cpu)
    each = section.deployment.num_nodes
    _need_nodes(hosts, each * num_replicas, "deployment.num_infer_replicas")
    engines: list[EngineSpec] = []
    routers: list[HelperSpec] = []
    urls: list[str] = []
    admin: list[str] = []
    stores: list[HelperSpec] = []
    for replica in range(num_replicas):
        first = replica * each
        plan = plan_engines(section, hosts[first : first + each], is_cpu=is_cpu)
        engines += [replace(e, name=f"replica_{replica}_{e.name}", node=first + e.node) for e in plan.engines]
        routers += [replace(r, name=f"replica_{replica}_{r.name}", node=first + r.node) for r in plan.routers]
        urls += plan.base_urls
        admin += plan.admin_urls
        stores += [replace(h, name=f"replica_{replica}_{h.name}", node=first + h.node) for h in plan.stores]
    return EnginesPlan(tuple(engines), tuple(routers), tuple(stores), tuple(urls), tuple(admin))


def _need_nodes(hosts: Sequence[str], needed: int, key: str) -> None:
    if len(hosts) < needed:
        have = f"{len(hosts)} node{'s' * (len(hosts) != 1)}"
        raise ConfigError(f"{key}: the shape needs {needed} nodes and there are {have}")


def _backend_port(section: InferenceSection, *, is_routed: bool = True) -> int:
    shape = section.deployment
    if isinstance(shape, Disaggregated):
        raise AssertionError("prefill and decode have ports of their own")
    if shape.backend_port is not None:
        return shape.backend_port
    return section.server.port + BACKEND_OFFSET if is_routed else section.server.port


def _variant(section: InferenceSection, port: int, *, dp: int | None = None, **vllm: Any) -> InferenceSection:
    """The section of one process."""
    extra = {**vllm, **section.vllm_extra}
    parallel = section.parallel if dp is None else section.parallel.model_copy(update={"dp": dp})
    server = section.server.model_copy(update={"port": port})
    own = {"server": server, "parallel": parallel, "vllm_extra": extra, "deployment": SingleNode()}
    if section.engine == "auto" and section.vllm_only():
        own["engine"] = "vllm"
    return section.model_copy(update=own)


def _at_home(engine: EngineSpec, hosts: Sequence[str]) -> EngineSpec:
    """The engine listens where others reach it, unless the user said where."""
    server = engine.section.server
    listening = listen_address(server.host, hosts[engine.node])
    own = engine.section.model_copy(update={"server": server.model_copy(update={"host": listening})})
    return replace(engine, section=own)


def listen_address(host: str, node: str) -> str:
    """Loopback, which is the default, is of no use to other machines: the address of the node then."""
    return node if host == "127.0.0.1" and node != "localhost" else host


# -- shapes --


def _replicas(section: InferenceSection, *, is_routed: bool) -> list[EngineSpec]:
    count = section.deployment.num_replicas
    gpus = section.parallel.tp * section.parallel.dp
    if count == 1:
        return [EngineSpec("inference", "engine", 0, section, num_gpus=gpus)]
    first = _backend_port(section, is_routed=is_routed)
    ports = [first + replica for replica in range(count)]
    return [
        EngineSpec(f"inference_{i}", "engine", 0, _variant(section, port), num_gpus=gpus)
        for i, port in enumerate(ports)
    ]


def _each(section: InferenceSection, shape: MultiNode) -> list[EngineSpec]:
    port, gpus = _backend_port(section), section.parallel.tp * section.parallel.dp
    if gpus > shape.gpus_per_node:
        raise ConfigError(
            f"inference.parallel: tp = {section.parallel.tp} x dp = {section.parallel.dp} need {gpus} GPUs and a node "
            f"has {shape.gpus_per_node}; lower one, or spread one engine over the nodes with "
            f"inference.enable_expert_parallel"
        )
    return [
        EngineSpec(f"inference_{node}", "engine", node, _variant(section, port), num_gpus=gpus)
        for node in range(shape.num_nodes)
    ]


def _wide(section: InferenceSection, shape: MultiNode, hosts: Sequence[str]) -> list[EngineSpec]:
    dp = section.parallel.dp
    if dp % shape.num_nodes:
        raise ConfigError(
            f"inference.parallel.dp = {dp}: with enable_expert_parallel it is divided among "
            f"{shape.num_nodes} nodes; give a multiple of {shape.num_nodes}"
        )
    nodes = range(shape.num_nodes)
    return _one_wide_engine(
        section, "inference", "engine", nodes, _backend_port(section), hosts, dp, shape.data_parallel_rpc_port
    )


def _one_wide_engine(
    section: InferenceSection,
    name: str,
    role: Role,
    nodes: Sequence[int],
    port: int,
    hosts: Sequence[str],
    dp: int,
    rpc_port: int,
    **vllm: Any,
) -> list[EngineSpec]:
    """One engine over several nodes: a process each, which serves requests for its own ranks."""
    local = dp // len(nodes)
    specs = []
    for index, node in enumerate(nodes):
        wide = {}
        if len(nodes) > 1:
            wide = {
                "data_parallel_size_local": local,
                "data_parallel_start_rank": index * local,
                "data_parallel_address": hosts[nodes[0]],
                "data_parallel_rpc_port": rpc_port,
                "data_parallel_hybrid_lb": True,
            }
        own = _variant(section, port, dp=dp, **wide, **vllm)
        label = f"{name}_{index}" if len(nodes) > 1 else name
        specs.append(EngineSpec(label, role, node, own, num_gpus=local * section.parallel.tp))
    return specs


def _disaggregated(
    section: InferenceSection, shape: Disaggregated, hosts: Sequence[str], *, is_cpu: bool
) -> list[EngineSpec]:
    engines: list[EngineSpec] = []
    sides = (
        ("prefill", shape.num_prefill_replicas, shape.num_prefill_nodes, shape.prefill_port),
        ("decode", shape.num_decode_replicas, shape.num_decode_nodes, shape.decode_port),
    )
    next_node = 0
    for role, replicas, nodes_each, port in sides:
        overrides = shape.prefill_env_overrides if role == "prefill" else shape.decode_env_overrides
        for replica in range(replicas):
            nodes = [0] if shape.is_local else list(range(next_node, next_node + nodes_each))
            next_node += nodes_each
            specs = _one_wide_engine(
                section,
                f"{role}_{replica}",
                role,
                nodes,
                port + replica if shape.is_local else port,
                hosts,
                1 if shape.is_local else _dp_of(section, shape, nodes_each),
                shape.data_parallel_rpc_port,
                **_disaggregated_options(section, role, is_cpu=is_cpu),
            )
            for spec in specs:
                channel = shape.side_channel_port + len(engines)
                env = {
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": hosts[spec.node],
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel),
                    **overrides,
                }
                engines.append(EngineSpec(spec.name, role, spec.node, spec.section, env, spec.num_gpus))
    return engines


def _dp_of(section: InferenceSection, shape: Disaggregated, num_nodes: int) -> int:
    """Data-parallel ranks of one engine: all GPUs of its nodes, unless the user said how many."""
    tp = section.parallel.tp
    if section.parallel.dp > 1:
        dp = section.parallel.dp
        if dp % num_nodes:
            raise ConfigError(
                f"inference.parallel.dp = {dp} is divided among the {num_nodes} nodes of an engine; give a multiple"
            )
        return dp
    if shape.gpus_per_node % tp:
        raise ConfigError(
            f"inference.parallel.tp = {tp} does not divide the {shape.gpus_per_node} GPUs of a node"
        )
    return shape.gpus_per_node // tp * num_nodes


def _disaggregated_options(section: InferenceSection, role: str, *, is_cpu: bool) -> dict[str, Any]:
    connector: dict[str, Any] = {"kv_connector": NIXL, "kv_role": "kv_both"}
    if is_cpu:
        return {"kv_transfer_config": connector | {"kv_buffer_device": "cpu"}}
    options: dict[str, Any] = {"kv_transfer_config": connector}
    if section.enable_expert_parallel:
        low = {"prefill": "deepep_high_throughput", "decode": "deepep_low_latency"}
        options["all2all_backend"] = low[role]
    return options


# -- caches beyond the GPU --


def _with_offload(
    engines: list[EngineSpec], section: InferenceSection, hosts: Sequence[str]
) -> tuple[list[EngineSpec], tuple[HelperSpec, ...]]:
    offload = section.kv_cache_offload
    if offload is None:
        return engines, ()
    found = []
    for engine in engines:
        connectors = [offload_connector(section)]
        if (other := engine.section.vllm_extra.get("kv_transfer_config")) is not None:
            connectors.insert(0, other)
        one = connectors[0]
        if len(connectors) > 1:
            one = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": connectors},
            }
        extra = engine.section.vllm_extra | {"kv_transfer_config": one}
        update = {
            "vllm_extra": extra,
            "enable_prefix_caching": True,
            "kv_cache_offload": None,
            "engine": "vllm",
        }
        own = engine.section.model_copy(update=update)
        env = engine.env | _store_env(offload, hosts) if isinstance(offload, MooncakeOffload) else engine.env
        found.append(EngineSpec(engine.name, engine.role, engine.node, own, env, engine.num_gpus))
    return found, _stores(offload, hosts[: section.deployment.num_nodes]) if isinstance(
        offload, MooncakeOffload
    ) else ()


def offload_connector(section: InferenceSection) -> dict[str, Any]:
    """vLLM's connector of [inference.kv_cache_offload]."""
    offload = section.kv_cache_offload
    assert offload is not None
    if isinstance(offload, MooncakeOffload):
        return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    config: dict[str, Any] = {"cpu_bytes_to_use": offload.cpu.num_bytes}
    if offload.disk is not None:
        tier = {"type": "fs", "root_dir": offload.disk.path}
        config |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}


def _store_env(offload: MooncakeOffload, hosts: Sequence[str]) -> dict[str, str]:
    """Where engines find the store; written to the file that vLLM reads by inference/vllm/launch.py."""
    config = {
        "mode": "standalone-store",
        "metadata_server": f"http://{hosts[0]}:{offload.metadata_port}/metadata",
        "master_server_address": f"{hosts[0]}:{offload.master_port}",
        "global_segment_size": 0,
        "local_buffer_size": min(offload.cpu.num_bytes, 1 << 30),
        "protocol": offload.protocol,
        "device_name": "",
        "enable_offload": offload.disk is not None,
    }
    return {STORE_VARIABLE: json.dumps(config)}


def _stores(offload: MooncakeOffload, hosts: Sequence[str]) -> tuple[HelperSpec, ...]:
    """The master, with the metadata server in it, on the first node; on each a process with its share of memory."""
    has_disk = str(offload.disk is not None).lower()
    master = (
        sys.executable,
        "-m",
        "mooncake.cli",
        f"-rpc_port={offload.master_port}",
        "-enable_http_metadata_server=true",
        f"-http_metadata_server_port={offload.metadata_port}",
        f"-metrics_port={offload.metrics_port}",
        f"-enable_offload={has_disk}",
    )
    parts = []
    for node, host in enumerate(hosts):
        words = (
            sys.executable,
            "-m",
            "mooncake.cli_client",
            f"-host={host}",
            f"-port={offload.client_port}",
            f"-global_segment_size={offload.cpu.num_bytes} B",
            f"-master_server_address={hosts[0]}:{offload.master_port}",
            f"-metadata_server=http://{hosts[0]}:{offload.metadata_port}/metadata",
            f"-protocol={offload.protocol}",
            f"-enable_offload={has_disk}",
        )
        env = {} if offload.disk is None else {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": offload.disk.path}
        parts.append(HelperSpec(f"kv_store_{node}", node, words, offload.client_port, env))
    return HelperSpec("kv_master", 0, master, offload.master_port), *parts


# -- the router --


def _router(
    router: RouterSection, engines: Sequence[EngineSpec], hosts: Sequence[str], section: InferenceSection
) -> HelperSpec:
    shape = section.deployment
    port = shape.router_port or section.server.port
    words = ["--host", listen_address(section.server.host, hosts[0]), "--port", str(port)]
    words += ["--policy", router.policy]
    if isinstance(shape, Disaggregated):
        words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        for engine in engines:
            words += [f"--{engine.role}", engine.url(hosts)]
    else:
        words += ["--worker-urls", *(engine.url(hosts) for engine in engines)]
    # Rollouts last as long as they last, and the orchestrator counts and retries them itself.
    options: dict[str, Any] = {
        "health_check_endpoint": ADMITTED,
        "health_check_interval_secs": 2,
        "health_failure_threshold": 2,
        "health_success_threshold": 1,
        "worker_startup_timeout_secs": 1800,
        "request_timeout_secs": 7200,
        "max_concurrent_requests": 65536,
        "log_level": "warning",
        **router.extra,
    }
    for name, value in options.items():
        words += router_flags.arguments(name, value, f"inference.router.extra.{name}")
    return HelperSpec("router", 0, (sys.executable, "-m", "vllm_router.launch_router", *words), port)
