"""Models beside the policy, as a run meets them: environments ask them, and they score rollouts or play them.

An add-on has them: `run` of the group `stretto.beside`. A run whose config names none has `Beside` itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from stretto import addons
from stretto.chat.render import Renderer
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.envs.base import Environment
from stretto.envs.models import NO_MODELS, ChatModel
from stretto.orchestrator.rollout.play import GenerationClient
from stretto.records.rollout import Group

GROUP = "stretto.beside"
EVENT = "models"
"""The event of the ledger with what was asked of each, over all starts of a run: `Spending.counts`."""


class Spending(Protocol):
    """What a model was asked in a run, and what that has cost."""

    name: str
    counts: Counter[str]
    stop: Callable[[str], None] | None
    """Ends the run, which is told why, when the model may cost no more."""

    @property
    def cost(self) -> float:
        """In the currency of its prices."""

    def gauges(self) -> dict[str, float]:
        """The metrics of the model."""


class Beside:
    """No models beside the policy; the class of an add-on overrides what it has."""

    models: Mapping[str, ChatModel] = NO_MODELS
    """Those that environments ask, by name."""
    spendings: Sequence[Spending] = ()

    def begin(self, engines: GenerationClient, envs: Sequence[Environment], renderer: Renderer) -> None:
        """Build what needs the policy's engines and the environments, and go on from the counts of earlier starts.

        Raises: ConfigError for an environment that lacks what it should be shown, or if a model may cost no more.
        """

    async def wait_ready(self) -> None:
        """Wait until all of them answer.

        Raises: EngineError naming the one that does not.
        """

    def player_of(self, env: str) -> GenerationClient | None:
        """What plays an environment in place of the policy; None: the policy does."""
        return None

    def annotates(self, env: str) -> bool:
        """Whether groups of an environment are handed to `annotate` after they were played."""
        return False

    async def annotate(self, group: Group) -> Group:
        """The group with what a model says of its tokens, or marked as played by one."""
        return group


def open_beside(cfg: OrchestratorConfig | EvalConfig, stack: AsyncExitStack) -> Beside:
    """The models beside the policy that a config names; `stack` closes their connections.

    Raises: ConfigError if no add-on has them, or for an API key whose environment variable is not set.
    """
    return addons.load(GROUP, "run", cfg.beside).open_beside(cfg, stack) if cfg.beside else Beside()
