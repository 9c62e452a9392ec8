"""What a run claims of a Ray cluster, and which of its machines is which node: arithmetic, without Ray.

In: a checked root, and the machines as Ray lists them. Out: one `Bundle` per node of the plan, for a placement group; a
text that says what is missing; the order of the machines that the group got, and their addresses.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stretto.base.errors import ConfigError
from stretto.launch.launchers import JobConfig
from stretto_clusters.job import gpus_by_node, processes_by_node

Amounts = Mapping[str, float]
"""Amounts of resources, by Ray's names."""
CORE_RESOURCES = ("CPU", "GPU")
MAX_LISTED = 8


@dataclass(frozen=True)
class Bundle:
    """What one node of the plan claims: CPUs, GPUs and the user's own resources."""

    node: int
    claims: Amounts
    processes: str
    """The processes that it starts, as text."""


@dataclass(frozen=True)
class Machine:
    """A live machine of the cluster, which Ray calls a node."""

    id: str
    address: str
    total: Amounts
    free: Amounts


@dataclass(frozen=True)
class Place:
    """Where a bundle is, as its actor sees it."""

    bundle: int
    machine: str
    """Ray's id of the machine."""
    address: str
    gpus: tuple[str, ...] = ()


def plan_bundles(cfg: JobConfig) -> list[Bundle]:
    """The bundle of each node of the plan.

    Raises: ConfigError if the deployment cannot be planned.
    """
    section = cfg.ray
    assert section is not None, "a root without [ray] is not placed"
    nodes = processes_by_node(cfg)
    bundles = []
    for node, gpus in enumerate(gpus_by_node(cfg, nodes)):
        specs = nodes[node] if nodes else []
        counts = Counter(spec.role for spec in specs)
        names = ", ".join(role if number == 1 else f"{role} x {number}" for role, number in counts.items())
        claims: dict[str, float] = {"CPU": section.cpus_per_node or max(1, len(specs), gpus)}
        claims |= {"GPU": gpus} if gpus else {}
        bundles.append(Bundle(node, claims | section.resources, names or "all processes"))
    return bundles


# -- waiting --


def missing(bundles: Sequence[Bundle], machines: Sequence[Machine], strategy: str) -> str:
    """What the cluster lacks for these bundles now, with totals and machine by machine; "" if it lacks nothing."""
    unplaced = _unplaced(bundles, machines, strategy)
    if not unplaced:
        return ""
    names = sorted({name for bundle in bundles for name in bundle.claims}, key=_order)
    sums = []
    for name in names:
        claimed = sum(bundle.claims.get(name, 0) for bundle in bundles)
        total = sum(machine.total.get(name, 0) for machine in machines)
        free = sum(machine.free.get(name, 0) for machine in machines)
        sums.append(f"{name} {claimed:g} asked, {total:g} there, {free:g} free")
    by_address = sorted(machines, key=lambda each: _by_address(Place(0, each.id, each.address)))
    where = [_describe(machine, names) for machine in by_address[:MAX_LISTED]]
    if len(machines) > MAX_LISTED:
        where.append(f"and {len(machines) - MAX_LISTED} more machines")
    needs = f"{_as_text(unplaced[0].claims)}{' each' if len(unplaced) > 1 else ''}, {strategy}"
    if len(unplaced) == 1:
        which = f"node {unplaced[0].node} of the plan has"
    else:
        which = f"{len(unplaced)} of {len(bundles)} nodes of the plan have"
    return f"{which} no machine ({needs}): {'; '.join(sums)}. The cluster: {'; '.join(where) or 'no machine'}"


def _unplaced(bundles: Sequence[Bundle], machines: Sequence[Machine], strategy: str) -> list[Bundle]:
    """The bundles for which no machine is free, if each takes the first that it fits on, the largest bundle first."""
    free = {machine.id: dict(machine.free) for machine in machines}
    if strategy == "STRICT_PACK":
        total = _total(bundles)
        return [] if any(_fits(total, amounts) for amounts in free.values()) else list(bundles)
    unplaced = []
    for bundle in sorted(bundles, key=lambda each: [-each.claims.get("GPU", 0), -sum(each.claims.values())]):
        machine = next((id for id, amounts in free.items() if _fits(bundle.claims, amounts)), None)
        if machine is None:
            unplaced.append(bundle)
        elif strategy == "STRICT_SPREAD":
            del free[machine]
        else:
            free[machine] = {name: left - bundle.claims.get(name, 0) for name, left in free[machine].items()}
    return sorted(unplaced, key=lambda each: each.node)


def _total(bundles: Sequence[Bundle]) -> Amounts:
    """What the bundles claim together."""
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle.claims)
    return total


def _fits(claims: Amounts, free: Amounts) -> bool:
    return all(free.get(name, 0) >= amount for name, amount in claims.items())


def _describe(machine: Machine, names: Iterable[str]) -> str:
    each = [f"{name} {machine.free.get(name, 0):g} of {machine.total.get(name, 0):g} free" for name in names]
    return f"{machine.address} has {', '.join(each)}"


def _order(name: str) -> tuple[int, str]:
    """CPUs first, then GPUs, then the user's own resources by name."""
    return (CORE_RESOURCES.index(name) if name in CORE_RESOURCES else 2, name)


def _as_text(claims: Amounts) -> str:
    return ", ".join(f"{name} {claims[name]:g}" for name in sorted(claims, key=_order))


# -- which machine is which node --


def in_order(bundles: Sequence[Bundle], places: Sequence[Place]) -> list[Place]:
    """The places by node of the plan: nodes with equal claims get theirs in order of addresses, then of GPUs.

    Ray puts equal bundles anywhere. In this order, the same machines are the same nodes at every start.
    """
    by_node: dict[int, Place] = {}
    key = lambda bundle: sorted(bundle.claims.items())
    for _, group in itertools.groupby(sorted(bundles, key=lambda b: (key(b), b.node)), key=key):
        nodes = [bundle.node for bundle in group]
        of_group = sorted((place for place in places if place.bundle in nodes), key=_by_address)
        by_node |= dict(zip(nodes, of_group, strict=True))
    return [by_node[node] for node in sorted(by_node)]


def addresses(places: Sequence[Place], attempt: int) -> list[str]:
    """The addresses at which nodes reach each other.

    Nodes that are all on one machine have loopback addresses; those of the attempt before are not used again, because
    its processes may hold their ports for a moment longer.

    Raises: ConfigError if some nodes share a machine and others do not.
    """
    hosts = [place.address for place in places]
    shared = [address for address, number in Counter(hosts).items() if number > 1]
    if not shared:
        return hosts
    if len(set(hosts)) == 1:
        return [f"127.0.{attempt % 255 + 1}.{node + 1}" for node in range(len(places))]
    nodes = [str(node) for node, address in enumerate(hosts) if address == shared[0]]
    raise ConfigError(
        f"[ray]: nodes {', '.join(nodes)} of the plan are all on {shared[0]}, where they would take the same ports, "
        'and others are elsewhere; use ray.strategy = "STRICT_SPREAD", or make a node of the plan as large as a '
        "machine (deployment.gpus_per_node)."
    )


def _by_address(place: Place) -> tuple[int, int, str, str, tuple[tuple[int, str], ...]]:
    number: tuple[int, int] = (9, 0)  # names come after addresses
    with suppress(ValueError):
        address = ipaddress.ip_address(place.address)
        number = (address.version, int(address))
    gpus = tuple((int(gpu) if gpu.isdigit() else 0, gpu) for gpu in place.gpus)
    return (*number, place.address, place.machine, gpus)


# -- the dry run --


def screen(cfg: JobConfig) -> str:
    """What a dry run shows: the bundles, with equal neighbours in one line, and the sum of their claims."""
    bundles = plan_bundles(cfg)
    assert cfg.ray is not None
    lines = []
    key = lambda bundle: (_as_text(bundle.claims), bundle.processes)
    for (claims, processes), group in itertools.groupby(bundles, key=key):
        nodes = [bundle.node for bundle in group]
        name = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]}-{nodes[-1]}"
        lines.append((name, claims + (" each" if len(nodes) > 1 else ""), processes))
    first, second = (max(len(line[column]) for line in lines) for column in (0, 1))
    total = _total(bundles)
    where = cfg.ray.address or "RAY_ADDRESS, else this machine's cluster"
    count = f"{len(bundles)} bundle{'s' * (len(bundles) != 1)}"
    rows = [f"Ray ({where}) would place {count}, {cfg.ray.strategy}:"]
    rows += [f"  {name:<{first}}  {claims:<{second}}  {processes}" for name, claims, processes in lines]
    rows.append(f"  in all {_as_text(total)}; waits up to {cfg.ray.wait_s:g} s for them")
    if "GPU" not in total and len(bundles) == 1:
        rows.append("note: no GPUs are named or counted, so none are claimed; give deployment a count")
    return "\n".join(rows)
