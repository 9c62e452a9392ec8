"""Rules of [slurm], whose values sbatch would refuse later or misread, and of lists of hosts."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.config.rules.rule import Each, Rule, Rules
from stretto.config.sections.deployment import SlurmSection

Faults = Iterator[tuple[str, str] | tuple[str, str, Any]]
TIME = re.compile(r"(\d+-\d+(:\d+(:\d+)?)?|\d+(:\d+(:\d+)?)?|UNLIMITED|INFINITE)")
OPTION = re.compile(r"[a-z][a-z0-9-]*")
WRITTEN = frozenset(
    {"array", "chdir", "error", "exclusive", "job-name", "mem", "no-requeue", "nodes", "ntasks"}
    | {"ntasks-per-node", "open-mode", "output", "requeue", "signal", "wrap"}
)
"""Options of sbatch that the script sets, or with which it does not work."""
HOST = re.compile(r"[\w.-]+|(?=.*:.*:)[\da-fA-F:.]+(%[\w.-]+)?")
"""A name or an address of a machine, those of IPv6 without brackets."""
NODES = re.compile(r"([^\[\],]+)(?:\[([\d,-]+)\])?(?:,|$)")


def node_names(nodelist: str) -> list[str]:
    """The nodes of a list in Slurm's notation: `a[0-1,07],b` is a0, a1, a07, b.

    Raises: ValueError if it cannot be read.
    """
    names: list[str] = []
    end = 0
    while end < len(nodelist):
        if (match := NODES.match(nodelist, end)) is None:
            raise ValueError(nodelist)
        stem, numbers = match[1], match[2]
        names += [stem] if numbers is None else [f"{stem}{number}" for number in _numbers(numbers)]
        end = match.end()
    return names


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from (str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1))


def seconds(time: str) -> float:
    """A time limit in Slurm's notation: `90` is minutes, `1:30:00` hours, `1-12` days and hours."""
    if not time[0].isdigit():
        return math.inf
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    unit = 3600 if days or len(parts) == 3 else 60
    return float(86400 * int(days or 0) + sum(part * unit // 60**index for index, part in enumerate(parts)))


def option_faults(section: SlurmSection) -> Faults:
    """Values that would break the script, or that are not options of sbatch."""
    for key, value in section:
        if key != "pre_run_command" and isinstance(value, str) and (not value or re.search(r"\s", value)):
            yield key, "{0}: one word is needed, for it is an option of sbatch; leave it out for None"
    for option, value in section.extra.items():
        own = option.replace("-", "_")
        if not OPTION.fullmatch(option):
            rule = '{0.path}: "{it}" is no long option of sbatch; write it as in --constraint, without the dashes'
            yield "extra", rule, option
        elif own in SlurmSection.model_fields and own != "extra":
            yield "extra", "{0.path}: {it} is a key of [slurm]; give it there", option
        elif option in WRITTEN:
            yield "extra", "{0.path}: --{it} is written by stretto, which depends on it; leave it out", option
        elif isinstance(value, str) and re.search(r"[\r\n]", value):
            yield "extra", "{0.path}: the value of {it} has several lines; give one", option
    if section.time is not None and not TIME.fullmatch(section.time):
        yield "time", "{0} is no time of Slurm; write minutes, H:MM:SS or D-HH:MM:SS"


def node_list_faults(section: SlurmSection) -> Faults:
    """Lists of nodes that cannot be read, name a node twice, or contradict each other."""
    lists: dict[str, list[str]] = {}
    for key in ("nodelist", "exclude"):
        try:
            lists[key] = names = node_names(getattr(section, key) or "")
        except ValueError:
            yield key, "{0} cannot be read; write it as Slurm does, such as node[0-3,7],big0"
            continue
        if twice := [name for name, found in itertools.groupby(sorted(names)) if len([*found]) > 1]:
            yield key, "{0} has {it} twice; name each node once", twice[0]
    if both := sorted(set(lists.get("nodelist", ())) & set(lists.get("exclude", ()))):
        yield "nodelist exclude", "{0} and {1} both name {it}; leave it out of one", both[0]


def host_faults(cfg: Any) -> Faults:
    """Hosts that are not names or addresses of machines, or that others cannot reach."""
    at = "" if isinstance(cfg, InferenceConfig) else "deployment."
    hosts = getattr(cfg.deployment if at else cfg, "hosts", None) or ()
    for host in hosts:
        if not HOST.fullmatch(host):
            rule = "is no name or address of a machine; give each alone, as node-0, 10.0.0.1 or fd00::1"
            yield f"{at}hosts", f'{{0.path}}: "{{it}}" {rule}', host
    for node, host in enumerate(hosts):
        if is_loopback(host) and not all(map(is_loopback, hosts)):
            rule = f"node {node}, {host}, is reached by its own machine alone, and others are elsewhere"
            yield f"{at}hosts", f"{{0.path}}: {rule}; give the address at which they reach it"


def is_loopback(host: str) -> bool:
    """Whether only the machine itself reaches this address."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def placed_faults(cfg: Any, section: str, way_out: str) -> Faults:
    """Keys that name machines, although `section` has a cluster choose them."""
    at = "" if isinstance(cfg, InferenceConfig) else "deployment."
    owner = cfg.deployment if at else cfg
    for key in ("hosts", "node_rank"):
        if getattr(owner, key, None) is not None:
            rule = f"with [{section}] the job's nodes are not known before it starts; leave it out; {way_out}"
            yield f"{at}{key} {section}", f"{{0.path}}: {rule}"
    router = getattr(cfg if not at else getattr(cfg, "inference", None), "router", None)
    if router is not None and router.type == "llm-d" and router.address is not None:
        path = f"{'inference.' if at else ''}router.address"
        rule = "llm-d's gateway finds engines by their labels in Kubernetes, and does not see those of this job"
        yield (f"{path} {section}", f"{{0}} with [{section}]: {rule}; leave it out: vllm-router is started then")


def job_faults(cfg: Any) -> Faults:
    """[slurm] goes with the rest of the command that it submits."""
    if cfg.slurm is None:
        return
    yield from placed_faults(cfg, "slurm", "slurm.nodelist asks for certain nodes")
    with contextlib.suppress(ValueError):  # another rule reports a list that cannot be read
        if (more := len(node_names(cfg.slurm.nodelist or "")) - cfg.num_nodes) > 0:
            rule = f"names {more + cfg.num_nodes} nodes, and the plan has {cfg.num_nodes}"
            yield "slurm.nodelist deployment", f"{{0}} {rule}; leave {more} out, or raise the deployment"
    if isinstance(cfg, InferenceConfig):
        if "finish_within_s" in cfg.slurm.model_fields_set:
            rule = "servers have no step to finish and nothing to save, and end with the job's time; leave it out"
            yield "slurm.finish_within_s", f"{{0}}: {rule}"
        return
    time = cfg.slurm.time
    if time is not None and TIME.fullmatch(time) and (limit := seconds(time)) <= cfg.slurm.finish_within_s:
        rule = "{0} is {it} s, all of which is for the end, {1}; raise it, or lower the latter"
        yield "slurm.time slurm.finish_within_s", rule, limit
    if cfg.slurm.requeue and cfg.ckpt is None:
        rule = "{0} without checkpoints would begin anew every time; set it to false, or keep [ckpt]"
        yield "slurm.requeue ckpt", rule


ON_ONE_MACHINE = "{0.path} names what is on one machine; with {1} leave it out"
NODE_RANK = Rule(
    "deployment.node_rank",
    lambda c: (
        getattr(c.deployment, "node_rank", None) is not None and c.deployment.node_rank >= c.num_nodes and c.num_nodes
    ),
    "{0}: the {it} nodes are counted from 0",
)

RULES: Rules = {
    SlurmSection: (Each(option_faults), Each(node_list_faults)),
    RLConfig: (Each(job_faults), Each(host_faults), NODE_RANK),
    SFTConfig: (Each(job_faults), Each(host_faults), NODE_RANK),
    InferenceConfig: (Each(job_faults), Each(host_faults)),
}
