"""Launchers: what hands a command to the machines of a cluster. An add-on offers one per section of the config.

RUN/launch.json says in `by` which launcher started a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto import addons
from stretto.base.paths import RunDir
from stretto.config.root import InferenceConfig, RLConfig, SFTConfig

GROUP = "stretto.launchers"
JobConfig = RLConfig | SFTConfig | InferenceConfig
"""A command that a launcher can hand on."""
SECTIONS = ("slurm", "ray")
"""Sections of a config that each name the launcher which runs the command."""
FINISHES = "finishes its step, saves a checkpoint and ends; --now ends it at once"


class Launcher:
    """A launcher imports what it needs when it is asked: this class and its methods are cheap to load."""

    def main(self, cfg: JobConfig, *, check: Callable[[], None] = lambda: None) -> int:
        """Run the command on the cluster, or submit it; the exit status. check: what else may refuse it."""
        raise NotImplementedError

    def screen(self, cfg: JobConfig) -> str:
        """What a dry run shows of the job."""
        raise NotImplementedError

    def status(self, run: RunDir, record: Mapping[str, Any], state: str) -> dict[str, str]:
        """Rows of `stretto status`. record: RUN/launch.json; state: how far the run's files say it is."""
        raise NotImplementedError

    def stop(self, run: RunDir, record: Mapping[str, Any], *, now: bool) -> str:
        """Let a run finish its step, or end it now; what to tell the user."""
        raise NotImplementedError

    def job_hosts(self) -> list[str] | None:
        """The hosts of the job that this process is part of; None outside of one."""
        return None

    def end_other_nodes(self) -> None:
        """On the first of several nodes, whose run has ended: let the launchers of the others end."""

    def requeue(self) -> None:
        """On the first of several nodes, which has lost another one: queue the job again, if this is a job."""


def launcher_of(cfg: JobConfig) -> Launcher | None:
    """The launcher that a config names; None if it runs here.

    Raises: ConfigError if it is not installed.
    """
    name = next((name for name in SECTIONS if getattr(cfg, name, None) is not None), None)
    return None if name is None else addons.load(GROUP, name, f"[{name}]")


def launcher_of_run(run: RunDir, record: Mapping[str, Any]) -> Launcher | None:
    """The launcher that started a run; None for a launcher on some host.

    Raises: ConfigError if it is not installed.
    """
    name = record.get("by")
    return addons.load(GROUP, name, f"{run}, which `{name}` runs,") if name in SECTIONS else None


def all_launchers() -> list[Launcher]:
    """Those that are installed."""
    return list(addons.load_all(GROUP).values())
