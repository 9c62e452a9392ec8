"""Rules of vLLM: its options, what it does not do together, and the deployments that only it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from stretto.base.errors import ConfigError
from stretto.config.flags import option_of
from stretto.config.root import RLConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, below, idle, refused_by, value_of
from stretto.config.sections.engines import Disaggregated, EngineGroup, EngineGroups, MultiNode
from stretto.config.sections.inference import GROUP_KEYS, SPECULATIVE, InferenceSection
from stretto_vllm.plan.flags import VLLM, VLLM_KEYS

PLANNED = (
    "data_parallel_size_local", "data_parallel_start_rank", "data_parallel_rank", "data_parallel_address",
    "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb", "headless", "nnodes", "node_rank", "master_addr", "master_port",
)  # fmt: skip
"""Options of vLLM that say which part of an engine a process is; the plan sets them for several engines."""
Refusal = Callable[[str], str | None]
"""From the name of an option of vLLM's to why it cannot be set; None if it can."""


def features(s: InferenceSection, at: At) -> Problems:
    """Features of engines that do not go with a deployment, a cache or a router."""
    router, kind = at("router"), at("deployment.type")
    if s.deployment.type == "disaggregated" and s.router is None:
        what = "has several engines, and only a router can tell which one reads and which one writes; keep the router"
        yield Problem((router, kind), f"{kind} {what}")
    if s.deployment.type == "multi_node" and s.router is None:
        what = "has several engines, and clients need one address; keep the router"
        yield Problem((router, kind), f"{kind} {what}")
    experts, cache = at("enable_return_routed_experts"), at("kv_cache_offload")
    if s.enable_return_routed_experts and s.kv_cache_offload is not None:
        what = "a cache that comes back from memory or disk comes without its experts; drop one of the two"
        yield Problem((experts, cache), f"{experts} with {cache.path}: {what}")
    if s.enable_return_routed_experts and s.deployment.type == "disaggregated":
        what = "the engine that writes a reply never saw the experts of its prompt; drop one of the two"
        yield Problem((experts, kind), f"{experts} with {kind}: {what}")
    reads, writes = at("deployment.prefill_port"), at("deployment.decode_port")
    if getattr(s.deployment, "is_local", False) and reads.held == writes.held:
        yield Problem((reads, writes), f"{reads.path} = {writes}: give each its own")


# -- options of vLLM --


def refused_options(
    at: At, path: str, options: Mapping[str, Any], keys: Mapping[str, str], refuse: Refusal
) -> Problems:
    """Options of vLLM that are unknown, reserved, keys of ours, or set by the deployment.

    path: of the table of options; keys: our keys by the option's name.
    """
    for option, value in options.items():
        own, name = at(f"{path}.{option}"), option_of(option).removeprefix("--").replace("-", "_")
        if option_of(option) in VLLM.reserved:
            yield from refused_by(VLLM.refuse_reserved, own, option)
        elif name in keys:
            yield Problem(own, f"{own.path}: the key is {at(keys[name]).path}; give it there")
        elif reason := refuse(name):
            yield Problem((own, at("deployment.type")), f"{own} {reason}; leave it out")
        else:
            yield from refused_by(VLLM.arguments, own, option, value)


def vllm_options(s: InferenceSection, at: At) -> Problems:
    """Options for all engines."""
    shape = s.deployment

    def refuse(name: str) -> str | None:
        if name in PLANNED and max(shape.num_processes, shape.num_nodes) > 1:
            return "follows from inference.deployment where there are several engines or nodes"
        if name == "kv_transfer_config" and shape.type == "disaggregated":
            return "is set by stretto: caches of a disaggregated deployment travel by NIXL"
        return second_draft(name, at)

    yield from refused_options(at, "vllm_extra", s.vllm_extra, VLLM_KEYS, refuse)


def second_draft(name: str, at: At) -> str | None:
    """Why an option of vLLM's that says how to draft cannot be set; None if it can, and for other options."""
    is_second = name in SPECULATIVE and at.section.speculation is not None
    return f"says how to draft, and so does {at('speculation').path}" if is_second else None


def side_options(s: InferenceSection, at: At) -> Problems:
    """Options of one side of a disaggregated deployment, in which the sides may differ."""
    is_same = lambda name: "." in VLLM_KEYS.get(name, "") or name in (*PLANNED, "kv_transfer_config")
    rule = "is the same on both sides, or follows from the deployment"
    refuse = lambda name: rule if is_same(name) else second_draft(name, at)
    for side in ("prefill", "decode") if s.deployment.type == "disaggregated" else ():
        path, keys = f"deployment.{side}_vllm_overrides", {"tensor_parallel_size": f"deployment.{side}_tp"}
        yield from refused_options(at, path, value_of(s, path), keys, refuse)


def group_options(s: InferenceSection, at: At) -> Problems:
    """Options of groups of engines, in which groups may differ."""
    for index, group in enumerate(s.deployment.groups if isinstance(s.deployment, EngineGroups) else ()):
        yield from _overrides(group, f"deployment.groups.{index}", at)


def _overrides(group: EngineGroup, path: str, at: At) -> Problems:
    options = {key: value for key, value in group.overrides.items() if key.replace("-", "_") not in GROUP_KEYS}
    is_same = lambda name: name in (*VLLM_KEYS, *InferenceSection.model_fields, *PLANNED)
    rule = "is the same for all engines, or follows from the deployment"
    refuse = lambda name: rule if is_same(name) else second_draft(name, at)
    yield from refused_options(at, f"{path}.overrides", options, {"tensor_parallel_size": f"{path}.tp"}, refuse)


# -- drafts --


_LOOKUP = ("speculation.prompt_lookup_min", "speculation.prompt_lookup_max")
_OF_SUFFIX = (
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)  # fmt: skip


def draft_keys(s: InferenceSection, at: At) -> Problems:
    """Keys of [inference.speculation] that its method has."""
    section, path = s.speculation, "speculation"
    if section is None:
        return
    method = at(f"{path}.method")
    if section.method not in ("ngram", "suffix"):
        yield from idle(at, _LOOKUP, f"{path}.method", why="it does not copy")
    if section.method != "suffix":
        yield from idle(at, [f"{path}.{key}" for key in _OF_SUFFIX], f"{path}.method", why="it has no tree of replies")
    if section.method in ("eagle", "eagle3") and section.model is None:
        model = at(f"{path}.model")
        yield Problem((method, model), f"{method} drafts with a model of its own; give {model.path}")
    elif section.method not in ("eagle", "eagle3"):
        names = [f"{path}.model", f"{path}.draft_tensor_parallel_size"]
        yield from idle(at, names, f"{path}.method", why="it has no draft model")
    size, tp = at(f"{path}.draft_tensor_parallel_size"), at("parallel.tp")
    if section.draft_tensor_parallel_size not in (None, 1, s.parallel.tp):
        yield Problem((size, tp), f"{size} must be 1 or {tp}")
    if section.method == "suffix" and s.chosen_engine(has_gpu=False) == "vllm":
        yield from idle(at, _LOOKUP, f"{path}.method", why="vLLM's suffix tree has keys of its own, suffix_decoding_*")


def drafts_of_vllm(s: InferenceSection, at: At) -> Problems:
    """What vLLM does not return while it drafts, wherever it is known to be the engine."""
    if s.chosen_engine(has_gpu=False) == "vllm":
        yield from undrafted(s, at)


def undrafted(s: InferenceSection, at: At) -> Problems:
    """What vLLM does not return while it drafts."""
    for name in ("enable_return_routed_experts", "enable_return_sampling_mask"):
        if s.drafting_key is not None and getattr(s, name):
            key, drafting = at(name), at(s.drafting_key)
            what = "what vLLM returns for a token that was drafted has not been checked; leave one of them out"
            yield Problem((key, drafting), f"{key} with {drafting.path}: {what}")


# -- nodes --


def engine_nodes(s: InferenceSection, at: At) -> Problems:
    """The part of an engine on one node fits into the node's GPUs."""
    shape = s.deployment
    if shape.type == "disaggregated" and not shape.is_local:
        for kind in shape.sides:
            yield from _side(s, shape, kind, at)
    elif shape.type == "groups":
        yield from _placed_groups(s, shape, at)
    elif shape.type == "multi_node" and shape.nodes_per_engine > 1:
        yield from _shared_ranks(s, shape, at)
    elif shape.type == "multi_node":
        yield from _engine_of_nodes(s, shape, at)


def _placed_groups(s: InferenceSection, shape: EngineGroups, at: At) -> Problems:
    """Engines of groups fill their nodes: none crosses a node's end, and no GPU is left over."""
    node, groups = shape.gpus_per_node, at("deployment.groups")
    *engines, end = s.placed()
    if shape.num_nodes == 1:
        return
    for number, place in enumerate(engines):
        count, first = at(f"deployment.groups.{place.group}.num_engines"), place.first_gpu % node
        which = f"engine {number} takes {place.num_gpus} GPUs from GPU {first} of a node of {node} on"
        if place.num_gpus <= node < first + place.num_gpus:
            rule = f"{which}, over its end; let groups fill nodes, large engines first"
            yield Problem((count, groups), f"{groups.path}: {rule}")
        elif place.num_gpus > node and (first or place.num_gpus % node):
            rule = f"{which}: larger than a node, it has whole nodes; give it a multiple of {node}"
            yield Problem((count, groups), f"{groups.path}: {rule}")
        elif place.num_gpus > node and s.parallel.dp > 1:
            dp, rule = at("parallel.dp"), "nodes share the ranks of TP and PP of an engine without data parallelism"
            yield Problem((dp, groups), f"{dp}: {rule}; leave it out")
    nodes = at("deployment.num_nodes")
    if left := -end.first_gpu % node:
        rule = f"engines take {end.first_gpu} GPUs, and {left} of the last node of {node} are left over"
        way = f"change num_engines, or say so: idle_gpus = {left} in the last group"
        yield Problem((groups, at("deployment.gpus_per_node")), f"{groups.path}: {rule}; {way}")
    elif (taken := end.first_gpu // node) != shape.num_nodes:
        rule = f"engines take {end.first_gpu} GPUs, {taken} nodes of {node}"
        yield Problem((nodes, groups), f"{nodes}: {rule}; give {taken}")


def _engine_of_nodes(s: InferenceSection, shape: MultiNode, at: At) -> Problems:
    """One engine per node, or one over all nodes, which divide its data-parallel ranks."""
    parallel, dp, has = s.parallel, at("parallel.dp"), at("deployment.gpus_per_node")
    nodes = shape.num_nodes if s.enable_expert_parallel else 1
    if parallel.dp % nodes:
        all_nodes = at("deployment.num_nodes")
        yield Problem((dp, all_nodes), f"{dp} is divided among {all_nodes} nodes; give a multiple")
    elif (needed := parallel.num_gpus // nodes) > shape.gpus_per_node:
        way = "lower one of the degrees"
        if parallel.gpus_per_rank > shape.gpus_per_node:
            way += f", or let nodes share the ranks of an engine with {at('deployment.nodes_per_engine').path}"
        elif not s.enable_expert_parallel:
            way += f", or spread one engine over the nodes with {at('enable_expert_parallel').path} = true"
        what = parallel.in_words + (f" over {nodes} nodes" if nodes > 1 else "")
        degrees = at("parallel")
        yield Problem((degrees, has), f"{degrees.path}: {what} need {needed} GPUs and a node has {has}; {way}")


def _shared_ranks(s: InferenceSection, shape: MultiNode, at: At) -> Problems:
    """Engines whose nodes share the ranks of TP and PP."""
    parallel, nodes = s.parallel, shape.nodes_per_engine
    all_nodes, each = at("deployment.num_nodes"), at("deployment.nodes_per_engine")
    degrees, dp, has = at("parallel"), at("parallel.dp"), at("deployment.gpus_per_node")
    if shape.num_nodes % nodes:
        yield Problem((all_nodes, each), f"{all_nodes} is no multiple of {each}; change one of them")
    if parallel.dp > 1:
        rule = "nodes share the ranks of TP and PP of an engine without data parallelism"
        way = (
            f"let nodes divide the data-parallel ranks: {at('enable_expert_parallel').path} = true without {each.path}"
        )
        yield Problem((dp, each), f"{dp} with {each}: {rule}; leave one of them out, or {way}")
    elif parallel.gpus_per_rank % nodes:
        rule = f"{parallel.in_words} = {parallel.gpus_per_rank} GPUs are not divided among {each} nodes"
        yield Problem((degrees, each), f"{degrees.path}: {rule}; give a multiple")
    elif (needed := parallel.gpus_per_rank // nodes) > shape.gpus_per_node:
        rule = f"{parallel.in_words} over {nodes} nodes need {needed} GPUs and a node has {has}"
        way = f"lower one of the degrees, or raise {each.path}"
        yield Problem((degrees, has, each), f"{degrees.path}: {rule}; {way}")


def _side(s: InferenceSection, shape: Disaggregated, kind: Literal["prefill", "decode"], at: At) -> Problems:
    """The engines that read prompts, or those that write replies."""
    parallel, side, has = s.parallel, shape.sides[kind], shape.gpus_per_node
    rank = (side.tp or parallel.tp) * parallel.pp
    tp = at("parallel.tp" if side.tp is None else f"deployment.{kind}_tp")
    nodes, per_node = at(f"deployment.num_{kind}_nodes"), at(f"deployment.num_{kind}_per_node")
    degrees, dp, node = at("parallel"), at("parallel.dp"), at("deployment.gpus_per_node")
    factor = "" if parallel.pp == 1 else f" x pp {parallel.pp}"
    times = f" x {side.per_node} engines" if side.per_node > 1 else ""
    if side.per_node > 1 and side.nodes_each > 1:
        rule = "an engine over several nodes shares none; leave one of them out"
        yield Problem((per_node, nodes), f"{per_node} with {nodes}: {rule}")
    elif side.num_engines % side.per_node:
        replicas = at(f"deployment.num_{kind}_replicas")
        rule = f"{side.num_engines} engines leave a part of a node idle; give a multiple"
        yield Problem((replicas, per_node), f"{replicas} with {per_node}: {rule}")
    elif rank > has:
        if parallel.dp > 1 or rank != has * side.nodes_each:
            rule = f"is more than a node's {has} GPUs: such an engine has whole nodes and no {dp.path}"
            way = f"give {nodes.path} = {rank // has}" if rank % has == 0 else f"give a multiple of {has}"
            yield Problem((tp, nodes, dp), f"{tp}{factor} {rule}; {way}")
    elif has % (rank * side.per_node):
        yield Problem((tp, node), f"{tp}{factor}{times} does not divide the GPUs of a node, {node}")
    elif parallel.dp > 1 and parallel.dp % side.nodes_each:
        yield Problem((dp, nodes), f"{dp} is divided among {nodes} nodes; give a multiple")
    elif parallel.dp > 1 and (needed := rank * parallel.dp // side.nodes_each * side.per_node) > has:
        over = f" over {side.nodes_each} nodes" if side.nodes_each > 1 else ""
        what = f"tp {side.tp or parallel.tp}{factor} x dp {parallel.dp}{over}{times}"
        rule = f"{what} need {needed} GPUs and a node has {node}; lower one of the degrees"
        yield Problem((degrees, node), f"{degrees.path}: {rule}")


# -- runs --


def servers(c: RLConfig, at: At) -> Problems:
    """Engines of a run have a server."""
    for name in ("inference", "teacher_inference"):
        key = at(f"{name}.vllm_extra.headless")
        if key.held is True:
            yield Problem(
                key,
                f"{key} is a process without a server, which `inference` starts on an engine's further nodes, and the "
                "run would wait for it; leave it out",
                is_of_run=True,
            )


def sleep(c: RLConfig, at: At) -> Problems:
    """vLLM frees memory of GPUs only."""
    device, table, s = at("inference.device"), at("colocate"), c.inference
    if c.colocate is None or not c.colocate.offload_rollout or s is None:
        return
    if (s.device, s.chosen_engine(has_gpu=False)) == ("cpu", "vllm"):
        rule = 'vLLM has no sleep mode on a CPU; use engine = "embedded"'
        yield Problem((device, table), f"{device} with [{table.path}]: {rule}")


def policy_adapter(c: RLConfig, at: At) -> Problems:
    """How engines compute the run's adapter is said only where there is one, and vLLM may be the engine."""
    key = "inference.lora.compute_policy"
    if c.model.lora is None:
        yield from idle(at, key, "model.lora", "add [model.lora]", why="no adapter is trained")
    elif c.inference is not None and c.inference.engine == "embedded" and at(key).held is False:
        yield from idle(at, key, "inference.engine", why="the embedded engine always computes it beside its weights")


def drafted_sampling(c: RLConfig, at: At) -> Problems:
    """vLLM does not sample with min_p or logit_bias while it drafts; wherever it is known to be the engine."""
    if c.inference is not None and c.inference.chosen_engine(has_gpu=False) == "vllm":
        yield from undrafted_sampling(c, at)


def undrafted_sampling(c: RLConfig, at: At) -> Problems:
    """Ways to sample that vLLM does not have while it drafts."""
    if c.inference is None or c.inference.drafting_key is None:
        return
    drafting = at(f"inference.{c.inference.drafting_key}")
    evals = () if c.orchestrator.eval is None else c.orchestrator.eval.env
    envs = [f"orchestrator.env.{i}" for i in range(len(c.orchestrator.env))]
    envs += [f"orchestrator.eval.env.{i}" for i in range(len(evals))]
    for path in ("orchestrator.train", "orchestrator.eval", *envs):
        for name in ("min_p", "logit_bias"):
            key = at(f"{path}.sampling.{name}")
            if key.held:
                what = "vLLM does not sample with it while it drafts; leave one of them out"
                yield Problem((key, drafting), f"{key} with {drafting.path}: {what}")


def check_drafts(section: InferenceSection, path: str, cfg: RLConfig | None = None) -> None:
    """Check what vLLM is to return, and in a run to sample, while the engine of the section at this path drafts.

    Raises: ConfigError if it cannot.
    """
    problems = [*undrafted(section, below(section, path))]
    problems = problems or ([] if cfg is None else [*undrafted_sampling(cfg, below(cfg, ""))])
    if problems:
        raise ConfigError("\n".join(problem.sentence for problem in problems))


RULES: Rules = {
    RLConfig: (servers, sleep, policy_adapter, drafted_sampling),
    InferenceSection: (features, draft_keys, drafts_of_vllm, engine_nodes, vllm_options, side_options, group_options),
}
