"""`echo`: the environment's messages are learned too, by cross-entropy.

An agent that can predict what a tool or a user will say has a model of its world. The weights of messages are set
here; the renderer finds the tokens of their text; algorithms/losses.py (`ce`) adds them to the loss.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stretto.base.errors import ConfigError
from stretto.base.foreign import call, load_function
from stretto.config.sections.algorithm import EchoAlgo
from stretto.envs.base import Environment, Message, SingleTurnEnv

WARN_AFTER_MESSAGES = 64
"""Messages of an environment after which a warning is logged if none had a weighted role."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Echo:
    """The weights of an environment's messages."""

    weights: Mapping[str, float]
    """By role."""
    is_learned: Callable[[Message], bool] | None = None
    """The user's filter."""
    env: str = ""
    place: str = "orchestrator.algo"
    """Config path of the section, for messages."""
    _num_messages: Counter[str] = field(default_factory=Counter, compare=False)
    """Messages of the environment so far, by role."""

    def weight_of(self, message: Message) -> float:
        """Weight of the text of a message; 0 if it is not learned.

        Raises: ConfigError with file and line if the user's filter raises.
        """
        self._count(message["role"])
        weight, where = self.weights.get(message["role"], 0.0), f"{self.place}.filter"
        if weight and self.is_learned is not None and not call(self.is_learned, message, {}, where):
            return 0.0
        return weight

    def _count(self, role: str) -> None:
        self._num_messages[role] += 1
        is_due = self._num_messages.total() == WARN_AFTER_MESSAGES
        if is_due and not self._num_messages.keys() & self.weights.keys():
            roles, weighted = " and ".join(sorted(self._num_messages)), " and ".join(self.weights)
            text = "%s: %s has answered %d times, always as %s, and only %s has a weight: no answer is learned"
            logger.warning(text, self.place, self.env, WARN_AFTER_MESSAGES, roles, weighted)


def build_echo(algo: EchoAlgo, env: Environment, place: str = "orchestrator.algo") -> Echo:
    """Build the weights of an environment's messages; `place` is the config path of the section.

    Raises: ConfigError for a filter that does not exist, and for a single-turn environment.
    """
    if isinstance(env, SingleTurnEnv):
        raise ConfigError(
            f'{place}.type = "echo": {env.name} has one turn and never answers, so that there would be '
            'nothing to learn; use "grpo", or an environment of several turns.'
        )
    by_role = {"tool": algo.tool, "user": algo.user, "system": algo.system}
    is_learned = None if algo.filter is None else load_function(algo.filter, {}, f"{place}.filter")
    weights = {role: weight for role, weight in by_role.items() if weight is not None}
    return Echo(weights, is_learned, env.name, place)
