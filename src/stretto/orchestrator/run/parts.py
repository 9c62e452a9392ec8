"""The parts of a run: built by main.py, shared by loop, group pipeline and batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.base.paths import RunDir
from stretto.base.watch import Watch
from stretto.config.sections.orchestrator import OrchestratorSection
from stretto.ledger.writer import Ledger
from stretto.monitors.base import Monitors
from stretto.monitors.purse import Purse
from stretto.orchestrator.batch import Cost
from stretto.orchestrator.eval.evaluator import Evaluator
from stretto.orchestrator.groups.advantages import Baselines
from stretto.orchestrator.groups.buffer import Buffer
from stretto.orchestrator.groups.hooks import BatchHooks, RolloutFunction
from stretto.orchestrator.model_costs import Spending
from stretto.orchestrator.rollout.player import Player
from stretto.orchestrator.rollout.teacher import Teachers
from stretto.orchestrator.state.run_checkpoint import Progress
from stretto.orchestrator.tasks.difficulty import Curriculum
from stretto.orchestrator.tasks.order import Cursor, TaskMix
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.transports.control import ControlServer
from stretto.transports.engine.client import EngineClient
from stretto.transports.rollouts import Sender


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
    curriculum: Curriculum = field(default_factory=Curriculum)
    baselines: Baselines = field(default_factory=Baselines)  # of environments whose estimator is rae
    hooks: BatchHooks | None = None  # the user's functions about groups and batches
    rollout_function: RolloutFunction | None = None  # the user's function that plays instead of us
    teachers: Teachers = field(default_factory=Teachers)  # of environments that are distilled
    spendings: tuple[Spending, ...] = ()  # of the frozen models that environments ask
    purse: Purse = field(default_factory=lambda: Purse(None))
    vocab_size: int | None = None  # of the tokenizer; needed by the gibberish filter
