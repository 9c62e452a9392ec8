"""Plans engines over several nodes, of two kinds, and with caches beyond the GPU: the options of each process.

    multi_node         one engine per node; with enable_expert_parallel one engine over all nodes (wide EP): each of
                       its processes serves requests and balances them over its own devices; with nodes_per_engine
                       an engine's nodes share its TP and PP ranks, and only the first one's process serves requests
    groups             over several nodes, where an engine may have several
    disaggregated      separate engines for prefill and decode, each over nodes as above; NIXL moves the KV caches

The launcher calls these as a `launch.plan.engines.Planner`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.ports import in_url
from stretto.config.flags import option_of
from stretto.config.rules.rule import below
from stretto.config.sections.engines import (
    PEERS_VAR,
    STORE_VARIABLE,
    Disaggregated,
    EngineGroups,
    MooncakeOffload,
    MultiNode,
    Side,
)
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.engines import backend_port, engines_of_groups, process_section
from stretto.launch.plan.routers import has_router, is_wide
from stretto.launch.plan.specs import EngineSpec, HelperSpec, Role
from stretto_vllm.plan.flags import VLLM_KEYS
from stretto_vllm.plan.rules import engine_nodes

NIXL = "NixlConnector"
STORE_ADDRESS_VAR = "MC_TCP_BIND_ADDRESS"
"""The address of a Mooncake process for others; without it, Mooncake picks one of the machine's addresses."""


def plan_nodes(section: InferenceSection, hosts: Sequence[str], *, is_cpu: bool) -> list[EngineSpec]:
    """Engines over several nodes, or of two kinds.

    Raises: ConfigError if degrees do not fit the nodes.
    """
    if problems := [*engine_nodes(section, below(section, "inference"))]:
        raise ConfigError("\n".join(problem.sentence for problem in problems))
    match section.deployment:
        case MultiNode() as shape:
            return _engines_of_nodes(section, shape, hosts)
        case EngineGroups() as shape:
            return engines_of_groups(section, shape, hosts, engine_over_nodes)
        case Disaggregated() as shape:
            return _disaggregated(section, shape, hosts, is_cpu=is_cpu)
    raise AssertionError(f"{section.deployment.type} is planned by the launcher")


def num_gpus_here(section: InferenceSection) -> int:
    """GPUs of an engine's process; its other ranks are on other machines if the user's options of vLLM say so."""
    options = {option_of(name): value for name, value in section.vllm_extra.items()}
    ranks, nodes = options.get("--data-parallel-size-local", section.parallel.dp), options.get("--nnodes", 1)
    counts = (ranks, nodes) if isinstance(ranks, int) and isinstance(nodes, int) else (section.parallel.dp, 1)
    return max(section.parallel.gpus_per_rank * counts[0] // max(counts[1], 1), 1)


def _engines_of_nodes(section: InferenceSection, shape: MultiNode, hosts: Sequence[str]) -> list[EngineSpec]:
    dp, port = section.parallel.dp, backend_port(section, is_routed=has_router(section))
    each = shape.num_nodes if is_wide(section) else shape.nodes_per_engine
    rpc_port = shape.data_parallel_rpc_port
    engines = []
    for first in range(0, shape.num_nodes, each):
        name = "inference" if each == shape.num_nodes else f"inference_{first // each}"
        nodes = range(first, first + each)
        engines += engine_over_nodes(section, name, "engine", nodes, port, hosts, dp, rpc_port)
    return engines


def engine_over_nodes(
    section: InferenceSection, name: str, role: Role, nodes: Sequence[int], port: int, hosts: Sequence[str],
    dp: int, rpc_port: int, **vllm: Any,
) -> list[EngineSpec]:  # fmt: skip
    """One engine over these nodes, one process on each.

    The nodes divide its data-parallel ranks, and each process serves requests on its own; or they divide the TP and PP
    ranks of an engine without data parallelism, and only the first process serves requests.
    """
    local = dp // len(nodes)
    num_gpus = section.parallel.gpus_per_rank * dp // len(nodes)
    specs = []
    for index, node in enumerate(nodes):
        wide: dict[str, Any] = {}
        if not local:
            wide = {
                "nnodes": len(nodes),
                "node_rank": index,
                "master_addr": hosts[nodes[0]],
                "master_port": rpc_port,
                "distributed_executor_backend": "mp",
            } | ({"headless": True} if index else {})
        elif len(nodes) > 1:
            wide = {
                "data_parallel_size_local": local,
                "data_parallel_start_rank": index * local,
                "data_parallel_address": hosts[nodes[0]],
                "data_parallel_rpc_port": rpc_port,
                "data_parallel_hybrid_lb": True,
            }
        own = process_section(section, port, dp=dp, **wide, **vllm)
        label = f"{name}_{index}" if len(nodes) > 1 else name
        others = " ".join(f"http://{in_url(hosts[other])}:{port}" for other in nodes if other != node)
        env = {PEERS_VAR: others} if others else {}
        specs.append(EngineSpec(label, role, node, own, env, num_gpus, len(nodes)))
    return specs


def _disaggregated(
    section: InferenceSection, shape: Disaggregated, hosts: Sequence[str], *, is_cpu: bool
) -> list[EngineSpec]:
    engines: list[EngineSpec] = []
    first_node = 0
    for role, side in shape.sides.items():
        port = shape.prefill_port if role == "prefill" else shape.decode_port
        overrides = shape.prefill_env_overrides if role == "prefill" else shape.decode_env_overrides
        options = shape.prefill_vllm_overrides if role == "prefill" else shape.decode_vllm_overrides
        own = _with_side_tp(_with_options(section, options), side)
        per_node = side.num_engines if shape.is_local else side.per_node
        for replica in range(side.num_engines):
            node = first_node + replica // per_node * side.nodes_each
            specs = engine_over_nodes(
                own,
                f"{role}_{replica}",
                role,
                [0] if shape.is_local else range(node, node + side.nodes_each),
                port + replica % per_node,
                hosts,
                own.parallel.dp if shape.is_local else _num_dp_ranks(own, shape, side),
                shape.data_parallel_rpc_port + replica % per_node,
                **_disaggregated_options(section, shape, role, is_cpu=is_cpu),
            )
            for spec in specs:
                channel = shape.side_channel_port + len(engines)
                env = spec.env | {
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": hosts[spec.node],
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel),
                    **overrides,
                }
                engines.append(replace(spec, env=env))
        first_node += math.ceil(side.num_engines / per_node) * side.nodes_each
    return engines


def _with_options(section: InferenceSection, options: Mapping[str, Any]) -> InferenceSection:
    """The section with options of vLLM: as our own keys where we have them, else in vllm_extra."""
    keys = {VLLM_KEYS.get(name.replace("-", "_"), ""): value for name, value in options.items()}
    own = {key: value for key, value in keys.items() if key}
    extra = {name: value for name, value in options.items() if name.replace("-", "_") not in VLLM_KEYS}
    return section.model_copy(update=own | {"vllm_extra": section.vllm_extra | extra})


def _with_side_tp(section: InferenceSection, side: Side) -> InferenceSection:
    """The section with the tensor parallel degree of one side."""
    tp = section.parallel.tp if side.tp is None else side.tp
    return section.model_copy(update={"parallel": section.parallel.model_copy(update={"tp": tp})})


def _num_dp_ranks(section: InferenceSection, shape: Disaggregated, side: Side) -> int:
    """Data-parallel ranks of one engine: as many as its nodes' GPUs allow, unless the user gave a number."""
    if section.parallel.dp > 1:
        return section.parallel.dp
    gpus = shape.gpus_per_node // side.per_node
    return max(1, gpus // section.parallel.gpus_per_rank * side.nodes_each)


def _disaggregated_options(
    section: InferenceSection, shape: Disaggregated, role: str, *, is_cpu: bool
) -> dict[str, Any]:
    connector: dict[str, Any] = {"kv_connector": NIXL, "kv_role": "kv_both"}
    if is_cpu:
        return {"kv_transfer_config": connector | {"kv_buffer_device": "cpu"}}
    options: dict[str, Any] = {"kv_transfer_config": connector}
    # With None, the engine uses expert parallelism for models that have experts (vllm/command.py).
    if section.enable_expert_parallel or (section.enable_expert_parallel is None and not shape.is_local):
        low = {"prefill": "deepep_high_throughput", "decode": "deepep_low_latency"}
        options["all2all_backend"] = low[role]
    return options


# -- caches beyond the GPU --


def with_offload(
    engines: Sequence[EngineSpec], section: InferenceSection, hosts: Sequence[str]
) -> tuple[list[EngineSpec], tuple[HelperSpec, ...]]:
    """The engines with a connector to where caches go, and the processes of the store, if there is one."""
    offload, found = section.kv_cache_offload, []
    for engine in engines:
        connector = _offload_connector(section)
        if (other := engine.section.vllm_extra.get("kv_transfer_config")) is not None:
            both = {"connectors": [other, connector]}
            connector = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both}
        extra = engine.section.vllm_extra | {"kv_transfer_config": connector}
        update = {"vllm_extra": extra, "enable_prefix_caching": True, "kv_cache_offload": None, "engine": "vllm"}
        env = engine.env
        if isinstance(offload, MooncakeOffload):
            env = env | _store_env(offload, hosts) | {STORE_ADDRESS_VAR: hosts[engine.node]}
        found.append(replace(engine, section=engine.section.model_copy(update=update), env=env))
    if not isinstance(offload, MooncakeOffload):
        return found, ()
    return found, _stores(offload, hosts[: section.deployment.num_nodes])


def _offload_connector(section: InferenceSection) -> dict[str, Any]:
    """vLLM's connector config for [inference.kv_cache_offload]."""
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
    """The addresses of the store for engines; stretto_vllm/launch.py writes them to the file that vLLM reads."""
    config = {
        "mode": "standalone-store",
        "metadata_server": f"http://{in_url(hosts[0])}:{offload.metadata_port}/metadata",
        "master_server_address": f"{in_url(hosts[0])}:{offload.master_port}",
        "global_segment_size": 0,
        "local_buffer_size": min(offload.cpu.num_bytes, 1 << 30),
        "protocol": offload.protocol,
        "device_name": offload.device_name,
        "enable_offload": offload.disk is not None,
    }
    return {STORE_VARIABLE: json.dumps(config)}


def _stores(offload: MooncakeOffload, hosts: Sequence[str]) -> tuple[HelperSpec, ...]:
    """The master with its metadata server on the first node, and a process with memory on every node."""
    has_disk = str(offload.disk is not None).lower()
    master = (
        sys.executable,
        "-m",
        "mooncake.cli",
        f"-rpc_address={hosts[0]}",
        f"-rpc_port={offload.master_port}",
        "-enable_http_metadata_server=true",
        f"-http_metadata_server_host={hosts[0]}",  # 0.3.13 ignores it and listens at all addresses
        f"-http_metadata_server_port={offload.metadata_port}",
        f"-metrics_host={hosts[0]}",
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
            f"-master_server_address={in_url(hosts[0])}:{offload.master_port}",
            f"-metadata_server=http://{in_url(hosts[0])}:{offload.metadata_port}/metadata",
            f"-protocol={offload.protocol}",
            *([f"-device_names={offload.device_name}"] if offload.device_name else ()),
            f"-enable_offload={has_disk}",
        )
        env = {STORE_ADDRESS_VAR: host}
        env |= {} if offload.disk is None else {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": offload.disk.path}
        parts.append(HelperSpec(f"kv_store_{node}", node, words, offload.client_port, env))
    return HelperSpec("kv_master", 0, master, offload.master_port), *parts
