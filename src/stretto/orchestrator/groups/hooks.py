"""[orchestrator.hooks]: where the loop asks a user's functions about groups, batches and evals; an add-on calls them.

Their methods raise EnvError for whatever a function raises, and for what it returns that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stretto import addons
from stretto.chat.render import Renderer
from stretto.config.sections.orchestrator import EvalSection, OrchestratorSection
from stretto.orchestrator.eval_scores import EvalScore
from stretto.orchestrator.groups.buffer import Buffer, Slot
from stretto.records.rollout import Group, Task
from stretto.records.sample import TrainSample

GROUP, SETTING = "stretto.hooks", "[orchestrator.hooks]"
Logged = tuple[dict[str, float], bool]
"""A function's metrics, and whether they replace ours."""
Played = Mapping[str, Sequence[Group] | Mapping[str, Any]]
"""An eval by data set: its groups, or what the user's eval function returned."""


class Answer(Protocol):
    """Whether a played group is trained."""

    keep: bool
    reason: str | None
    keep_when_insufficient: bool
    """A group that is not kept still fills a batch that would be too small."""


class BatchHooks(Protocol):
    """Functions that decide about groups and batches."""

    @property
    def selects_groups(self) -> bool:
        """Whether `select_groups` is to be asked."""

    def filter_group(self, group: Group) -> Answer: ...

    def keep_finished(self, group: Group) -> None:
        """A group is finished; `transform_samples` of the next batch has seen it."""

    async def select_groups(self, step: int, groups: Sequence[Group], num_groups: int) -> list[int]:
        """The draw numbers of the num_groups groups that are the batch."""

    async def transform_samples(
        self, step: int, groups: Sequence[Group], train: list[TrainSample]
    ) -> list[TrainSample]: ...

    async def log(self, step: int, groups: Sequence[Group]) -> Logged: ...

    async def log_eval(self, version: int, played: Played) -> Logged: ...


class Drawing(Protocol):
    """What a rollout function may ask of the pipeline whose groups it plays."""

    buffer: Buffer

    def draw(self, *, is_extra: bool = False, task: Task | None = None, num_members: int | None = None) -> Slot: ...

    def hand_over(self, slot: Slot, group: Group) -> None: ...


class RolloutFunction(Protocol):
    """A function that plays whole batches, or whole evals, instead of the environments."""

    metrics: dict[str, float]
    """Those of its latest call."""

    async def play_groups(self, pipeline: Drawing, start: int) -> None:
        """Play batches until the buffer is closed; `start` is the last trained step."""

    async def evaluate(
        self, version: int, tasks: Sequence[Task], section: EvalSection, path_of: Callable[[str], Path] | None
    ) -> tuple[list[EvalScore], Played]:
        """Scores and results of an eval of these held-out tasks.

        path_of: from a data set to the file of its samples, if they are written.
        """


def load_batch_hooks(cfg: OrchestratorSection, renderer: Renderer) -> BatchHooks | None:
    """The functions of the section; None if it names none.

    Raises: ConfigError for a function that does not exist or takes other arguments, and without the add-on.
    """
    if cfg.hooks.is_empty:
        return None
    hooks: BatchHooks = addons.load(GROUP, "batches", SETTING)(cfg, renderer)
    return hooks


def load_rollout_function(cfg: OrchestratorSection, key: str | None, renderer: Renderer) -> RolloutFunction | None:
    """The function at a key of the section; None if there is none. Raises: ConfigError, as `load_batch_hooks`."""
    if key is None or getattr(cfg.hooks, key) is None:
        return None
    function: RolloutFunction = addons.load(GROUP, "rollouts", SETTING)(cfg, key, renderer)
    return function
