"""[trainer.hooks]: where a training step asks a user's functions; an add-on loads and calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from stretto import addons
from stretto.algorithms.losses import UserFunctions
from stretto.config.sections.trainer import TrainerHooksSection
from stretto.records.sample import MicroBatch

if TYPE_CHECKING:
    from stretto.base.paths import RunDir

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Schedule:
    """What a function gets as the scheduler of a network that has none."""

    lr: float


class TrainerHooks:
    """A step without functions; an add-on's subclass has some."""

    needs_logprobs = False
    """Whether a function needs the log-probabilities of the policy before the step."""
    in_loss = UserFunctions()
    """The functions that are called in every training pass."""

    def __bool__(self) -> bool:
        """Whether a function is called in a step."""
        return False

    def provide(self, build: Callable[[], M]) -> M:
        """The model that is trained, made of that of `build`, which several ranks may have on the meta device."""
        return build()

    def call(self, name: str, *arguments: Any) -> None:
        """Call the function that the section names so, if it names one. Raises: ConfigError for its errors."""

    def process(self, rollout_id: int, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro batches of step rollout_id + 1 after functions that change data. Raises: ConfigError, as `call`."""
        return list(micro_batches)


def load_hooks(section: TrainerHooksSection, run_dir: RunDir | None = None) -> TrainerHooks:
    """The functions that a section names.

    Raises: ConfigError for one that does not exist or takes other arguments, and without the add-on that calls them.
    """
    if section.is_empty:
        return TrainerHooks()
    hooks: TrainerHooks = addons.load("stretto.hooks", "trainer", "[trainer.hooks]")(section, run_dir)
    return hooks
