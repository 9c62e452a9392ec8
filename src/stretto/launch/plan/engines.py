"""Plans the inference processes of a run: engines, routers and cache stores, and the node of each.

In: a checked [inference] section and the addresses of its nodes. Out: an `EnginesPlan`. One engine may be several
processes (one per node); each is a `stretto inference` with its own section. The shape depends on
[inference.deployment]:

    single_node        num_replicas engines on the first node
    groups             engines of different shapes, one after another on the GPUs of the nodes
    others             engines over several nodes, or of two kinds: their engine's `Planner` knows them

Rollouts go to the router. Admin calls go to every engine, since the router would pass a call to only one of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

from stretto.base.errors import ConfigError
from stretto.check.engines import engine_of
from stretto.config.sections.engines import Disaggregated, EngineGroups, RouterSection, SingleNode
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.routers import has_router, listen_address, plan_registrars, plan_router
from stretto.launch.plan.specs import EngineSpec, EnginesPlan, HelperSpec, Role

BACKEND_OFFSET = 100


BuildEngine = Callable[[InferenceSection, str, Role, Sequence[int], int, Sequence[str], int, int], Sequence[EngineSpec]]
"""The processes of one engine: of its section, name, role, nodes, port, the hosts of all nodes, data-parallel ranks,
and the port where its processes meet."""


class Planner(Protocol):
    """What plans deployments that only one engine has; its `Engine` has it."""

    def plan_nodes(self, section: InferenceSection, hosts: Sequence[str], *, is_cpu: bool) -> list[EngineSpec]:
        """Engines over several nodes, or of two kinds. Raises: ConfigError if degrees do not fit the nodes."""
        ...

    def with_offload(
        self, engines: Sequence[EngineSpec], section: InferenceSection, hosts: Sequence[str]
    ) -> tuple[list[EngineSpec], tuple[HelperSpec, ...]]:
        """Engines whose caches are offloaded as [inference.kv_cache_offload] says, and the processes that take them."""
        ...

    def num_gpus_here(self, section: InferenceSection) -> int:
        """GPUs of an engine's process, as the engine's own options divide it."""
        ...


def _planner(section: InferenceSection) -> Planner:
    found: Planner = engine_of(section, "[inference]", has_gpu=False).planner
    return found


def plan_engines(section: InferenceSection, hosts: Sequence[str], *, is_cpu: bool = False) -> EnginesPlan:
    """Plan the processes of one [inference] section on these nodes.

    Raises: ConfigError if there are fewer nodes than the shape needs, or if degrees do not divide.
    """
    shape = section.deployment
    is_routed = has_router(section)
    match shape:
        case SingleNode():
            engines = _replicas(section, is_routed=is_routed)
        case EngineGroups() if shape.num_nodes == 1:
            engines = engines_of_groups(section, shape, hosts, _one_process)
        case _:
            key = "" if isinstance(shape, Disaggregated) else ".num_nodes"
            _need_nodes(hosts, shape.num_nodes, f"inference.deployment{key}")
            engines = _planner(section).plan_nodes(section, hosts, is_cpu=is_cpu)
    stores: tuple[HelperSpec, ...] = ()
    engines = [_with_listen_address(engine, hosts) for engine in engines]
    if section.kv_cache_offload is not None:
        engines, stores = _planner(section).with_offload(engines, section, hosts)
    served = [engine for engine in engines if engine.is_served]
    admin = tuple(engine.url(hosts) for engine in served)
    router = section.router
    if not is_routed or router is None:
        return EnginesPlan(tuple(engines), (), stores, admin, admin)
    if router.address is not None:
        registrars = plan_registrars(router, served, hosts)
        return EnginesPlan(tuple(engines), (), stores, (router.address,), admin, registrars)
    spec, url = plan_router(router, served, hosts, section)
    return EnginesPlan(tuple(engines), (spec,), stores, (url,), admin)


def plan_replicas(
    section: InferenceSection, hosts: Sequence[str], num_replicas: int, *, is_cpu: bool = False
) -> EnginesPlan:
    """Plan [inference] num_replicas times, each replica with its own nodes and router.

    The orchestrator spreads rollouts over the routers.
    """
    if num_replicas == 1:
        return plan_engines(section, hosts, is_cpu=is_cpu)
    each = section.deployment.num_nodes
    _need_nodes(hosts, each * num_replicas, "deployment.num_infer_replicas")
    parts: list[EnginesPlan] = []
    for replica in range(num_replicas):
        first = replica * each
        is_at_loopback = section.router is not None and not section.router.requires_key
        own = _with_router_port(section, replica) if is_at_loopback else section
        plan = plan_engines(own, hosts[first : first + each], is_cpu=is_cpu)

        moved = {
            name: tuple(
                replace(spec, name=f"replica_{replica}_{spec.name}", node=first + spec.node)
                for spec in getattr(plan, name)
            )
            for name in ("engines", "routers", "stores", "registrars")
        }
        parts.append(replace(plan, **moved))
    whole = {
        field.name: tuple(itertools.chain.from_iterable(getattr(part, field.name) for part in parts))
        for field in fields(EnginesPlan)
    }
    # All replicas may be behind one router that runs elsewhere.
    return EnginesPlan(**whole | {"base_urls": tuple(dict.fromkeys(whole["base_urls"]))})


def _with_router_port(section: InferenceSection, replica: int) -> InferenceSection:
    """The section with a port of its own for this replica's router: routers without a key are all on one node."""
    shape = section.deployment
    port = (shape.router_port or section.server.port) + replica
    return section.model_copy(update={"deployment": shape.model_copy(update={"router_port": port})})


def _need_nodes(hosts: Sequence[str], needed: int, key: str) -> None:
    if len(hosts) < needed:
        have = f"{len(hosts)} node{'s' * (len(hosts) != 1)}"
        raise ConfigError(f"{key}: this deployment needs {needed} nodes and there are {have}")


def backend_port(section: InferenceSection, *, is_routed: bool = True) -> int:
    shape = section.deployment
    if isinstance(shape, Disaggregated):
        raise AssertionError("prefill and decode engines have their own ports")
    if shape.backend_port is not None:
        return shape.backend_port
    return section.server.port + BACKEND_OFFSET if is_routed else section.server.port


def process_section(section: InferenceSection, port: int, *, dp: int | None = None, **vllm: Any) -> InferenceSection:
    """The section of one engine process."""
    extra = {**vllm, **section.vllm_extra}
    parallel = section.parallel if dp is None else section.parallel.model_copy(update={"dp": dp})
    server = section.server.model_copy(update={"port": port})
    own = {"server": server, "parallel": parallel, "vllm_extra": extra, "deployment": SingleNode()}
    own["router"] = RouterSection()  # the default, since an engine has nothing to do with the router
    if section.engine == "auto" and section.vllm_only():
        own["engine"] = "vllm"
    return section.model_copy(update=own)


def _with_listen_address(engine: EngineSpec, hosts: Sequence[str]) -> EngineSpec:
    """The engine, listening where other nodes reach it unless the user gave an address."""
    server = engine.section.server
    host = listen_address(server.host, hosts[engine.node])
    if host == server.host:
        return engine  # inference/server.py chooses the address of an engine that is alone
    own = engine.section.model_copy(update={"server": server.model_copy(update={"host": host})})
    return replace(engine, section=own)


# -- shapes --


def _replicas(section: InferenceSection, *, is_routed: bool) -> list[EngineSpec]:
    assert isinstance(section.deployment, SingleNode)
    count = section.deployment.num_replicas
    gpus = _planner(section).num_gpus_here(section) if section.vllm_extra else section.parallel.num_gpus
    if count == 1 and not is_routed:
        return [EngineSpec("inference", "engine", 0, section, num_gpus=gpus)]
    first = backend_port(section, is_routed=is_routed)
    names = ["inference"] if count == 1 else [f"inference_{replica}" for replica in range(count)]
    return [
        EngineSpec(name, "engine", 0, process_section(section, first + replica), num_gpus=gpus)
        for replica, name in enumerate(names)
    ]


def engines_of_groups(
    section: InferenceSection, shape: EngineGroups, hosts: Sequence[str], build: BuildEngine
) -> list[EngineSpec]:
    """Engines in the order of their groups; engines on the same node have consecutive ports."""
    port = backend_port(section, is_routed=has_router(section))
    if section.engine == "auto" and section.vllm_only():  # all groups use the same engine
        section = section.model_copy(update={"engine": "vllm"})
    num_gpus = shape.gpus_per_node if shape.num_nodes > 1 else section.placed()[-1].first_gpu
    on_node: Counter[int] = Counter()
    engines = []
    for number, place in enumerate(section.placed()[:-1]):
        node, first = divmod(place.first_gpu, num_gpus)
        own = section.of_group(shape.groups[place.group])
        specs = build(
            own,
            "inference" if shape.num_engines == 1 else f"inference_{number}",
            "engine",
            range(node, node + math.ceil(place.num_gpus / num_gpus)),
            port + on_node[node],
            hosts,
            own.parallel.dp,
            shape.data_parallel_rpc_port,
        )
        engines += [replace(spec, first_gpu=first) for spec in specs]
        on_node[node] += 1
    return engines


def _one_process(
    section: InferenceSection, name: str, role: Role, nodes: Sequence[int], port: int, hosts: Sequence[str],
    dp: int, rpc_port: int,
) -> list[EngineSpec]:  # fmt: skip
    """An engine on one node."""
    return [EngineSpec(name, role, nodes[0], process_section(section, port, dp=dp), num_gpus=section.parallel.num_gpus)]
