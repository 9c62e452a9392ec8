"""What [ray] asks of a cluster, and which of its machines is which node: arithmetic, without Ray.

In: a checked root, and the machines as Ray lists them. Out: one `Bundle` per node of the plan, for a placement group;
what is missing, in words; the order of the machines that the group got, and their addresses.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stretto.base.errors import ConfigError
from stretto.launch.job import JobConfig, gpus_by_node, processes_by_node

Amounts = Mapping[str, float]
MOST_LISTED = 8


@dataclass(frozen=True)
class Bundle:
    """What one node of the plan claims: CPUs, GPUs, resources of the user's."""

    node: int
    claims: Amounts
    processes: str
    """What it starts, for people."""


@dataclass(frozen=True)
class Machine:
    """A live machine of the cluster, which Ray calls a node."""

    id: str
    address: str
    total: Amounts
    free: Amounts


@dataclass(frozen=True)
class Placed:
    """A bundle's place, as its actor sees it."""

    bundle: int
    machine: str
    """Ray's id of it."""
    address: str
    gpus: tuple[str, ...] = ()


def plan_bundles(cfg: JobConfig) -> list[Bundle]:
    """The bundle of each node of the plan.

    Raises: ConfigError if the deployment cannot be planned.
    """
    section = cfg.ray
    assert section is not None, "a root without [ray] is not placed"
    nodes = processes_by_node(cfg)
    found = []
    for node, gpus in enumerate(gpus_by_node(cfg, nodes)):
        specs = nodes[node] if nodes else []
        counts = Counter(spec.role for spec in specs)
        names = ", ".join(role if number == 1 else f"{role} x {number}" for role, number in counts.items())
        claims: dict[str, float] = {"CPU": section.cpus_per_node or max(1, len(specs), gpus)}
        claims |= {"GPU": gpus} if gpus else {}
        found.append(Bundle(node, claims | section.resources, names or "all processes"))
    return found


# -- waiting --


def missing(bundles: Sequence[Bundle], machines: Sequence[Machine], strategy: str) -> str:
    """What the cluster lacks for these bundles now: asked, there, free, machine by machine; "" if nothing does."""
    left = _unplaced(bundles, machines, strategy)
    if not left:
        return ""
    names = sorted({name for bundle in bundles for name in bundle.claims}, key=_order)
    sums = []
    for name in names:
        asked = sum(bundle.claims.get(name, 0) for bundle in bundles)
        there, free = (sum(amounts.get(name, 0) for amounts in each) for each in _amounts(machines))
        sums.append(f"{name} {asked:g} asked, {there:g} there, {free:g} free")
    where = [_of_machine(machine, names) for machine in _sorted(machines)[:MOST_LISTED]]
    if len(machines) > MOST_LISTED:
        where.append(f"and {len(machines) - MOST_LISTED} more machines")
    which = f"node {left[0].node}" if len(left) == 1 else f"{len(left)} of {len(bundles)} nodes"
    needs = f"{which} of the plan {'has' if len(left) == 1 else 'have'} no machine ({_shown(left[0].claims)}"
    needs += f" each, {strategy})" if len(left) > 1 else f", {strategy})"
    return f"{needs}: {'; '.join(sums)}. The cluster: {'; '.join(where) or 'no machine'}"


def _unplaced(bundles: Sequence[Bundle], machines: Sequence[Machine], strategy: str) -> list[Bundle]:
    """The bundles for which first fit, the largest first, finds no free machine."""
    free = {machine.id: dict(machine.free) for machine in machines}
    if strategy == "STRICT_PACK":
        total: Counter[str] = Counter()
        for bundle in bundles:
            total.update(bundle.claims)
        return [] if any(_fits(total, amounts) for amounts in free.values()) else list(bundles)
    left = []
    for bundle in sorted(bundles, key=lambda each: [-each.claims.get("GPU", 0), -sum(each.claims.values())]):
        if (
            found := next((id for id, amounts in free.items() if _fits(bundle.claims, amounts)), None)
        ) is None:
            left.append(bundle)
        elif strategy == "STRICT_SPREAD":
            del free[found]
        else:
            free[found] = {name: amount - bundle.claims.get(name, 0) for name, amount in free[found].items()}
    return sorted(left, key=lambda each: each.node)


def _fits(claims: Amounts, free: Amounts) -> bool:
    return all(free.get(name, 0) >= amount for name, amount in claims.items())


def _amounts(machines: Sequence[Machine]) -> tuple[list[Amounts], list[Amounts]]:
    return [machine.total for machine in machines], [machine.free for machine in machines]


def _of_machine(machine: Machine, names: Iterable[str]) -> str:
    each = [f"{name} {machine.free.get(name, 0):g} of {machine.total.get(name, 0):g} free" for name in names]
    return f"{machine.address} has {', '.join(each)}"


def _order(name: str) -> tuple[int, str]:
    return (["CPU", "GPU"].index(name) if name in ("CPU", "GPU") else 2, name)


def _shown(claims: Amounts) -> str:
    return ", ".join(f"{name} {claims[name]:g}" for name in sorted(claims, key=_order))


# -- which machine is which node --


def in_order(bundles: Sequence[Bundle], placed: Sequence[Placed]) -> list[Placed]:
    """The places by node of the plan: nodes that claim the same take their machines by address, then GPUs.

    Ray puts equal bundles anywhere; so the same machines have the same numbers every time.
    """
    found: dict[int, Placed] = {}
    key = lambda bundle: sorted(bundle.claims.items())
    for _, group in itertools.groupby(sorted(bundles, key=lambda b: (key(b), b.node)), key=key):
        nodes = [bundle.node for bundle in group]
        places = sorted((place for place in placed if place.bundle in nodes), key=_by_address)
        found |= dict(zip(nodes, places, strict=True))
    return [found[node] for node in sorted(found)]


def addresses(placed: Sequence[Placed], attempt: int) -> list[str]:
    """The addresses at which nodes reach each other.

    On one machine nodes have loopback addresses, which differ from those of the attempt before: what that has left may
    still have its ports for a moment.

    Raises: ConfigError if some share a machine and others do not.
    """
    found = [place.address for place in placed]
    shared = [address for address, number in Counter(found).items() if number > 1]
    if not shared:
        return found
    if len(set(found)) == 1:
        return [f"127.0.{attempt % 255 + 1}.{node + 1}" for node in range(len(placed))]
    nodes = [str(node) for node, address in enumerate(found) if address == shared[0]]
    raise ConfigError(
        f"[ray]: nodes {', '.join(nodes)} of the plan are all on {shared[0]}, where they would take the same ports, "
        'and others are elsewhere; use ray.strategy = "STRICT_SPREAD", or make a node of the plan as large as a '
        "machine (deployment.gpus_per_node)."
    )


def _by_address(place: Placed) -> tuple[int, int, str, str, tuple[tuple[int, str], ...]]:
    number: tuple[int, int] = (9, 0)  # a name: after the addresses
    with suppress(ValueError):
        address = ipaddress.ip_address(place.address)
        number = (address.version, int(address))
    gpus = tuple((int(gpu) if gpu.isdigit() else 0, gpu) for gpu in place.gpus)
    return (*number, place.address, place.machine, gpus)


def _sorted(machines: Sequence[Machine]) -> list[Machine]:
    return sorted(machines, key=lambda each: _by_address(Placed(0, each.id, each.address)))


# -- the dry run --


def screen(cfg: JobConfig) -> str:
    """What a dry run shows: the bundles, nodes that are alike in one line, and what they claim together."""
    bundles = plan_bundles(cfg)
    assert cfg.ray is not None
    lines = []
    for (claims, processes), group in itertools.groupby(
        bundles, key=lambda b: (_shown(b.claims), b.processes)
    ):
        nodes = [bundle.node for bundle in group]
        name = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]}-{nodes[-1]}"
        lines.append((name, claims + (" each" if len(nodes) > 1 else ""), processes))
    width, second = (max(len(line[column]) for line in lines) for column in (0, 1))
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle.claims)
    where = cfg.ray.address or "RAY_ADDRESS, else this machine's cluster"
    rows = [
        f"Ray ({where}) would place {len(bundles)} bundle{'s' * (len(bundles) != 1)}, {cfg.ray.strategy}:"
    ]
    rows += [f"  {name:<{width}}  {claims:<{second}}  {processes}" for name, claims, processes in lines]
    rows.append(f"  in all {_shown(total)}; waits up to {cfg.ray.wait_s:g} s for them")
    if "GPU" not in total and len(bundles) == 1:
        rows.append("note: no GPUs are named or counted, so none are claimed; give deployment a count")
    return "\n".join(rows)
