"""Several rewards of one reply, by name, and their weighted sum; each is a metric of its own too."""

from __future__ import annotations

import asyncio
import copy
import difflib
from collections.abc import Mapping
from typing import Any

from stretto.base.errors import ConfigError
from stretto.data.values import checked_number
from stretto.envs.rewards.builtin import async_rm, model_score, scored_by
from stretto.envs.rewards.math_reward import MathVerifier
from stretto.vime.arguments import Arguments
from stretto.vime.calls import Hook
from stretto.vime.reward_types import RM_TYPES, is_rm_type
from stretto.vime.sample import Sample

SETTING = "dataset: rewards"


class WeightedRewards:
    """The rewards of `rewards = { math = 1.0, "my_rewards:is_short" = 0.2 }`."""

    def __init__(self, weights: Mapping[str, float], args: Arguments) -> None:
        """args: what functions get.

        Raises: ConfigError for a function that does not exist or takes other arguments, and for two of one name.
        """
        self._weights, self._args = dict(weights), args
        self._verifier = MathVerifier()
        functions = [name for name in weights if name != "exact" and not is_rm_type(name) and scored_by(name) is None]
        for name in functions:
            check_name(name, SETTING)
        self._functions = {name: Hook.load(name, SETTING, 2) for name in functions}
        self._labels = {name: name.replace(":", ".").rpartition(".")[2] for name in weights}
        if len(set(self._labels.values())) < len(self._labels):
            names = ", ".join(self._labels)
            raise ConfigError(f"{SETTING}: two of {names} are called the same, and each is a metric; rename one")

    async def score(self, sample: Sample) -> tuple[float, dict[str, float]]:
        """The weighted sum of all rewards, and each without its weight, as metrics `reward_NAME`.

        Raises: EnvError for a reward that is no finite number, and for whatever a function raises.
        """
        values = await asyncio.gather(*(self._one(name, sample) for name in self._weights))
        total = sum(weight * value for weight, value in zip(self._weights.values(), values, strict=True))
        return total, {f"reward_{label}": value for label, value in zip(self._labels.values(), values, strict=True)}

    async def _one(self, name: str, sample: Sample) -> float:
        where = f"{SETTING}, {name}"
        if name == "exact":
            return float(sample.response.strip() == str(sample.label).strip())
        if (model := scored_by(name)) is not None:
            value: Any = await model_score(self._args, model, sample)
        elif (function := self._functions.get(name)) is not None:
            value = await function.call(self._args, sample)
            where = function.place
        else:
            value = await async_rm(*self._named(name, sample), verifier=self._verifier)
        if isinstance(value, dict):
            value = value.get(self._args.reward_key or "score")
        return checked_number(value, where, "its reward")

    def _named(self, name: str, sample: Sample) -> tuple[Arguments, Sample]:
        """Arguments and sample that choose this built-in reward, whatever the record's metadata choose."""
        alone = copy.copy(sample)
        alone.metadata = {key: value for key, value in sample.metadata.items() if key != "rm_type"}
        return Arguments(**vars(self._args) | {"rm_type": name}), alone


def check_name(name: str, setting: str) -> None:
    """Raises: ConfigError with the nearest built-in reward for a name that is neither one nor a function's path."""
    if name == "exact" or is_rm_type(name) or {":", "."} & set(name):
        return
    names = ("exact", *RM_TYPES)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]!r}?" if near else f"use {', '.join(names)}"
    raise ConfigError(f"{setting}: {name!r} is no reward; {meant} A function is written as `module:function`")
