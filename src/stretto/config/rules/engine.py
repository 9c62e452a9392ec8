"""Rules of [inference]: features of engines, sizes, options of vLLM and of the router."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from stretto.base.errors import ConfigError
from stretto.config.flags.router import arguments as router_arguments
from stretto.config.flags.table import option_of
from stretto.config.flags.vllm import VLLM
from stretto.config.root import InferenceConfig
from stretto.config.rules.batches import is_address
from stretto.config.rules.rule import At, Each, Idle, Problem, Rule, Rules, problem, value_of
from stretto.config.section import show
from stretto.config.sections.engines import (
    POLICIES,
    Disaggregated,
    EngineGroup,
    EngineGroups,
    MultiNode,
    RouterSection,
    cache_aware_options,
)
from stretto.config.sections.inference import GROUP_KEYS, InferenceSection, ParallelSection, misfit
from stretto_prime.inference import VLLM_KEYS

PLANNED = (
    "data_parallel_size_local", "data_parallel_start_rank", "data_parallel_rank", "data_parallel_address",
    "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb", "headless", "nnodes", "node_rank", "master_addr", "master_port",
)  # fmt: skip
"""Options of vLLM that say which part of an engine a process is; the plan sets them for several engines."""


def product(parallel: ParallelSection) -> str:
    """`tp 2 x dp 4`: the degrees that are not 1."""
    degrees = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "dp")}
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "tp 1"


def shape_of(section: InferenceSection) -> str:
    """`tp 2 x 4 engines`: the engines and their degrees."""
    engines = section.deployment.num_engines
    if section.deployment.type == "groups":
        shapes = ((g.num_engines, section.of_group(g).parallel) for g in section.deployment.groups)
        return " + ".join(f"{number} engines of {product(parallel)}" for number, parallel in shapes if number)
    sides = section.deployment.sides if section.deployment.type == "disaggregated" else {}
    if len({side.tp for side in sides.values()}) > 1:
        rest = product(section.parallel.model_copy(update={"tp": 1})).removeprefix("tp 1")
        tp = section.parallel.tp
        counts = (f"{side.num_engines} {kind} x tp {side.tp or tp}" for kind, side in sides.items())
        return f"({' + '.join(counts)})" + (f" x {rest}" if rest else "")
    return product(section.parallel) + (f" x {engines} engines" if engines > 1 else "")


def vllm_only_faults(section: InferenceSection) -> Iterator[tuple[str, str, str]]:
    """Keys that only vLLM has."""
    for key, value in section.vllm_only().items() if section.engine == "embedded" else ():
        rule = "the embedded engine does not support this; leave it out, or use vLLM"
        yield f"{key} engine", f"{{0.path}} = {{it}}: {rule}", show(value)


Refusal = Callable[[str], str | None]
"""From the name of an option of vLLM's to why it cannot be set; None if it can."""


def option_faults(
    section: InferenceSection, at: At, path: str, options: Mapping[str, Any], keys: Mapping[str, str], refuse: Refusal
) -> Iterator[Problem]:
    """Options of vLLM that are unknown, reserved, keys of ours, or set by the deployment.

    path: of the table of options; keys: our keys by the option's name.
    """
    for option, value in options.items():
        own, name = f"{path}.{option}", option_of(option).removeprefix("--").replace("-", "_")
        if option_of(option) in VLLM.reserved:
            yield from _refused(VLLM.refuse_reserved, option, at(own))
        elif name in keys:
            message = "{0.path}: the key is {1.path}; give it there"
            yield problem(section, at, f"{own} | {keys[name]}", message)
        elif reason := refuse(name):
            yield problem(section, at, f"{own} deployment.type", f"{{0}} {reason}; leave it out")
        else:
            yield from _refused(VLLM.arguments, option, value, at(own))


def check_vllm_options(section: InferenceSection, at: At) -> Iterator[Problem]:
    """Options for all engines."""
    shape = section.deployment

    def refuse(name: str) -> str | None:
        if name in PLANNED and max(shape.num_processes, shape.num_nodes) > 1:
            return "follows from inference.deployment where there are several engines or nodes"
        is_kv = name == "kv_transfer_config" and shape.type == "disaggregated"
        return "is set by stretto: caches of a disaggregated deployment travel by NIXL" if is_kv else None

    yield from option_faults(section, at, "vllm_extra", section.vllm_extra, VLLM_KEYS, refuse)


def check_side_options(section: InferenceSection, at: At) -> Iterator[Problem]:
    """Options of one side of a disaggregated deployment, in which the sides may differ."""
    is_same = lambda name: "." in VLLM_KEYS.get(name, "") or name in (*PLANNED, "kv_transfer_config")
    rule = "is the same on both sides, or follows from the deployment"
    refuse = lambda name: rule if is_same(name) else None
    for side in ("prefill", "decode") if section.deployment.type == "disaggregated" else ():
        path, keys = f"deployment.{side}_vllm_overrides", {"tensor_parallel_size": f"deployment.{side}_tp"}
        yield from option_faults(section, at, path, value_of(section, path), keys, refuse)


def check_groups(section: InferenceSection, at: At) -> Iterator[Problem]:
    """Groups of engines: there is an engine, and overrides may differ between groups."""
    shape = section.deployment
    if not isinstance(shape, EngineGroups):
        return
    if not shape.num_engines:
        message = "{0.path}: no group has engines; raise one's num_engines"
        yield problem(section, at, "deployment.groups", message)
    for index, group in enumerate(shape.groups):
        yield from _option_faults(section, group, f"deployment.groups.{index}", at)


def check_sizes(section: InferenceSection, at: At) -> Iterator[Problem]:
    """The rules SIZES for each shape of engine."""
    shape = section.deployment
    found: list[Problem] = []
    groups = shape.groups if isinstance(shape, EngineGroups) else ()
    for rule in SIZES:
        found += [] if groups else rule(section, at)
        for index, group in enumerate(groups):
            own = lambda key, group=group, index=index: at(group.path(f"deployment.groups.{index}", key))
            found += rule(section.of_group(group), own)
    yield from dict.fromkeys(found)


def _option_faults(section: InferenceSection, group: EngineGroup, path: str, at: At) -> Iterator[Problem]:
    named = {key: key.replace("-", "_") for key in group.overrides}
    options = {key: value for key, value in group.overrides.items() if named[key] not in GROUP_KEYS}
    for key in group.overrides.keys() - options.keys():
        if rule := misfit(named[key], group.overrides[key]):
            yield problem(section, at, f"{path}.overrides.{key}", f"{{0}}: {rule}")
    is_same = lambda name: name in (*VLLM_KEYS, *InferenceSection.model_fields, *PLANNED)
    rule = "is the same for all engines, or follows from the deployment"
    refuse = lambda name: rule if is_same(name) else None
    keys = {"tensor_parallel_size": f"{path}.tp"}
    yield from option_faults(section, at, f"{path}.overrides", options, keys, refuse)


def _place_faults(section: InferenceSection, shape: EngineGroups) -> Iterator[tuple[str, str]]:
    """Engines of groups fill their nodes: none crosses a node's end, and no GPU is left over."""
    node, groups = shape.gpus_per_node, "deployment.groups"
    *engines, end = section.placed()
    if shape.num_nodes == 1:
        return
    for number, place in enumerate(engines):
        own, first = f"{groups}.{place.group}.num_engines {groups}", place.first_gpu % node
        which = f"engine {number} takes {place.num_gpus} GPUs from GPU {first} of a node of {node} on"
        if place.num_gpus <= node < first + place.num_gpus:
            yield own, f"{{1.path}}: {which}, over its end; let groups fill nodes, large engines first"
        elif place.num_gpus > node and (first or place.num_gpus % node):
            rule = f"larger than a node, it has whole nodes; give it a multiple of {node}"
            yield own, f"{{1.path}}: {which}: {rule}"
        elif place.num_gpus > node and section.parallel.dp > 1:
            rule = "nodes share the ranks of TP and PP of an engine without data parallelism; leave it out"
            yield f"parallel.dp {groups}", f"{{0}}: {rule}"
    if left := -end.first_gpu % node:
        rule = f"engines take {end.first_gpu} GPUs, and {left} of the last node of {node} are left over"
        way = f"change num_engines, or say so: idle_gpus = {left} in the last group"
        yield f"{groups} deployment.gpus_per_node", f"{{0.path}}: {rule}; {way}"
    elif (nodes := end.first_gpu // node) != shape.num_nodes:
        rule = f"engines take {end.first_gpu} GPUs, {nodes} nodes of {node}"
        yield f"deployment.num_nodes {groups}", f"{{0}}: {rule}; give {nodes}"


PLANNED_FOR_DYNAMO = (
    "http-host", "http-port", "router-mode", "router-session-affinity-ttl-secs", "router-kv-events",
    "discovery-backend", "request-plane", "event-plane", "model-name", "model-path", "namespace", "interactive",
    "kserve-grpc-server",
)  # fmt: skip
"""Options of Dynamo's frontend that follow from the plan or from `policy`."""


def check_router_options(router: RouterSection, at: At) -> Iterator[Problem]:
    """Options of the router exist, and do something with its policy."""
    if router.type == "dynamo":  # it refuses unknown ones at its start, with its own message
        for key in router.extra:
            if option_of(key).removeprefix("--").removeprefix("no-") in PLANNED_FOR_DYNAMO:
                rule = "follows from inference.router.policy and from the engines; leave it out"
                yield problem(router, at, f"extra.{key}", f"{{0.path}} {rule}")
        return
    for key, value in router.extra.items():
        yield from _refused(router_arguments, key, value, at(f"extra.{key}"))
    idle = cache_aware_options(router.extra)
    if idle and router.policy != "cache_aware":
        way = 'use "cache_aware", or leave it out'
        yield problem(router, at, f"extra.{idle[0]} policy", f"{{0.path}} does nothing with {{1}}; {way}")


def other_policies(router: RouterSection) -> str | None:
    """The policies of this type of router, if the given one is not among them."""
    of_type = POLICIES.get(router.type, (router.policy,))
    return None if router.policy in of_type else ", ".join(of_type)


def ignored_by(router: RouterSection) -> str | None:
    """Why options that are given here do not reach the router."""
    if router.type == "llm-d":
        return "llm-d's picker is configured by the chart"
    return "the router that runs there has its own" if router.address is not None else None


def _refused(check: Callable[..., object], *given: Any) -> Iterator[Problem]:
    """A check's error as a problem at the path that is its last argument."""
    try:
        check(*given)
    except ConfigError as error:
        yield Problem((given[-1],), str(error))


def node_faults(section: InferenceSection) -> Iterator[tuple[str, str]]:
    """The part of an engine on one node fits into the node's GPUs."""
    shape = section.deployment
    if shape.type == "disaggregated" and not shape.is_local:
        for kind in shape.sides:
            yield from _side_faults(section, shape, kind)
    elif shape.type == "groups":
        yield from _place_faults(section, shape)
    elif shape.type == "multi_node" and shape.nodes_per_engine > 1:
        yield from _shared_rank_faults(section, shape)
    elif shape.type == "multi_node":
        yield from _engine_faults(section, shape)


def _engine_faults(section: InferenceSection, shape: MultiNode) -> Iterator[tuple[str, str]]:
    """One engine per node, or one over all nodes, which divide its data-parallel ranks."""
    parallel = section.parallel
    nodes = shape.num_nodes if section.enable_expert_parallel else 1
    if parallel.dp % nodes:
        yield "parallel.dp deployment.num_nodes", "{0} is divided among {1} nodes; give a multiple"
    elif (needed := parallel.num_gpus // nodes) > shape.gpus_per_node:
        ways = ", or spread one engine over the nodes with {2.path} = true" * (not section.enable_expert_parallel)
        if parallel.gpus_per_rank > shape.gpus_per_node:
            ways = ", or let nodes share the ranks of an engine with {3.path}"
        what = product(parallel) + (f" over {nodes} nodes" if nodes > 1 else "")
        rule = f"{what} need {needed} GPUs and a node has {{1}}; lower one of the degrees{ways}"
        others = "enable_expert_parallel deployment.nodes_per_engine"
        yield f"parallel deployment.gpus_per_node | {others}", f"{{0.path}}: {rule}"


def _shared_rank_faults(section: InferenceSection, shape: MultiNode) -> Iterator[tuple[str, str]]:
    """Engines whose nodes share the ranks of TP and PP."""
    parallel, nodes = section.parallel, shape.nodes_per_engine
    if shape.num_nodes % nodes:
        paths = "deployment.num_nodes deployment.nodes_per_engine"
        yield paths, "{0} is no multiple of {1}; change one of them"
    if parallel.dp > 1:
        rule = "{0} with {1}: nodes share the ranks of TP and PP of an engine without data parallelism"
        way = "leave one of them out, or let nodes divide the data-parallel ranks: {2.path} = true without {1.path}"
        yield "parallel.dp deployment.nodes_per_engine | enable_expert_parallel", f"{rule}; {way}"
    elif parallel.gpus_per_rank % nodes:
        rule = f"{product(parallel)} = {parallel.gpus_per_rank} GPUs are not divided among {{1}} nodes"
        yield "parallel deployment.nodes_per_engine", f"{{0.path}}: {rule}; give a multiple"
    elif (needed := parallel.gpus_per_rank // nodes) > shape.gpus_per_node:
        rule = f"{product(parallel)} over {nodes} nodes need {needed} GPUs and a node has {{1}}"
        way = "lower one of the degrees, or raise {2.path}"
        yield "parallel deployment.gpus_per_node deployment.nodes_per_engine", f"{{0.path}}: {rule}; {way}"


def _side_faults(
    section: InferenceSection, shape: Disaggregated, kind: Literal["prefill", "decode"]
) -> Iterator[tuple[str, str]]:
    """The engines that read prompts, or those that write replies."""
    parallel, side, has = section.parallel, shape.sides[kind], shape.gpus_per_node
    dp, rank = parallel.dp, (side.tp or parallel.tp) * parallel.pp
    tp = "parallel.tp" if side.tp is None else f"deployment.{kind}_tp"
    nodes, per_node = f"deployment.num_{kind}_nodes", f"deployment.num_{kind}_per_node"
    factor = "" if parallel.pp == 1 else f" x pp {parallel.pp}"
    if side.per_node > 1 and side.nodes_each > 1:
        rule = "an engine over several nodes shares none; leave one of them out"
        yield f"{per_node} {nodes}", f"{{0}} with {{1}}: {rule}"
    elif side.num_engines % side.per_node:
        rule = f"{side.num_engines} engines leave a part of a node idle"
        yield f"deployment.num_{kind}_replicas {per_node}", f"{{0}} with {{1}}: {rule}; give a multiple"
    elif rank > has:
        if dp > 1 or rank != has * side.nodes_each:
            rule = f"{{0}}{factor} is more than a node's {has} GPUs: such an engine has whole nodes and no {{2.path}}"
            way = f"give {{1.path}} = {rank // has}" if rank % has == 0 else f"give a multiple of {has}"
            yield f"{tp} {nodes} parallel.dp", f"{rule}; {way}"
    elif has % (rank * side.per_node):
        times = f" x {side.per_node} engines" if side.per_node > 1 else ""
        rule = f"{{0}}{factor}{times} does not divide the GPUs of a node, {{1}}"
        yield f"{tp} deployment.gpus_per_node", rule
    elif dp > 1 and dp % side.nodes_each:
        yield f"parallel.dp {nodes}", "{0} is divided among {1} nodes; give a multiple"
    elif dp > 1 and (needed := rank * dp // side.nodes_each * side.per_node) > has:
        what = f"tp {side.tp or parallel.tp}{factor} x dp {dp}"
        what += f" over {side.nodes_each} nodes" if side.nodes_each > 1 else ""
        what += f" x {side.per_node} engines" if side.per_node > 1 else ""
        rule = f"{what} need {needed} GPUs and a node has {{1}}; lower one of the degrees"
        yield "parallel deployment.gpus_per_node", f"{{0.path}}: {rule}"


check_node_gpus = Each(node_faults)

# fmt: off
STAND_IN = Rule("type", lambda s: s.type == "llm-d" and s.address is None,
     "{0}: its picker is started in Kubernetes alone (the Helm chart with llmd.enabled=true), so vllm-router is used "
     "instead; with a gateway that runs and sees these engines, give inference.router.address")

SIZES: tuple[Rule, ...] = (
    Rule("kv_cache_tokens block_size",
         lambda s: (s.kv_cache_tokens or math.inf) < (s.block_size or 16) and (s.block_size or 16),
         "{0} is less than one block of {1.path} = {it}; raise it"),
    Rule("kv_cache_tokens max_model_len",
         lambda s: None not in (s.kv_cache_tokens, s.max_model_len) and s.kv_cache_tokens < s.max_model_len,
         "{0} cannot hold one sequence of {1}; raise it or lower {1.path}"),
    Rule("max_num_batched_tokens max_num_seqs", lambda s: s.max_num_batched_tokens < s.max_num_seqs,
         "{0} cannot hold one token of each of {1} sequences; raise it"),
    Rule("enable_eplb enable_expert_parallel",
         lambda s: s.enable_eplb and s.enable_expert_parallel is not True and s.deployment.type != "disaggregated",
         "{0} moves experts between devices; set {1.path} = true"),
)
"""Rules for each shape of engine alone."""

RULES: Rules = {
    InferenceConfig: (
        Rule("model", lambda s: s.model is None,
             "{0.path}: no model to serve; give its directory, `--model <directory>`"),
    ),
    InferenceSection: (
        Each(vllm_only_faults),
        Rule("router deployment.type", lambda s: s.deployment.type == "disaggregated" and s.router is None,
             "{1} has several engines, and only a router can tell which one reads and which one writes; keep the "
             "router"),
        Rule("router deployment.type", lambda s: s.deployment.type == "multi_node" and s.router is None,
             "{1} has several engines, and clients need one address; keep the router"),
        Rule("enable_return_routed_experts kv_cache_offload",
             lambda s: s.enable_return_routed_experts and s.kv_cache_offload is not None,
             "{0} with {1.path}: a cache that comes back from memory or disk comes without its experts; drop one "
             "of the two"),
        Rule("enable_return_routed_experts deployment.type",
             lambda s: s.enable_return_routed_experts and s.deployment.type == "disaggregated",
             "{0} with {1}: the engine that writes a reply never saw the experts of its prompt; drop one of the "
             "two"),
        Rule("deployment.prefill_port deployment.decode_port",
             lambda s: getattr(s.deployment, "is_local", 0) and s.deployment.prefill_port == s.deployment.decode_port,
             "{0.path} = {1}: give each its own"),
        check_node_gpus,
        check_vllm_options,
        check_side_options,
        check_groups,
        check_sizes,
        Idle("deployment.router_port", "router", lambda s: s.router is None and "there is no router"),
        Idle("deployment.router_port", "router.address",
             lambda s: s.router is not None and s.router.address is not None and "no router is started"),
        Rule("router.type deployment.type",
             lambda s: s.router is not None and s.router.type == "dynamo" and s.deployment.type == "disaggregated",
             '{0} with {1}: Dynamo divides prefill and decode among workers of its own only; use "vllm"'),
        Rule("router.type lora", lambda s: s.router is not None and s.router.type == "dynamo" and s.lora is not None,
             '{0} with {1.path}: Dynamo knows the model, and none of its adapters; use "vllm"'),
    ),
    RouterSection: (
        check_router_options,
        Rule("address", lambda s: s.address is not None and not is_address(s.address),
             "{0} is not an address; write it like http://host:3000"),
        Rule("policy type", other_policies, "{0} is no policy of {1}; it has {it}"),
        Rule("type address", lambda s: s.type == "dynamo" and s.address is not None,
             "{0} with {1}: a frontend that runs elsewhere has workers of its own and cannot take these engines; leave "
             "the address out: one is started"),
        Idle("policy extra.*", "type", ignored_by),
        Idle("interpreter", "type", lambda s: s.type != "dynamo" and "only Dynamo has a Python of its own"),
    ),
}
# fmt: on
