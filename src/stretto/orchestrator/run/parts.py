"""The parts of a run: built by main.py, shared by loop, group pipeline and batches. What an add-on adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stretto import addons
from stretto.base.paths import RunDir
from stretto.base.watch import Watch
from stretto.config.sections.orchestrator import ADAPTIVE, FixedConcurrency, OrchestratorSection
from stretto.ledger.writer import Ledger
from stretto.monitors.base import Monitors
from stretto.monitors.monitor import TableRow, Values
from stretto.monitors.purse import Purse
from stretto.orchestrator.batch import Cost
from stretto.orchestrator.beside import Beside
from stretto.orchestrator.eval.evaluator import Evaluator
from stretto.orchestrator.groups.advantages import Baselines
from stretto.orchestrator.groups.buffer import Buffer
from stretto.orchestrator.groups.hooks import BatchHooks, RolloutFunction
from stretto.orchestrator.rollout.player import Player
from stretto.orchestrator.state.run_checkpoint import Progress
from stretto.orchestrator.tasks.order import Curriculum, Cursor, TaskMix
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.records.control import StepDone
from stretto.transports.control import ControlServer
from stretto.transports.engine.client import EngineClient
from stretto.transports.rollouts import Sender

GROUP = "stretto.orchestrator"


@dataclass(frozen=True, eq=False)
class RunParts:
    """One incarnation of a run, from step `progress.step` on."""

    cfg: OrchestratorSection
    run_dir: RunDir
    progress: Progress
    engines: EngineClient
    control: ControlServer
    sender: Sender
    ledger: Ledger
    monitors: Monitors
    watch: Watch
    mix: TaskMix
    cursor: Cursor
    player: Player
    buffer: Buffer
    versions: VersionLoader
    cost: Cost
    evaluator: Evaluator | None = None
    curriculum: Curriculum | None = None  # of environments whose tasks are in pools
    baselines: Baselines = field(default_factory=Baselines)  # of environments whose estimator is rae
    hooks: BatchHooks | None = None  # the user's functions about groups and batches
    rollout_function: RolloutFunction | None = None  # the user's function that plays instead of us
    beside: Beside = field(default_factory=Beside)  # models that environments ask, or that score or play rollouts
    purse: Purse = field(default_factory=lambda: Purse(None))
    vocab_size: int | None = None  # of the tokenizer; needed by the gibberish filter


@dataclass
class StepRow:
    """The row of metrics of a step that is shipped and not trained yet."""

    metrics: dict[str, float]
    num_rollouts: int
    num_tokens: int  # sampled
    num_batch_tokens: int = 0  # prompts included
    num_played_tokens: int = 0  # sampled in rollouts that have ended since the batch before, trained or not
    idle_s: float = 0.0  # time without a running rollout since the batch before
    waited_s: float = 0.0  # time that the trainer had no batch before this one
    # For trackers, at some steps only: some rollouts, and values for histograms.
    examples: Sequence[TableRow] = ()
    distributions: Mapping[str, Values] = field(default_factory=dict)


class Measured(Protocol):
    """A part of a run that has metrics of its own."""

    def gauges(self) -> dict[str, float]:
        """What is set now."""


class Steering(Measured, Protocol):
    """Sets how far generation is ahead, and how often engines get new weights, while a run goes on."""

    def on_loaded(self, version: int) -> None:
        """Every engine has loaded a version."""

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """A rank has told its own metrics of a step."""

    def on_trained(self, done: StepDone, row: StepRow) -> None:
        """A step is trained."""


class Limit(Measured, Protocol):
    """Limits the groups that run at once by the engines' load."""

    async def follow(self) -> None:
        """Adjust the limit until it is cancelled."""


class Diagnosis(Protocol):
    """Says what goes wrong with learning; it changes nothing."""

    def add(self, row: Mapping[str, float]) -> list[str]:
        """Add the row of a step; the new warnings."""

    def add_eval(self, means: Mapping[str, float]) -> list[str]:
        """Add the held-out rewards of an eval, by environment; the new warnings."""

    def verdict(self) -> str | None:
        """One line about whether the run learned; None after too few steps."""


def load_steering() -> Any:
    """The add-on's module: `RunSteering(run)` is a `Steering`, `setting_after(cfg, step)` where a run goes on.

    Raises: ConfigError if it is not installed.
    """
    return addons.load(GROUP, "steering", "[orchestrator.steering]")


def build_limit(run: RunParts) -> Limit | None:
    """The add-on's limit; None if concurrency is fixed.

    Raises: ConfigError if it is not installed.
    """
    if isinstance(run.cfg.concurrency, FixedConcurrency):
        return None
    limit: Limit = addons.load(GROUP, "concurrency", ADAPTIVE)(run)
    return limit


def build_diagnosis(run: RunParts) -> Diagnosis | None:
    """What an add-on makes of the run's steps; None if none is installed that does."""
    if "diagnosis" not in addons.offers(GROUP):
        return None
    build = addons.load(GROUP, "diagnosis", "a run")
    diagnosis: Diagnosis = build(run.cfg.train.sampling.max_completion_tokens, run.progress.step)
    return diagnosis
