"""Loads, trains, saves, exports and resumes; run by every rank.

`python file_runs.py FOLDER STAGE`: models lie in FOLDER/models, results go to FOLDER/results.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from mesh_runs import batches, optim_of, section_of

from stretto.base.paths import RunDir
from stretto.config.sections.trainer import ConstantScheduler
from stretto.models import hub
from stretto.trainer.learner import Learner
from stretto.trainer.publish.export import export_weights
from stretto.trainer.ranks.mesh import Mesh, find_degrees, process_group, training_device
from stretto.trainer.state import checkpoint

STEP = 2  # checkpoints are of it
KINDS = ("dense", "untied", "moe", "lora", *(["muon"] if find_spec("stretto_optimizers") else []))
STAGES = {
    # name: (ranks, mesh of each kind, stage whose checkpoint it continues)
    "one": (1, {kind: {} for kind in KINDS}, None),
    "two": (2, {kind: {} for kind in KINDS} | {"moe": {"ep": 1}}, None),
    "four": (
        4,
        {
            "dense": {"tp": 2, "sequence_parallel": True},
            "untied": {"dp_replicate": 2, "tp": 2},
            "moe": {"ep": 4, "tp": 2, "sequence_parallel": True},
            "lora": {"tp": 2, "cp": 2},
            "muon": {"dp_replicate": 2},
        },
        "two",
    ),
    "cut": (2, {kind: {"tp": 2} for kind in KINDS} | {"moe": {"ep": 2}}, "two"),
    "one_again": (1, {kind: {} for kind in KINDS}, "four"),
}


def build(kind: str, model: dict, folder: Path, world_size: int) -> Learner:
    """A learner of the model in the folder; on several ranks each reads its shards."""
    torch.manual_seed(0)
    directory, section = folder / "models" / kind, section_of(kind, **model)
    if world_size == 1:
        policy, mesh = hub.load_model(directory, dtype=torch.float32), None
    else:
        policy = hub.build_meta_model(directory, torch.float32)
        mesh = Mesh(find_degrees(section, world_size, policy.config), training_device())
    return Learner(
        policy,
        model=section,
        optim=optim_of(kind),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        mesh=mesh,
    )


def run_of(folder: Path, stage: str, kind: str) -> RunDir:
    return RunDir(folder / "runs" / f"{stage}-{kind}")


def step(learner: Learner, kind: str) -> dict[str, float]:
    micro_batches = batches(kind)[learner.step]
    learner.forward_backward(learner.mesh.local_items(micro_batches))
    return learner.optim_step()


def play(kind: str, folder: Path, stage: str) -> list[dict[str, float]]:
    """Metrics of a stage: train to STEP or load its checkpoint, save and export, then one more step."""
    world_size, meshes, before = STAGES[stage]
    learner, metrics = build(kind, meshes[kind], folder, world_size), []
    if before is None:
        metrics = [step(learner, kind) for _ in range(STEP)]
    else:
        checkpoint.load(run_of(folder, before, kind), learner, STEP)
    run = run_of(folder, stage, kind)
    saver = checkpoint.Saver(run, is_async=True, on_written=lambda step: None)
    saver.save(learner)
    export_weights(
        run, learner.network.weights, STEP, folder / "models" / kind, section_of(kind) if "lora" in kind else None
    )
    metrics.append(step(learner, kind))  # beside the writing
    saver.wait()
    return metrics


def main(folder: Path, stage: str) -> None:
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        for kind in KINDS:
            metrics = play(kind, folder, stage)
            if os.environ["RANK"] == "0":
                torch.save(metrics, folder / "results" / f"{stage}-{kind}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
