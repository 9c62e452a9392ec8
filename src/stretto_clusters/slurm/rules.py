"""Rules of [slurm], whose values sbatch would refuse later or misread."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from typing import Any

from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules
from stretto.config.sections.deployment import SlurmSection
from stretto_clusters.placed import node_names, placed_by_cluster

TIME = re.compile(r"(\d+-\d+(:\d+(:\d+)?)?|\d+(:\d+(:\d+)?)?|UNLIMITED|INFINITE)")
OPTION = re.compile(r"[a-z][a-z0-9-]*")
WRITTEN = frozenset(
    {"array", "chdir", "error", "exclusive", "job-name", "mem", "no-requeue", "nodes", "ntasks"}
    | {"ntasks-per-node", "open-mode", "output", "requeue", "signal", "wrap"}
)
"""Options of sbatch that the script sets, or with which it does not work."""


def seconds(time: str) -> float:
    """A time limit in Slurm's notation: `90` is minutes, `1:30:00` hours, `1-12` days and hours."""
    if not time[0].isdigit():
        return math.inf
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    unit = 3600 if days or len(parts) == 3 else 60
    return float(86400 * int(days or 0) + sum(part * unit // 60**index for index, part in enumerate(parts)))


def options(s: SlurmSection, at: At) -> Problems:
    """Values that would break the script, or that are not options of sbatch."""
    for name, value in s:
        if name != "pre_run_command" and isinstance(value, str) and (not value or re.search(r"\s", value)):
            rule = "one word is needed, for it is an option of sbatch; leave it out for None"
            yield Problem(at(name), f"{at(name)}: {rule}")
    extra, time = at("extra"), at("time")
    for option, value in s.extra.items():
        own = option.replace("-", "_")
        if not OPTION.fullmatch(option):
            what = f'"{option}" is no long option of sbatch; write it as in --constraint, without the dashes'
            yield Problem(extra, f"{extra.path}: {what}")
        elif own in SlurmSection.model_fields and own != "extra":
            yield Problem(extra, f"{extra.path}: {option} is a key of [slurm]; give it there")
        elif option in WRITTEN:
            yield Problem(extra, f"{extra.path}: --{option} is written by stretto, which depends on it; leave it out")
        elif isinstance(value, str) and re.search(r"[\r\n]", value):
            yield Problem(extra, f"{extra.path}: the value of {option} has several lines; give one")
    if s.time is not None and not TIME.fullmatch(s.time):
        yield Problem(time, f"{time} is no time of Slurm; write minutes, H:MM:SS or D-HH:MM:SS")


def node_lists(s: SlurmSection, at: At) -> Problems:
    """Lists of nodes that cannot be read, name a node twice, or contradict each other."""
    lists: dict[str, list[str]] = {}
    for name in ("nodelist", "exclude"):
        key = at(name)
        try:
            lists[name] = names = node_names(key.held or "")
        except ValueError:
            yield Problem(key, f"{key} cannot be read; write it as Slurm does, such as node[0-3,7],big0")
            continue
        if twice := [node for node, found in itertools.groupby(sorted(names)) if len([*found]) > 1]:
            yield Problem(key, f"{key} has {twice[0]} twice; name each node once")
    if both := sorted(set(lists.get("nodelist", ())) & set(lists.get("exclude", ()))):
        wanted, unwanted = at("nodelist"), at("exclude")
        yield Problem((wanted, unwanted), f"{wanted} and {unwanted} both name {both[0]}; leave it out of one")


def job(cfg: Any, at: At) -> Problems:
    """[slurm] goes with the rest of the command that it submits."""
    if cfg.slurm is None:
        return
    yield from placed_by_cluster(cfg, at, "slurm", "slurm.nodelist asks for certain nodes")
    listed = at("slurm.nodelist")
    with contextlib.suppress(ValueError):  # another rule reports a list that cannot be read
        if (more := len(node_names(cfg.slurm.nodelist or "")) - cfg.num_nodes) > 0:
            what = f"names {more + cfg.num_nodes} nodes, and the plan has {cfg.num_nodes}"
            way = f"leave {more} out, or raise the deployment"
            yield Problem((listed, at("deployment")), f"{listed} {what}; {way}")
    end, limit, requeue = at("slurm.finish_within_s"), at("slurm.time"), at("slurm.requeue")
    if isinstance(cfg, InferenceConfig):
        if "finish_within_s" in cfg.slurm.model_fields_set:
            rule = "servers have no step to finish and nothing to save, and end with the job's time; leave it out"
            yield Problem(end, f"{end}: {rule}")
        return
    time = cfg.slurm.time
    if time is not None and TIME.fullmatch(time) and seconds(time) <= cfg.slurm.finish_within_s:
        rule = f"is {seconds(time):.0f} s, all of which is for the end, {end}; raise it, or lower the latter"
        yield Problem((limit, end), f"{limit} {rule}")
    if cfg.slurm.requeue and cfg.ckpt is None:
        rule = "without checkpoints would begin anew every time; set it to false, or keep [ckpt]"
        yield Problem((requeue, at("ckpt")), f"{requeue} {rule}")


RULES: Rules = {SlurmSection: (options, node_lists), RLConfig: (job,), SFTConfig: (job,), InferenceConfig: (job,)}
