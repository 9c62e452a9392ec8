"""Checks of what an environment or a hook returned: rewards and metrics must be finite numbers.

A wrong value fails the rollout it belongs to. All code behind this check (credit, ledger, metrics, batches) may
rely on rewards and metrics being finite Python floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from stretto.base.errors import EnvError
from stretto.data.values import checked_number, describe_value, with_whole_text

MAX_REWARD = 1e18
"""Largest absolute reward: its square, as in a value loss or a gradient norm, still fits into a float32."""
LONGEST_STATE = 64
"""Characters of a state that are kept; a longer one is known by its digest."""

T = TypeVar("T")


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one episode, as its environment gives it."""

    reward: float
    agent_rewards: dict[str, float] = {}  # by agent, if several agents have different rewards
    metrics: dict[str, float] = {}
    is_truncated: bool = False  # a limit of the environment (turns, time) ended it; the reward is valid
    is_timeout: bool = False  # a time limit of the environment ended it: `timeout_is` says what that means
    branch_rewards: tuple[float, ...] = ()  # of the sequences of `ctx.keep`, if each has its own
    # Credit per turn: () or one entry per reply, in the order in which they were requested (`Reply.turn`).
    turn_rewards: tuple[float, ...] = ()  # beside `reward`, which the last turn gets; None counts as 0
    state_values: tuple[float | None, ...] = ()  # what the state before the reply is worth, in units of `reward`
    states: tuple[str | None, ...] = ()  # a name of that state: equal ones are compared; None: with no other
    parts: tuple[Part, ...] = ()  # rollouts within this one, of envs/parts.py: their agents have their rewards
    note: Any = None  # passed to `score_group`; stored nowhere, None in worker processes


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of another environment within a rollout, as `play_part` returns it."""

    name: str
    env: str
    result: RolloutResult
    agents: dict[str, float]  # rewards of all its agents, by their names in the whole rollout
    turns: tuple[int, ...]  # `Reply.turn` of its replies, for what its result says of turns


def checked_result(returned: Any, where: str) -> RolloutResult:
    """The result with its numbers as finite floats; `where` names the environment and the call in messages.

    It has the rewards and metrics of its parts, unless it says otherwise itself.

    Raises: EnvError that names the first value that is not valid.
    """
    if not isinstance(returned, RolloutResult):
        kind = type(returned).__name__
        raise EnvError(f"{where} returned {kind}, not a RolloutResult(reward=...): {describe_value(returned)}")
    for name in ("is_truncated", "is_timeout"):
        if not _is_flag(flag := getattr(returned, name)):
            raise EnvError(f"{where}: {name} is {describe_value(flag)}; give True or False")
    parts = _checked_parts(returned.parts, where)
    return RolloutResult(
        reward=checked_reward(returned.reward, where, "its reward"),
        agent_rewards={name: reward for part in parts for name, reward in part.agents.items()}
        | {
            with_whole_text(name): checked_reward(value, where, f"the reward of {name}")
            for name, value in _named_values(returned.agent_rewards, where, "agent_rewards")
        },
        metrics={f"{part.name}/{name}": value for part in parts for name, value in _metrics_of(part)}
        | {
            with_whole_text(name): checked_number(value, where, f"metrics[{name!r}]")
            for name, value in _named_values(returned.metrics, where, "metrics")
        },
        is_truncated=bool(returned.is_truncated),
        is_timeout=bool(returned.is_timeout),
        branch_rewards=tuple(
            checked_reward(value, where, f"branch_rewards[{index}]")
            for index, value in enumerate(returned.branch_rewards)
        ),
        turn_rewards=_per_turn(returned, "turn_rewards", where, _checked_turn_reward),
        state_values=_per_turn(returned, "state_values", where, _checked_value),
        states=_per_turn(returned, "states", where, _checked_state),
        parts=parts,
        note=returned.note,
    )


def _checked_parts(parts: Any, where: str) -> tuple[Part, ...]:
    """Raises: EnvError for what `play_part` did not return, and for two of one name."""
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Part) for part in parts):
        raise EnvError(f"{where}: parts is {describe_value(parts)}; give a list of what play_part returned")
    names = [part.name for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise EnvError(f"{where}: two parts are named {twice!r}; name each differently in play_part")
    return tuple(parts)


def _metrics_of(part: Part) -> list[tuple[str, float]]:
    return [("reward", part.result.reward), *part.result.metrics.items()]


def checked_reward(value: Any, where: str, what: str) -> float:
    """The value as a float that float32 can hold and square.

    Raises: EnvError with the value otherwise.
    """
    reward = checked_number(value, where, what)
    if abs(reward) > MAX_REWARD:
        prefix = f"{where}: " if where else ""
        rule = f"a reward is trained in float32, so give one between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        raise EnvError(f"{prefix}{what} is {reward:g}; {rule}")
    return reward


def _per_turn(returned: RolloutResult, name: str, where: str, check: Callable[[Any, str, str], T]) -> tuple[T, ...]:
    """An entry per turn, each checked; the number of turns is not known here."""
    values = getattr(returned, name)
    if isinstance(values, tuple) and not values:
        return ()
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise EnvError(f"{where}: {name} is {describe_value(values)}; give a list with one entry per reply")
    return tuple(check(value, where, f"{name}[{index}]") for index, value in enumerate(values))


def _checked_turn_reward(value: Any, where: str, what: str) -> float:
    return 0.0 if value is None else checked_reward(value, where, what)


def _checked_value(value: Any, where: str, what: str) -> float | None:
    return None if value is None else checked_reward(value, where, what)


def _checked_state(state: Any, where: str, what: str) -> str | None:
    if state is None:
        return None
    if not isinstance(state, str):
        raise EnvError(f"{where}: {what} is {describe_value(state)}; give a text, such as str(...), or None")
    state = with_whole_text(state)
    return state if len(state) <= LONGEST_STATE else blake2b(state.encode(), digest_size=16).hexdigest()


def checked_group_rewards(returned: Any, count: int, where: str) -> list[RolloutResult]:
    """What each of `count` members gets: a number, a list with a number for each branch, or a RolloutResult.

    Raises: EnvError as `checked_rewards`.
    """
    entries = list(returned) if isinstance(returned, list | tuple) else []
    if len(entries) != count or not any(isinstance(each, list | tuple | RolloutResult) for each in entries):
        return [RolloutResult(reward=reward) for reward in checked_rewards(returned, count, where)]
    return [_member_result(entry, where) for entry in entries]


def _member_result(entry: Any, where: str) -> RolloutResult:
    if isinstance(entry, RolloutResult):
        if len(entry.turn_rewards) or len(entry.state_values) or len(entry.states):
            raise EnvError(
                f"{where}: a result with turn_rewards, state_values or states; the rollout's own result has them"
            )
        return checked_result(entry, where)
    parts = list(entry) if isinstance(entry, list | tuple) else None
    rewards = checked_rewards([entry] if parts is None else parts, 1 if parts is None else len(parts), where)
    return RolloutResult(reward=sum(rewards) / len(rewards), branch_rewards=() if parts is None else tuple(rewards))


def checked_rewards(returned: Any, count: int, where: str) -> list[float]:
    """Exactly one reward for each of `count` members or samples.

    Raises: EnvError if there are more or fewer, or one is not a valid reward.
    """
    rewards = listed_rewards(returned, count, where)
    return [checked_reward(value, where, f"the reward of member {i}") for i, value in enumerate(rewards)]


def listed_rewards(returned: Any, count: int, where: str) -> list[Any]:
    """What a function returned for `count` samples as a list: of a list, an array or a tensor; not yet checked.

    Raises: EnvError if it is no sequence, or of another length.
    """
    try:
        rewards = [] if isinstance(returned, str | bytes | Mapping) else list(returned)
    except TypeError:
        rewards = []
    if not rewards:
        raise EnvError(f"{where} returned {describe_value(returned)}; return a reward for each of {count}")
    if len(rewards) != count:
        raise EnvError(f"{where} returned {len(rewards)} rewards for {count}; return one for each")
    return rewards


def _named_values(values: Any, where: str, what: str) -> list[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise EnvError(f"{where}: {what} is {describe_value(values)}; give a dictionary of numbers by name")
    for name in values:
        if not isinstance(name, str):
            raise EnvError(f"{where}: {what} has the name {describe_value(name)}; names must be text")
    return list(values.items())


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy 1 and numpy 2
