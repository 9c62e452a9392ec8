"""A command that other machines run: what Slurm (slurm/) and Ray (ray/) have in common.

In: a checked root with a [slurm] or [ray] section. The scheduler runs the same verb on each machine, with a config file
without that section; each node then plans the run and starts its own processes, as it does when started by hand. All
nodes see the run directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto import addons
from stretto.base import rundir
from stretto.base.paths import RunDir
from stretto.config.load import dump, write_json
from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.launch.launchers import JobConfig
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.processes import ProcessSpec
from stretto.launch.plan.serving import plan_serving

VERBS: dict[type, str] = {RLConfig: "rl", SFTConfig: "sft", InferenceConfig: "inference"}
RESUME = "--resume --resume.step None --resume.dir None --resume.skip-progress false"
"""Flags with which an interrupted run continues from its own latest checkpoint."""


def hosts_key(cfg: JobConfig) -> str:
    """The flag that takes the addresses of the nodes."""
    return "--hosts" if isinstance(cfg, InferenceConfig) else "--deployment.hosts"


def check_run(cfg: JobConfig) -> RunDir:
    """The run's directory, as an absolute path.

    Raises: ConfigError if it cannot be used as the command says.
    """
    run = RunDir(cfg.run_path.absolute())
    if not isinstance(cfg, InferenceConfig):
        rundir.check(run, **cfg.start_options)
    return run


def write_config(cfg: JobConfig, run: RunDir, path: Path) -> None:
    """Write the config that every node loads: the command's, with absolute paths and without its scheduler."""
    data = dump(cfg) | {"output_dir": str(run.path.parent), "run": {"name": run.path.name}}
    for section in ("slurm", "ray"):
        del data[section]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, data)


def processes_by_node(cfg: JobConfig) -> list[list[ProcessSpec]]:
    """The processes of each node, as a dry run plans them; [] for one node, which plans for the machine that it gets.

    Raises: ConfigError if the deployment cannot be planned.
    """
    planned = cfg.model_copy(update={"dry_run": True})
    if isinstance(planned, RLConfig) and planned.deployment.type == "multi_node":
        processes: Sequence[ProcessSpec] = plan_nodes(planned, planned.run_dir).processes
    elif isinstance(planned, SFTConfig) and planned.deployment.type == "multi_node":
        processes = addons.load("stretto.sft", "ranks", "`sft`").plan_ranks(planned)[1]
    elif isinstance(planned, InferenceConfig) and planned.num_nodes > 1:
        processes = plan_serving(planned, planned.run_dir).processes
    else:
        return []
    by_node: list[list[ProcessSpec]] = [[] for _ in range(cfg.num_nodes)]
    for spec in processes:
        by_node[spec.node].append(spec)
    return by_node


def gpus_by_node(cfg: JobConfig, nodes: list[list[ProcessSpec]]) -> list[int]:
    """GPUs that each node's processes take; without a plan (one node), those that the config names or counts."""
    return [len({gpu for spec in specs for gpu in spec.devices}) for specs in nodes] or [_gpus_of_one(cfg)]


def _gpus_of_one(cfg: JobConfig) -> int:
    if isinstance(cfg, InferenceConfig):
        return 0 if cfg.device == "cpu" else cfg.num_gpus
    if isinstance(cfg, SFTConfig):
        return cfg.num_ranks if cfg.trainer_gpu_ids or cfg.deployment.num_train_gpus else 0
    ids = cfg.gpu_ids
    named = {gpu for each in ids for gpu in each or ()}
    counted = sum(count or 0 for count, each in zip(cfg.gpu_counts, ids) if each is None)
    return max(len(named) + counted, max(named, default=-1) + 1)
