"""`echo`: what the environment answers is learned too, by cross-entropy, beside the policy's own replies.

An agent that foresees what a tool or a user will say has a model of its world. Which messages count, and how
much, is decided here; which tokens are their text, by the renderer; where they are added to the loss, in
algorithms/losses.py (`ce`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.base.errors import ConfigError
from stretto.base.imports import call, load_function
from stretto.config.algorithm import EchoAlgo
from stretto.envs.base import Environment, Message, SingleTurnEnv

FILTER_PATH = "orchestrator.algo.filter"


@dataclass(frozen=True)
class Echo:
    """Weights of an environment's messages."""

    weights: Mapping[str, float]
    """By role."""
    is_wanted: Callable[[Message], bool] | None = None

    def weight_of(self, message: Message) -> float:
        """Weight of the text of a message; 0: it is not learned.

        Raises: ConfigError with file and line when the user's filter raises.
        """
        weight = self.weights.get(message["role"], 0.0)
        if weight and self.is_wanted is not None and not call(self.is_wanted, message, {}, FILTER_PATH):
            return 0.0
        return weight


def build_echo(algo: EchoAlgo, env: Environment) -> Echo:
    """What of an environment's answers is learned.

    Raises: ConfigError for a filter that is not there, and an environment that never answers.
    """
    if isinstance(env, SingleTurnEnv):
        raise ConfigError(
            f'[orchestrator.algo] type = "echo": {env.name} has one turn and never answers, so that there would be '
            'nothing to learn; use "grpo", or an environment of several turns.'
        )
    weights = {"tool": algo.tool, "user": algo.user, "system": algo.system}
    is_wanted = None if algo.filter is None else load_function(algo.filter, {}, FILTER_PATH)
    return Echo({role: weight for role, weight in weights.items() if weight is not None}, is_wanted)
