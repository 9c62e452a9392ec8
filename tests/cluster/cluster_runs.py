"""Runs that take a cluster's machines: their configs, the commands about them, and what they leave behind.

on_slurm/ and on_ray/ have a class each over ClusterRun, and the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from runs import MOVING, merged, toml, untrained_model

STRETTO = (sys.executable, "-m", "stretto")
ENDLESS = 1_000_000
"""Steps: such a run is stopped."""


class ClusterRun:
    """A run of `rl` or `sft` whose config has a section for what hands out machines."""

    section: ClassVar[str]

    def __init__(self, directory: Path, verb: str, settings: dict[str, Any], own: dict[str, Any]) -> None:
        """own: keys of the section."""
        self.directory, self.verb = directory, verb
        self.dir = RunDir(directory / "run")
        self.lead = "orchestrator" if verb == "rl" else verb
        (directory / "run.toml").write_text(toml(settings | {self.section: own}))

    # -- what a subclass knows --

    def stretto(self, *words: str) -> str:
        """Run a command of ours where a user would; its output.

        Raises: AssertionError if it fails.
        """
        raise NotImplementedError

    def said(self) -> str:
        """What the run has written for its user so far."""
        raise NotImplementedError

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that must come before the run ends."""
        raise NotImplementedError

    # -- how far it is --

    def steps(self) -> list[int]:
        return [row["step"] for row in read_metrics(self.dir.metrics(self.lead)) if row["step"] > 0]

    def saved(self) -> int:
        return self.dir.latest_complete_checkpoint() or 0

    def until_saved(self, step: int) -> None:
        self.until(lambda: self.saved() >= step, f"a checkpoint of step {step}")

    def check(self, steps: int) -> None:
        """All of these steps were trained, and `rl` has moved the weights in each, and trained no rollout twice.

        The metrics of `sft` keep the rows of steps that it has trained again.
        """
        found = self.steps() if self.verb == "rl" else sorted({*self.steps()})
        assert found == [*range(1, steps + 1)], self.said()
        if self.verb == "rl":
            assert audit(self.dir) == []
            assert not [row for row in read_metrics(self.dir.metrics("trainer")) if row.get("optim/skipped")]


def rl_settings(directory: Path, max_steps: int, *, num_replicas: int = 2) -> dict[str, Any]:
    """Orchestrator and trainer on one node, and engines; begins in seconds, milliseconds per step."""
    settings = {
        "output_dir": str(directory),
        "run": {"name": "run"},
        "max_steps": max_steps,
        "seq_len": 256,
        "model": {"name": str(untrained_model(directory / "model"))},
        "ckpt": {"interval": 2},
        "deployment": {"type": "multi_node", "num_infer_replicas": num_replicas, "gpus_per_node": 0},
        "inference": {"device": "cpu"},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
    }
    return merged(settings, MOVING)


def sft_settings(directory: Path, max_steps: int) -> dict[str, Any]:
    """One rank on the CPU of each of two nodes."""
    return {
        "output_dir": str(directory),
        "run": {"name": "run"},
        "max_steps": max_steps,
        "batch_size": 8,
        "seq_len": 128,
        "num_threads": 1,
        "model": {"scratch": {"hidden_size": 16, "num_layers": 1}},
        "data": {"type": "environment", "id": "sort-letters", "num_rows": 64},
        "ckpt": {"interval": 20},
        "deployment": {"type": "multi_node", "num_train_nodes": 2, "gpus_per_node": 0},
    }
