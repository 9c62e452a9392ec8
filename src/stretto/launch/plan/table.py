"""The plan of a run as text: what it trains, and its processes, with equal ones in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from stretto.base import process
from stretto.config.sections.deployment import ResumeSection
from stretto.launch.plan.beside import engines_beside
from stretto.launch.plan.plan import LaunchPlan
from stretto.launch.plan.processes import ProcessSpec

T = TypeVar("T")

MAX_LINES = 12
"""A longer table has one line for equal processes of several nodes."""


def process_table(processes: Sequence[ProcessSpec], hosts: Sequence[str]) -> str:
    """A line per process, or per role and node for the ranks of a trainer; with nodes if there are several hosts.

    In a long table, neighbours of one role that use their nodes alike share a line. Commands, environment variables and
    the ports of each process are in plan.json.
    """
    header = ("process", *["node"] * bool(hosts), "threads", "devices", "ports")
    lines = _joined([[spec] for spec in processes], _are_ranks_of_a_node)
    by_line = [[line] for line in lines]
    if len(lines) > MAX_LINES:
        by_line = _joined(by_line, _use_nodes_alike)
    table = [header, *(_row(nodes, hosts) for nodes in by_line)]
    widths = [max(map(len, column)) for column in zip(*table)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def _joined(groups: list[list[T]], are_alike: Callable[[T, T], bool]) -> list[list[T]]:
    """Groups with one member each, joined with their neighbours where these are alike."""
    joined: list[list[T]] = []
    for group in groups:
        if joined and are_alike(joined[-1][-1], group[0]):
            joined[-1] += group
        else:
            joined.append(group)
    return joined


def _are_ranks_of_a_node(one: ProcessSpec, other: ProcessSpec) -> bool:
    """Whether both have the same role and node, and listen on no port."""
    return not one.ports and not other.ports and (one.role, one.node) == (other.role, other.node)


def _use_nodes_alike(one: Sequence[ProcessSpec], other: Sequence[ProcessSpec]) -> bool:
    """Whether the processes differ only in their node, and in ports other than the one for HTTP."""

    def of(specs: Sequence[ProcessSpec]) -> tuple[object, ...]:
        first = specs[0]
        ports = first.ports.get("http") if "http" in first.ports else tuple(first.ports)
        return first.role, first.threads, len(specs), _devices(specs), ports

    return one[0].node != other[0].node and of(one) == of(other)


def _row(nodes: Sequence[Sequence[ProcessSpec]], hosts: Sequence[str]) -> tuple[str, ...]:
    """The cells of the line for these processes; nodes: the processes of each node."""
    specs = [spec for node in nodes for spec in node]
    first, last = specs[0], specs[-1]
    places = [f"{node}: {host}" for node, host in enumerate(hosts)] or [""]
    where = " to ".join(dict.fromkeys((places[first.node], places[last.node])))
    return (
        first.name if len(specs) == 1 else f"{first.name} to {last.rank}",
        *[where] * bool(hosts),
        str(first.threads) + (" each" if len(specs) > 1 else ""),
        _devices(nodes[0]) + (" each" if len(nodes) > 1 and first.devices else ""),
        _ports(specs),
    )


def _devices(specs: Sequence[ProcessSpec]) -> str:
    gpus = dict.fromkeys(device for spec in specs for device in spec.devices)
    return f"GPU {','.join(gpus)}" if gpus else "CPU"


def _ports(specs: Sequence[ProcessSpec]) -> str:
    """`http:8100 nixl:5600-5607`: for each name of a port, the lowest and the highest port of all processes."""
    by_name: dict[str, set[int]] = {}
    for spec in specs:
        for name, port in spec.ports.items():
            by_name.setdefault(name, set()).add(port)
    shown = [f"{name}:{min(ports)}" + (f"-{max(ports)}" if len(ports) > 1 else "") for name, ports in by_name.items()]
    return " ".join(shown) or "-"


def resume_text(section: ResumeSection) -> str:
    """A text that says from where a run resumes."""
    of_another = f" of {section.dir}" if section.dir is not None else ""
    if section.skip_progress:
        return f"begins with what was learned up to step {section.step}{of_another}"
    return f"resumed from step {section.step}{of_another}"


def gpu_sum(plan: LaunchPlan) -> str | None:
    """`4 trainer + 4 critic + 8 inference + 4 model_ref = 20`; None for a run without GPUs."""
    by_role: dict[str, set[tuple[int, str]]] = {}
    for role in ("trainer", "critic", "inference", *engines_beside(plan.config).sections(plan.config)):
        own = {(spec.node, gpu) for spec in plan.processes if spec.role == role for gpu in spec.devices}
        if own:
            by_role[role] = own
    if not by_role:
        return None
    total = len(set().union(*by_role.values()))
    counted = " + ".join(f"{len(own)} {role}" for role, own in by_role.items())
    shared = sum(map(len, by_role.values())) - total
    return f"{counted} = {total}" + (f", {shared} of them shared" if shared else "")


def engine_sum(plan: LaunchPlan) -> str | None:
    """`2 prefill x 4 + 1 decode x 16 (over 2 nodes) = 24 GPUs`; None if all are alike, each on one node."""
    if plan.engines is None or not any(spec.devices for spec in plan.processes if spec.role == "inference"):
        return None
    kinds: dict[tuple[str, int, int], int] = {}  # role, GPUs and nodes of an engine: its processes
    for spec in plan.engines.engines:
        kind = (spec.role, spec.num_gpus * spec.num_nodes, spec.num_nodes)
        kinds[kind] = kinds.get(kind, 0) + 1
    if len(kinds) == 1 and all(nodes == 1 for _, _, nodes in kinds):
        return None
    parts = []
    for (role, gpus, nodes), count in kinds.items():
        name = str(count // nodes) if role == "engine" else f"{count // nodes} {role}"
        parts.append(f"{name} x {gpus}" + (f" (over {nodes} nodes)" if nodes > 1 else ""))
    return f"{' + '.join(parts)} = {sum(spec.num_gpus for spec in plan.engines.engines)} GPUs"


def table(plan: LaunchPlan) -> str:
    """The plan as text."""
    cfg = plan.config
    names = [env.name or env.id for env in cfg.orchestrator.env]
    envs = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    every, level, steering = cfg.weight_broadcast.interval, cfg.orchestrator.max_async_level, cfg.orchestrator.steering
    rarely = "" if every == 1 else f", new weights every {every} steps"
    ahead = f"up to {level} ahead"
    if steering is not None:
        ahead = f"{level} ahead at first, steered between {steering.min_level} and {steering.max_level}"
        if (most := steering.max_update_interval or every) > every:
            rarely = f", new weights every {every} to {most} steps"
    steps = "until stopped" if cfg.max_steps is None else f"{cfg.max_steps} steps"
    head = [
        f"run      {plan.run}" + (f" ({resume_text(cfg.resume)})" if cfg.resume is not None else ""),
        f"model    {cfg.model.name}" + (" (made from scratch)" if cfg.model.scratch is not None else ""),
        f"trains   {envs}, {steps}, {ahead}{rarely}",
        f"batch    {plan.batch}",
        f"wires    rollouts {cfg.rollout_transport.type}, weights {cfg.weight_broadcast.type}",
        f"machine  {process.num_cores()} CPU cores, {len(process.visible_gpus())} GPUs",
        *[f"gpus     {counted}" for counted in [gpu_sum(plan)] if counted],
        *[f"engines  {counted}" for counted in [engine_sum(plan)] if counted],
    ]
    if cfg.inference is None:
        urls = cfg.orchestrator.client.base_url
        head.append(f"engines  already running at {urls if isinstance(urls, str) else ', '.join(urls)}")
    return "\n".join([*head, "", process_table(plan.processes, plan.hosts), *(f"note: {note}" for note in plan.notes)])
