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

KEPT = -1
"""The segment of samples that are kept for ever."""
_STEP = re.compile(r"step_(\d+)$")


class _Below:
    """Makes an attribute of RunDir: the path of this name below the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


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

    def of_node(self, node: int) -> RunDir:
        """The directory of another node than the first: its configs and logs. Nodes may share this directory."""
        return RunDir(self.path.with_name(f"{self.path.name}-node-{node}"))

    # -- what the launcher writes --

    configs = _Below("configs")
    """Directory of the resolved configs."""

    def config(self, name: str) -> Path:
        """A resolved config: `run`, the whole run's, and those of engines and evals."""
        return self.configs / f"{name}.json"

    given = _Below("given")
    """Directory of what `stretto.rl`, `sft` or `evaluate` was given by a script or notebook."""
    clock = _Below("clock.json")
    """The moment that chat templates get as the date of today, kept so that a resumed run renders the same."""
    plan = _Below("plan.json")
    """The process plan."""
    launch = _Below("launch.json")
    """Who runs the run: a launcher on some host, or a job."""
    nodes = _Below("nodes.json")
    """Hosts of a run on several nodes; by this file the other nodes recognise the first one's directory."""
    engines = _Below("engines")
    """Directory of wishes: engines that shall join or leave (orchestrator/run/membership.py)."""

    def engine_wish(self, name: str) -> Path:
        return self.engines / f"{name}.json"

    slurm = _Below("slurm")
    """Directory of the Slurm job: its script, its config and its log."""
    finish_marker = _Below("slurm/finish")
    """Exists once a Slurm job was asked to finish its step."""
    ray = _Below("ray")
    """Directory of a run on a Ray cluster: its config, its state, and what the nodes print."""
    lock = _Below("run.lock")
    """Locked (flock) by the launcher while the run is live.

    Processes that were started alone hold a shared lock on it.
    """

    def part_lock(self, role: str) -> Path:
        """Locked by an orchestrator or trainer that was started alone."""
        return self.path / f"run.{role}.lock"

    secret = _Below("secret")
    """The secret by which the run's processes recognise each other; mode 0600 (base/secret.py)."""
    orchestrator = _Below("orchestrator.json")
    """Where an orchestrator that was started alone listens (transports/meeting.py); removed when it ends."""
    logs = _Below("logs")

    def log(self, role: str) -> Path:
        """Standard output and error of a process."""
        return self.logs / f"{role}.log"

    dumps = _Below("dumps")
    """Directory of the stacks and queue depths of stalled processes."""
    episodes = _Below("episodes")
    """Directory of what environments keep of their episodes, for rollouts that are continued."""
    replies = _Below("replies")
    """Directory of the replies of frozen models, one file per model, for a run that is continued."""
    profiles = _Below("profiles")
    """Directory of traces of torch's operations at chosen steps."""
    curve = _Below("curve.png")
    """Picture of the learning curve."""

    # -- what the processes write --

    ledger = _Below("ledger.sqlite")
    tokens = _Below("tokens")
    """Directory of the segments: append-only files of rollout tokens."""

    def segment(self, index: int) -> Path:
        return self.tokens / ("kept.bin" if index == KEPT else f"segment_{index:06d}.bin")

    trained_tokens = _Below("tokens_trained")
    """Directory of what the trainer computed per trained token, one file per step, and of the debugging export."""

    def metrics(self, role: str) -> Path:
        return self.path / "metrics" / f"{role}.jsonl"

    evals = _Below("evals")
    """Directory of eval results and samples, one per version."""
    evals_end = _Below("evals/END")
    """Written by `sft` after its last version; the evaluating process then finishes."""
    eval_model = _Below("evals/model")
    """Start model of the evaluating engine of `sft`, if the model is made from scratch."""

    def eval_results(self, version: int) -> Path:
        """Results of the eval of a version; written last, when the eval is complete."""
        return self.eval(version) / "results.json"

    def eval(self, version: int) -> Path:
        return self.evals / f"version_{version}"

    summary = _Below("summary.json")
    tokenizer = _Below("tokenizer")
    """Directory of the tokenizer built for a model made from scratch."""

    # -- checkpoints and weights --

    checkpoints = _Below("checkpoints")

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def complete_marker(self, step: int) -> Path:
        """Marker of a complete checkpoint, written last; without it the checkpoint does not count."""
        return self.checkpoint(step) / "COMPLETE"

    checkpoints_of = _Below("checkpoints/of_run")
    """Behind a link: which run directory the checkpoints belong to, as text; a copy of that has the same link."""
    undone = _Below("checkpoints/undone")
    """Directory of complete checkpoints after a step to which the run has gone back, until it has made another one."""

    def complete_checkpoints(self) -> list[int]:
        """Steps whose checkpoint is complete, in ascending order."""
        return [step for step in steps_in(self.checkpoints) if self.complete_marker(step).exists()]

    def latest_complete_checkpoint(self) -> int | None:
        """Newest step whose checkpoint is complete."""
        return max(self.complete_checkpoints(), default=None)

    weights = _Below("weights")
    """Directory of the Hugging Face exports."""

    def weights_step(self, step: int) -> Path:
        return self.weights / f"step_{step}"

    best_weights = _Below("weights/best")
    latest_weights = _Below("weights/latest")
    """Link to the newest export."""

    def latest_export(self) -> int:
        """The step that `latest` points to; 0 if it is no link."""
        match = _STEP.fullmatch(os.readlink(self.latest_weights)) if self.latest_weights.is_symlink() else None
        return int(match[1]) if match else 0

    def undone_export(self, step: int) -> Path:
        """Marker in an export of a step that was taken back; the next export of that step replaces both."""
        return self.weights_step(step) / "UNDONE"

    def link_latest_weights(self, step: int) -> None:
        """Point `latest` at the export of `step`, atomically."""
        with atomic_path(self.latest_weights) as link:
            link.symlink_to(self.weights_step(step).name)

    reference_logprobs = _Below("reference_logprobs.npz")
    val_reference_logprobs = _Below("val_reference_logprobs.npz")
    """What the start of a run on pairs says of them, and of those it validates on."""
    critic = _Below("critic")
    """Directory of the critic's exports, one `step_N` per export."""

    # -- wires that are files --

    broadcasts = _Below("broadcasts")
    rollouts = _Below("rollouts")

    def rollout(self, step: int, rank: int) -> Path:
        return self.rollouts / f"step_{step}" / f"rank_{rank}.bin"


def steps_in(directory: Path) -> list[int]:
    """The steps of the entries `step_N` of a directory, in ascending order; none if there is no directory."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))
