"""A command that other machines run: what Slurm (slurm/) and Ray (ray/) have in common.

In: a checked root with a section for one of them. What hands out machines runs the same verb on each with the same
config file, which has no such section; each node then plans the run as it does by hand and starts its own processes.
All nodes see the run directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.base import rundir
from stretto.base.paths import RunDir
from stretto.config.load import dump, write_json
from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.plan import ProcessSpec
from stretto.launch.run.ranks import plan_ranks
from stretto.launch.run.serve import plan_serving

JobConfig = RLConfig | SFTConfig | InferenceConfig
VERBS: dict[type, str] = {RLConfig: "rl", SFTConfig: "sft", InferenceConfig: "inference"}
RESUME = "--resume --resume.step None --resume.dir None --resume.skip-progress false"
"""Words with which a run that was interrupted continues from its own latest checkpoint."""


def hosts_key(cfg: JobConfig) -> str:
    """The flag that takes the addresses of the nodes."""
    return "--hosts" if isinstance(cfg, InferenceConfig) else "--deployment.hosts"


def check_run(cfg: JobConfig) -> None:
    """Raises: ConfigError if the run directory cannot be used as the command says."""
    if isinstance(cfg, InferenceConfig):
        return
    resume = cfg.resume
    step, origin = (None, None) if resume is None else (resume.step, resume.dir)
    run = RunDir(cfg.run_path.absolute())
    rundir.check(run, resume=resume is not None, step=step, clean=cfg.clean, origin=origin)


def write_config(cfg: JobConfig, run: RunDir, path: Path) -> None:
    """Write the config that every node loads: that of the command, with absolute paths."""
    data = dump(cfg) | {"output_dir": str(run.path.parent), "run": {"name": run.path.name}}
    for section in ("slurm", "ray"):
        del data[section]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, data)


def processes_by_node(cfg: JobConfig) -> list[list[ProcessSpec]]:
    """What each node will start, as a dry run plans it; empty for a machine that plans by what it has.

    Raises: ConfigError if the deployment cannot be planned.
    """
    planned = cfg.model_copy(update={"dry_run": True})
    if isinstance(planned, RLConfig) and planned.deployment.type == "multi_node":
        processes: Sequence[ProcessSpec] = plan_nodes(planned, planned.run_dir).processes
    elif isinstance(planned, SFTConfig) and planned.deployment.type == "multi_node":
        processes = plan_ranks(planned)[1]
    elif isinstance(planned, InferenceConfig) and planned.num_nodes > 1:
        processes = plan_serving(planned, planned.run_dir).processes
    else:
        return []
    found: list[list[ProcessSpec]] = [[] for _ in range(cfg.num_nodes)]
    for spec in processes:
        found[spec.node].append(spec)
    return found


def gpus_by_node(cfg: JobConfig, nodes: list[list[ProcessSpec]]) -> list[int]:
    """GPUs that the processes of each node take; those that are named or counted where nothing is planned."""
    return [len({gpu for spec in specs for gpu in spec.devices}) for specs in nodes] or [_gpus_of_one(cfg)]


def _gpus_of_one(cfg: JobConfig) -> int:
    if isinstance(cfg, InferenceConfig):
        return 0 if cfg.device == "cpu" else cfg.num_gpus
    if isinstance(cfg, SFTConfig):
        return cfg.num_ranks if cfg.trainer_gpu_ids or cfg.deployment.num_train_gpus else 0
    shape, parts = cfg.deployment, ("train", "infer", "teacher", "critic")
    ids = (cfg.trainer_gpu_ids, cfg.inference_gpu_ids, cfg.teacher_gpu_ids, cfg.critic_gpu_ids)
    named = {gpu for each in ids for gpu in each or ()}
    counted = sum(getattr(shape, f"num_{part}_gpus") or 0 for part, given in zip(parts, ids) if given is None)
    return max(len(named) + counted, max(named, default=-1) + 1)
