"""`echo`: what the environment answers is learned too, by cross-entropy, beside the policy's own replies.

An agent that foresees what a tool or a user will say has a model of its world. Which messages count, and how
much, is decided here; which tokens are their text, by the renderer; where they are added to the loss, in
algorithms/losses.py (`ce`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stretto.base.errors import ConfigError
from stretto.base.imports import call, load_function
from stretto.config.algorithm import EchoAlgo
from stretto.envs.base import Environment, Message, SingleTurnEnv

ENOUGH = 64
"""Answers of an environment without one that counts, after which that is said."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Echo:
    """Weights of an environment's messages."""

    weights: Mapping[str, float]
    """By role."""
    is_wanted: Callable[[Message], bool] | None = None
    env: str = ""
    place: str = "orchestrator.algo"
    """Where the section stands, for messages."""
    _answers: Counter[str] = field(default_factory=Counter, compare=False)
    """Messages of the environment so far, by role."""

    def weight_of(self, message: Message) -> float:
        """Weight of the text of a message; 0: it is not learned.

        Raises: ConfigError with file and line when the user's filter raises.
        """
        self._count(message["role"])
        weight, where = self.weights.get(message["role"], 0.0), f"{self.place}.filter"
        if weight and self.is_wanted is not None and not call(self.is_wanted, message, {}, where):
            return 0.0
        return weight

    def _count(self, role: str) -> None:
        self._answers[role] += 1
        if self._answers.total() == ENOUGH and not self._answers.keys() & self.weights.keys():
            answered, weighted = " and ".join(sorted(self._answers)), " and ".join(self.weights)
            text = "%s: %s has answered %d times, always as %s, and only %s has a weight: nothing of it is learned"
            logger.warning(text, self.place, self.env, ENOUGH, answered, weighted)


def build_echo(algo: EchoAlgo, env: Environment, place: str = "orchestrator.algo") -> Echo:
    """What of an environment's answers is learned; `place` is where the section stands.

    Raises: ConfigError for a filter that is not there, and an environment that never answers.
    """
    if isinstance(env, SingleTurnEnv):
        raise ConfigError(
            f'{place}.type = "echo": {env.name} has one turn and never answers, so that there would be '
            'nothing to learn; use "grpo", or an environment of several turns.'
        )
    weights = {"tool": algo.tool, "user": algo.user, "system": algo.system}
    is_wanted = None if algo.filter is None else load_function(algo.filter, {}, f"{place}.filter")
    weights = {role: weight for role, weight in weights.items() if weight is not None}
    return Echo(weights, is_wanted, env.name, place)
