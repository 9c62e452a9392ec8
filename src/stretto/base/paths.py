"""The path of every file in a run directory, in one place.

A run directory is `<output_dir>/<run.name>`. All code that reads or writes a file of a run gets its path from
`RunDir`. Nothing is created here: the code that writes a file creates its parent directory.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from stretto.base.files import atomic_path

_STEP = re.compile(r"step_(\d+)$")


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    # -- what the launcher writes --

    @property
    def configs(self) -> Path:
        """Directory of the resolved configs."""
        return self.path / "configs"

    def config(self, name: str) -> Path:
        """A resolved config: `run`, the whole run's, and those of engines and evals."""
        return self.configs / f"{name}.json"

    @property
    def plan(self) -> Path:
        """The process plan."""
        return self.path / "plan.json"

    @property
    def launch(self) -> Path:
        """Who runs it: a launcher on some host, or a job."""
        return self.path / "launch.json"

    @property
    def nodes(self) -> Path:
        """The hosts of a run over several, by which the others recognise the first one's directory."""
        return self.path / "nodes.json"

    @property
    def slurm(self) -> Path:
        """Directory of the job: its script, its config and its log."""
        return self.path / "slurm"

    @property
    def finish_marker(self) -> Path:
        """Exists once a job of Slurm has been asked to finish its step."""
        return self.slurm / "finish"

    @property
    def ray(self) -> Path:
        """Directory of a run on a Ray cluster: its config, its state, and what the nodes print."""
        return self.path / "ray"

    @property
    def lock(self) -> Path:
        """Locked (flock) by the launcher while the run is live.

        Processes that were started alone hold a shared lock on it.
        """
        return self.path / "run.lock"

    def part_lock(self, role: str) -> Path:
        """Locked by an orchestrator or trainer that was started alone."""
        return self.path / f"run.{role}.lock"

    @property
    def secret(self) -> Path:
        """The secret by which the run's processes recognise each other; mode 0600 (base/secret.py)."""
        return self.path / "secret"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, role: str) -> Path:
        """Standard output and error of a process."""
        return self.logs / f"{role}.log"

    @property
    def dumps(self) -> Path:
        """Directory of the stacks and queue depths of stalled processes."""
        return self.path / "dumps"

    @property
    def profiles(self) -> Path:
        """Directory of traces of torch's operations at chosen steps."""
        return self.path / "profiles"

    @property
    def curve(self) -> Path:
        """Picture of the learning curve."""
        return self.path / "curve.png"

    # -- what the processes write --

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def tokens(self) -> Path:
        """Directory of the segments: append-only files of rollout tokens."""
        return self.path / "tokens"

    def segment(self, index: int) -> Path:
        return self.tokens / f"segment_{index:06d}.bin"

    @property
    def trained_tokens(self) -> Path:
        """Directory of the debugging export, one file per step."""
        return self.path / "tokens_trained"

    def metrics(self, role: str) -> Path:
        return self.path / "metrics" / f"{role}.jsonl"

    @property
    def evals(self) -> Path:
        """Directory of eval results and samples, one per version."""
        return self.path / "evals"

    @property
    def evals_end(self) -> Path:
        """Written by `sft` after its last version; the evaluating process then finishes."""
        return self.evals / "END"

    @property
    def eval_model(self) -> Path:
        """Start model of the evaluating engine of `sft`, if the model is made from scratch."""
        return self.evals / "model"

    def eval_results(self, version: int) -> Path:
        """Results of the eval of a version; written last, when the eval is complete."""
        return self.eval(version) / "results.json"

    def eval(self, version: int) -> Path:
        return self.evals / f"version_{version}"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tokenizer(self) -> Path:
        """Directory of the tokenizer built for a model made from scratch."""
        return self.path / "tokenizer"

    # -- checkpoints and weights --

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def complete_marker(self, step: int) -> Path:
        """Marker of a complete checkpoint, written last; without it the checkpoint does not count."""
        return self.checkpoint(step) / "COMPLETE"

    def complete_checkpoints(self) -> list[int]:
        """Steps whose checkpoint is complete, in ascending order."""
        return [step for step in _steps_in(self.checkpoints) if self.complete_marker(step).exists()]

    def latest_complete_checkpoint(self) -> int | None:
        """Newest step whose checkpoint is complete."""
        return max(self.complete_checkpoints(), default=None)

    @property
    def weights(self) -> Path:
        """Directory of the Hugging Face exports."""
        return self.path / "weights"

    def weights_step(self, step: int) -> Path:
        return self.weights / f"step_{step}"

    @property
    def latest_weights(self) -> Path:
        """Link to the newest export."""
        return self.weights / "latest"

    def link_latest_weights(self, step: int) -> None:
        """Point `latest` at the export of `step`, atomically."""
        with atomic_path(self.latest_weights) as link:
            link.symlink_to(self.weights_step(step).name)

    @property
    def critic(self) -> Path:
        """Directory of the critic's exports, one `step_N` per export."""
        return self.path / "critic"

    # -- wires that are files --

    @property
    def broadcasts(self) -> Path:
        return self.path / "broadcasts"

    def broadcast(self, version: int) -> Path:
        return self.broadcasts / f"version_{version}"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def rollout(self, step: int, rank: int) -> Path:
        return self.rollouts / f"step_{step}" / f"rank_{rank}.bin"


def _steps_in(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))
