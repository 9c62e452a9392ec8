"""How many engines there are, how many GPUs each has, and on which nodes they are.

Engines are --rollout-num-gpus / --rollout-num-gpus-per-engine; with --prefill-num-servers some read prompts.
In a --vllm-config the two kinds may differ in size, and regular groups in size and options. An engine is smaller than
a node, as large, or has whole nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stretto.base.errors import ConfigError
from stretto_vime.files.models import ServedModel
from stretto_vime.flags.flag import Setting, Values

ENGINES = ("--rollout-num-gpus", "--rollout-num-gpus-per-engine")
PREFILL = "--prefill-num-servers"
FILE = ("--vllm-config",)


@dataclass(frozen=True)
class Engines:
    """The engines of one kind."""

    kind: Literal["regular", "prefill", "decode"]
    number: int
    gpus: int
    """GPUs of one engine."""

    def num_nodes(self, node: int) -> int:
        """Nodes of one engine."""
        return max(1, self.gpus // node)

    def per_node(self, node: int) -> int:
        """Engines on one node."""
        return max(1, node // self.gpus)


def updated(flags: Values) -> ServedModel | None:
    """The model of --vllm-config that is trained; None without that flag."""
    return next((model for model in flags.models if model.is_updated), None)


def count_engines(flags: Values) -> list[Engines]:
    """The engines, by kind or shape; on the CPU one, or as many as a --vllm-config has groups.

    Raises: ConfigError if they are no whole numbers, or do not fill whole nodes where they are larger than one.
    """
    total, each = flags.rollout_num_gpus, flags.rollout_num_gpus_per_engine
    if total == 0 and flags.actor_num_gpus_per_node:
        raise ConfigError(
            f"{flags.typed('--rollout-num-gpus')}: without engines nothing is sampled; use a number of GPUs, or "
            'engines that run already: inference = "None" in the TOML of --print-config'
        )
    model = updated(flags)
    groups = [] if model is None else model.engines
    if total == 0:
        return [Engines("regular", group.num_engines, 1) for group in groups] or [Engines("regular", 1, 1)]
    sizes = {group.worker_type: group.num_gpus_per_engine for group in groups}
    if model is not None and model.differs:
        found = [Engines("regular", group.num_engines, group.num_gpus_per_engine) for group in groups]
    elif len(set(sizes.values())) > 1:  # what the file says was checked against --rollout-num-gpus
        numbers = {kind: sum(g.num_engines for g in groups if g.worker_type == kind) for kind in sizes}
        found = [Engines(kind, numbers[kind], sizes[kind]) for kind in ("prefill", "decode")]
    else:
        found = _of_one_size(flags, total, each)
    key = "--actor-num-gpus-per-node" if flags.colocate else "--num-gpus-per-node"
    node = flags.value(key)
    for engines in found:
        if engines.gpus > node and engines.gpus % node:
            raise ConfigError(
                f"{flags.typed(ENGINES[1], key)}: an engine of {engines.gpus} GPUs is larger than a "
                f"node and has whole nodes; use a multiple of {node}"
            )
    return found


def _of_one_size(flags: Values, total: int, each: int) -> list[Engines]:
    if total % each:
        fewer, more = total - total % each, total - total % each + each
        raise ConfigError(
            f"{flags.typed(*ENGINES)}: {total} GPUs are no whole number of engines of {each}; use {fewer or each} or "
            f"{more} GPUs"
        )
    number, prefill = total // each, flags.prefill_num_servers
    if prefill is None:
        return [Engines("regular", number, each)]
    if not 0 < prefill < number:
        raise ConfigError(
            f"{flags.typed(PREFILL, *ENGINES)}: of {number} engines at least one must read prompts and one write "
            "replies"
        )
    return [Engines("prefill", prefill, each), Engines("decode", number - prefill, each)]


def degrees(flags: Values, found: list[Engines]) -> Iterator[Setting]:
    """Tensor parallel degrees: what pipeline and data parallelism leave of an engine's GPUs.

    Raises: ConfigError if that is no whole number.
    """
    size = shards(flags)
    for engines in found:
        if engines.gpus % size:
            raise ConfigError(
                f"{flags.typed(ENGINES[1])}: its pipeline and data parallel sizes, {size} together, must divide it, "
                f"{engines.gpus}"
            )
    yield Setting("inference.parallel.tp", found[0].gpus // size, ENGINES[1:])
    if found[0].kind != "regular" and found[-1].gpus != found[0].gpus:
        yield Setting("inference.deployment.decode_tp", found[-1].gpus // size, ("--vllm-config",))


def shards(flags: Values) -> int:
    """GPUs of an engine for each rank of tensor parallelism."""
    return flags.vllm_pipeline_parallel_size * flags.vllm_data_parallel_size


def on_one_node(flags: Values, found: list[Engines]) -> Iterator[Setting]:
    """Engines beside one another on a node."""
    if (model := updated(flags)) is not None and model.differs:
        yield from group_settings(model, "inference", shards(flags), is_wide=False)
        return
    if found[0].kind == "regular":
        yield Setting("inference.deployment.num_replicas", sum(each.number for each in found), ENGINES)
        return
    yield from _numbers(found)
    yield Setting("inference.deployment.is_local", True, (PREFILL,))


def group_settings(model: ServedModel, at: str, shards: int, *, is_wide: bool) -> Iterator[Setting]:
    """Engines of several shapes."""
    yield Setting(f"{at}.deployment.type", "groups", FILE)
    yield Setting(f"{at}.deployment.groups", model.tables(shards, is_wide=is_wide), FILE)


def over_nodes(flags: Values, found: list[Engines]) -> Iterator[Setting]:
    """Engines on nodes of their own.

    Raises: ConfigError if they leave GPUs of a node idle.
    """
    model = updated(flags)
    if model is not None and (model.differs or leaves_idle(flags, model)):
        yield from _groups_over_nodes(flags, model)
        return
    node = min(flags.num_gpus_per_node, sum(engines.number * engines.gpus for engines in found))
    if flags.colocate:
        node = flags.actor_num_gpus_per_node
    if found[0].kind != "regular":
        yield from _sides_over_nodes(flags, found, node)
        return
    [engines] = found
    yield Setting("deployment.num_infer_replicas", engines.number * engines.gpus // max(node, engines.gpus), ENGINES)
    if engines.gpus > node:
        yield from _engine_over_nodes(flags, engines, node)
        return
    if engines.number % engines.per_node(node) or node % engines.gpus:
        raise ConfigError(
            f"{flags.typed(*ENGINES, '--num-gpus-per-node')}: engines of {engines.gpus} GPUs must fill whole nodes of "
            f"{node}; change one of them"
        )
    if node > flags.actor_num_gpus_per_node:
        yield Setting("deployment.infer_gpus_per_node", node, ENGINES)
    yield Setting("inference.deployment.num_replicas", engines.per_node(node), ENGINES)


def _groups_over_nodes(flags: Values, model: ServedModel) -> Iterator[Setting]:
    """Engines of several shapes, and GPUs that are left idle, on nodes of their own."""
    node = flags.actor_num_gpus_per_node if flags.colocate else flags.num_gpus_per_node
    node = min(node, sum(group.num_gpus for group in model.groups))
    yield Setting("deployment.num_infer_replicas", 1, FILE)
    if node > flags.actor_num_gpus_per_node:
        yield Setting("deployment.infer_gpus_per_node", node, FILE)
    yield from nodes_of_groups(flags, model, "inference", node, shards(flags))


def is_over_nodes(flags: Values, model: ServedModel) -> bool:
    """Whether a frozen model of a run over several nodes is larger than a node, or leaves GPUs of it idle."""
    total = sum(group.num_gpus for group in model.groups)
    return total > flags.num_gpus_per_node or leaves_idle(flags, model)


def leaves_idle(flags: Values, model: ServedModel) -> bool:
    """Whether a model of a run over several nodes has placeholders whose place among its groups is kept.

    Prefill and decode engines that fit one node have its first GPUs, and those of placeholders are the rest.
    """
    total = sum(group.num_gpus for group in model.groups)
    is_local = model.count("prefill") > 0 and total <= flags.num_gpus_per_node
    return len(model.engines) < len(model.groups) and not is_local


def nodes_of_groups(flags: Values, model: ServedModel, at: str, node: int, shards: int = 1) -> Iterator[Setting]:
    """The groups of a model, in the order of the file, on nodes of so many GPUs.

    Raises: ConfigError for engines of two kinds, and for GPUs that are left over.
    """
    where, total = flags.given[FILE[0]], sum(group.num_gpus for group in model.groups)
    if model.count("prefill"):
        raise ConfigError(
            f"{where}: model {model.name}: over several nodes prefill and decode engines have whole nodes, and those "
            "of a frozen model fit one; leave placeholders out, or use regular engines"
        )
    node = min(node, total)
    if rest := total % node:
        raise ConfigError(
            f"{where}, {flags.typed('--num-gpus-per-node')}: the groups of {model.name} take {total} GPUs, which "
            f"leave {node - rest} of a node of {node}; change num_gpus of a group, or add a placeholder of "
            f"{node - rest}"
        )
    yield from group_settings(model, at, shards, is_wide=True)
    yield Setting(f"{at}.deployment.num_nodes", total // node, FILE)
    yield Setting(f"{at}.deployment.gpus_per_node", node, ("--num-gpus-per-node", *FILE))


def _engine_over_nodes(flags: Values, engines: Engines, node: int) -> Iterator[Setting]:
    """Each engine on several nodes, which share its TP and PP ranks, or divide its data-parallel ones."""
    nodes, dp = engines.num_nodes(node), flags.vllm_data_parallel_size
    yield Setting("inference.deployment.type", "multi_node", ENGINES)
    yield Setting("inference.deployment.num_nodes", nodes, (*ENGINES, "--num-gpus-per-node"))
    yield Setting("inference.deployment.gpus_per_node", node, ("--num-gpus-per-node",))
    if dp == 1:
        yield Setting("inference.deployment.nodes_per_engine", nodes, ENGINES)
    elif not flags.vllm_enable_expert_parallel or dp % nodes:
        raise ConfigError(
            f"{flags.typed(ENGINES[1], '--num-gpus-per-node', '--vllm-data-parallel-size')}: the {nodes} nodes of an "
            f"engine divide its data-parallel ranks only with --vllm-enable-expert-parallel and a multiple of {nodes} "
            "of them; else leave --vllm-data-parallel-size out, and the nodes share its tensor parallel ranks"
        )


def _sides_over_nodes(flags: Values, found: list[Engines], node: int) -> Iterator[Setting]:
    yield Setting("deployment.num_infer_replicas", 1, (PREFILL,))
    if sum(engines.number * engines.gpus for engines in found) <= node:
        yield from on_one_node(flags, found)
        if node > flags.actor_num_gpus_per_node:
            yield Setting("deployment.infer_gpus_per_node", node, ENGINES)
        return
    yield from _numbers(found)
    yield Setting("inference.deployment.gpus_per_node", node, ("--num-gpus-per-node",))
    for engines in found:
        number, gpus, kind = engines.number, engines.gpus, engines.kind
        if number * gpus % node or (gpus < node and node % gpus):
            raise ConfigError(
                f"{flags.typed(PREFILL, *ENGINES, '--num-gpus-per-node')}: {number} {kind} engines x {gpus} GPUs = "
                f"{number * gpus} do not fill whole nodes of {node}, and either kind has nodes of its own; change one "
                "of them"
            )
        is_wide = gpus > node
        key, value = (f"{kind}_nodes", engines.num_nodes) if is_wide else (f"{kind}_per_node", engines.per_node)
        yield Setting(f"inference.deployment.num_{key}", value(node), (PREFILL, *ENGINES))


def _numbers(found: list[Engines]) -> Iterator[Setting]:
    yield Setting("inference.deployment.type", "disaggregated", (PREFILL,))
    for engines in found:
        yield Setting(f"inference.deployment.num_{engines.kind}_replicas", engines.number, (PREFILL, *ENGINES))
