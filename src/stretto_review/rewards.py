"""Rewards that are named on a command line, as `rl` and `stretto.rl` take them, and what they are given.

    math, exact, f1, ...                      a built-in reward: a reply against the label of its record
    my:fn                                     def fn(args, sample) or fn(args, samples), also async
                                              def fn(completion, answer), def fn(prompts, completions, **columns)
    my:fn=0.5                                 with a weight; several are added up
    env                                       what the environment of the run says now (replies of one turn)

Each becomes one function of the replies of a group. Each of several rewards is a component of the score, and so is each
further number of a dictionary that a function returns.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, SupportsFloat

from stretto.base.errors import ConfigError, EnvError
from stretto.base.foreign import guarded, load_object
from stretto.data.values import checked_number
from stretto.envs.base import RunInfo, SingleTurnEnv, checked_score, load_environment
from stretto.envs.result import listed_rewards
from stretto.envs.rewards.builtin import async_rm
from stretto.records.rollout import Task
from stretto.vime.arguments import Arguments
from stretto.vime.calls import REWARD_FORM, Hook
from stretto.vime.reward_types import RM_TYPES, is_rm_type
from stretto.vime.sample import Sample
from stretto_python.given.records import LABELS
from stretto_python.given.rewards import SUM, is_for_group, is_hook, rewards_of
from stretto_python.given.rewards import check as check_arguments

ENVIRONMENT = "env"
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """What one reply is worth, and of what that is made."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """A reward by its name: a function of one reply, or of all replies to a prompt."""

    name: str
    weight: float
    is_for_group: bool
    call: Callable[[Task, list[Sample]], Awaitable[list[Score]]]


def split_weight(text: str) -> tuple[str, float]:
    """`my:fn=0.5` as a name and a weight, 1 if there is none. Raises: ConfigError for another weight than a number."""
    name, found, weight = text.partition("=")
    if not found:
        return name, 1.0
    try:
        return name, checked_number(float(weight), "--reward", "the weight")
    except (ValueError, EnvError):
        raise ConfigError(f"--reward {text}: {weight!r} is no weight; write a number, as in {name}=0.5") from None


def load_rewards(texts: Sequence[str], config: Config, columns: Sequence[str]) -> list[Reward]:
    """The rewards of these words. columns: what records have for functions that name columns.

    Raises: ConfigError for one that does not exist, or asks for what the records do not have.
    """
    found = [_load(*split_weight(text), config, columns) for text in texts]
    names = [each.name for each in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--reward: two are called {twice[0]}, and each is a component; rename one")
    return found


def _load(path: str, weight: float, config: Config, columns: Sequence[str]) -> Reward:
    if path == ENVIRONMENT:
        return Reward(path, weight, False, _by_environment(config))
    args = _arguments(config, path)
    if path == "exact" or is_rm_type(path):
        return Reward(path, weight, False, _by_name(path, args))
    if not {":", "."} & set(path):
        known = (ENVIRONMENT, "exact", *RM_TYPES)
        near = difflib.get_close_matches(path, known, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)}."
        raise ConfigError(f"--reward {path}: there is no such reward; {meant} A function is `module:function`")
    function = load_object(path, "--reward")
    if not callable(function):
        raise ConfigError(f"--reward {path} is a {type(function).__name__}, not a function")
    of_group = is_for_group(function)
    name = path.replace(":", ".").rpartition(".")[2]
    if is_hook(function):
        hook = Hook.load(path, "--reward", 2, form=REWARD_FORM)
    else:
        check_arguments(function, columns, f"--reward {path}")
        hook = Hook(rewards_of({name: function}, [1.0], columns), f"--reward {path}")
    return Reward(name, weight, of_group, _by_function(hook, args, of_group))


def _arguments(config: Config, path: str) -> Arguments:
    """`args` of functions: what a run's configuration says without its processes."""
    section, model = config.get("orchestrator") or {}, config.get("model") or {}
    given: dict[str, Any] = {}
    for env in section.get("env") or ():
        given |= (env.get("args") or {}).get("hook_args") or {}
    known = {
        "hf_checkpoint": model.get("name"),
        "n_samples_per_prompt": section.get("group_size"),
        "seed": config.get("seed"),
        "rollout_max_context_len": config.get("seq_len"),
        "rm_type": path if is_rm_type(path) else None,
        "rm_url": None,
        "custom_rm_path": None,
        "reward_key": next((key for env in section.get("env") or () if (key := env["args"].get("reward_key"))), SUM),
    }
    return Arguments(**known | given)


def _by_name(name: str, args: Arguments) -> Callable[[Task, list[Sample]], Awaitable[list[Score]]]:
    async def call(task: Task, samples: list[Sample]) -> list[Score]:
        if name == "exact":
            return [Score(float(each.response.strip() == str(each.label).strip())) for each in samples]
        for each in samples:
            each.metadata = {key: value for key, value in each.metadata.items() if key != "rm_type"}
        return [_score_of(await async_rm(args, each), args, name) for each in samples]

    return call


def _by_function(hook: Hook, args: Arguments, of_group: bool) -> Callable[[Task, list[Sample]], Awaitable[list[Score]]]:
    async def call(task: Task, samples: list[Sample]) -> list[Score]:
        if not of_group:
            values = [await hook.call(args, each) for each in samples]
        else:
            values = listed_rewards(await hook.call(args, samples), len(samples), hook.where)
        return [_score_of(value, args, hook.place) for value in values]

    return call


def _score_of(value: Any, args: Arguments, where: str) -> Score:
    """A returned value as a score; further numbers of a dictionary are its components."""
    if not isinstance(value, dict):
        return Score(checked_number(value, where, "its reward"))
    key = next((name for name in (args.reward_key, SUM) if name in value), None)
    if key is None:
        raise EnvError(f"{where} returned a dictionary with the keys {sorted(value)}; the reward is its entry `{SUM}`")
    parts = {str(name): float(each) for name, each in value.items() if name != key and isinstance(each, SupportsFloat)}
    return Score(checked_number(value[key], where, "its reward"), parts)


def _by_environment(config: Config) -> Callable[[Task, list[Sample]], Awaitable[list[Score]]]:
    """The environments of the run, built anew, for replies of one turn."""
    built: dict[str, SingleTurnEnv] = {}
    for section in (config.get("orchestrator") or {}).get("env") or ():
        name = section.get("name") or section["id"]
        if asked := sorted(set(config.get("models") or ()) & _models_of(section)):
            raise ConfigError(
                f"--reward env: environment {name} asks the model {asked[0]} ([models.{asked[0]}]), which only a run "
                "starts; give a function of a reply"
            )
        env = load_environment(
            section["id"], section.get("args"), section.get("name"), RunInfo(seed=config.get("seed", 0))
        )
        if not isinstance(env, SingleTurnEnv):
            raise ConfigError(f"--reward env: environment {name} has more than one turn; give a function of a reply")
        built[env.name] = built[name] = env

    async def call(task: Task, samples: list[Sample]) -> list[Score]:
        env = built.get(task.env)
        if env is None:
            raise EnvError(f"the configuration of the run has no environment {task.env}; give a function of a reply")
        where = f"environment {task.env}: score"
        with guarded(EnvError, where):
            return [Score((await checked_score(env.score(task, each.response), where)).reward) for each in samples]

    return call


def _models_of(section: Mapping[str, Any]) -> set[str]:
    """The models that an environment is given by name, or whose score is its reward."""
    args = section.get("args") or {}
    rewards = [args.get("reward"), *(args.get("rewards") or {})]
    named = {each.removeprefix("models.") for each in rewards if isinstance(each, str) and each.startswith("models.")}
    return named | set((section.get("models") or {}).values())


def columns_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a task has for functions that name columns: its record's, and the label under each usual name."""
    columns = {str(name): value for name, value in data.items() if name not in ("metadata", "tools")}
    columns |= dict(data.get("metadata") or {})
    if data.get("label") is not None:
        columns = dict.fromkeys(LABELS, data["label"]) | columns
    return columns


async def judge(
    rewards: Sequence[Reward], task: Task, samples: list[Sample], *, limit_s: float
) -> list[Score | EnvError]:
    """The weighted sum of these rewards for each of these replies, or what a function raised.

    limit_s: for one reply, or for all of a group if the function takes them all.
    """
    found: list[list[Score | EnvError]] = []
    for reward in rewards:
        calls = [samples] if reward.is_for_group else [[sample] for sample in samples]
        answers = await asyncio.gather(*(_within(reward, task, each, limit_s) for each in calls))
        found.append([answer for each in answers for answer in each])
    return [_sum(rewards, each) for each in zip(*found, strict=True)]


async def _within(reward: Reward, task: Task, samples: list[Sample], limit_s: float) -> list[Score | EnvError]:
    began = time.monotonic()  # noqa: F841  # began_at reads it
    try:
        async with asyncio.timeout(limit_s):
            return list(await reward.call(task, samples))
    except TimeoutError:
        failed = EnvError(f"{reward.name} took longer than {limit_s:g} s (--timeout)")
    except EnvError as error:
        failed = error
    return [failed] * len(samples)


def began_at(frame: FrameType | None) -> float | None:
    """When the call of a reward began that this frame belongs to; None if it belongs to none."""
    while frame is not None and frame.f_code is not _within.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("began")


def _sum(rewards: Sequence[Reward], scores: Sequence[Score | EnvError]) -> Score | EnvError:
    parts: dict[str, float] = {}
    value = 0.0
    for reward, score in zip(rewards, scores, strict=True):
        if isinstance(score, EnvError):
            return score
        value += reward.weight * score.value
        if len(rewards) > 1:
            parts[reward.name] = reward.weight * score.value
        parts |= {name: reward.weight * each for name, each in score.parts.items()}
    return Score(value, parts)
