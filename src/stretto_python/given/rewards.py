"""Reward functions as they are written for TRL, and for one reply, as a function of the environment `dataset`.

    def reward(prompts, completions, **columns) -> list[float]      all replies to a prompt in one call
    def reward(completion, answer) -> float                         one reply; columns of its record by name

Replies to a prompt that is text are texts; replies to a list of messages are lists of one message, as with TRL.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stretto.base.errors import ConfigError, EnvError
from stretto.base.foreign import definition_of
from stretto.data.values import checked_number, describe_value
from stretto.envs.rewards.weighted import WeightedRewards, check_name

if TYPE_CHECKING:
    from stretto.vime.sample import Sample

Reward = Callable[..., Any] | str
"""A function, or the name of one that `dataset` knows: "exact", "math", ..., `module:function`."""

SUM = "score"
"""The entry of a reward that counts; others are metrics."""
_HOOK = {"args", "sample", "samples"}
"""Arguments of functions in vime's terms, which `dataset` calls as they are."""
_OF_ONE = ("prompt", "completion", "completion_ids")
_OF_GROUP = ("prompts", "completions", "completion_ids")
WRITE = (
    "write `def reward(completion, answer)`, which gets one reply and columns of its record by their names, or "
    "`def reward(prompts, completions, **columns)`, which gets all replies to a prompt and returns a list"
)


def is_hook(function: Reward) -> bool:
    """Whether a function is written for vime: `(args, sample)`, or `(args, samples)` for a whole group."""
    return not isinstance(function, str) and bool(names := set(_parameters(function))) and names <= _HOOK


def is_for_group(function: Reward) -> bool:
    """Whether a function gets all replies to a prompt in one call."""
    return not isinstance(function, str) and bool({"completions", "samples"} & set(_parameters(function)))


def check(function: Reward, columns: Sequence[str], key: str) -> None:
    """Check that records have what a function asks for.

    Raises: ConfigError for an argument that is neither the prompt, the reply, nor a column, and for a wrong name.
    """
    if isinstance(function, str):
        return check_name(function, key)
    if is_hook(function):
        return None
    parameters = _parameters(function)
    known = _OF_GROUP if is_for_group(function) else _OF_ONE
    where = f"{key} ({definition_of(function)})"
    if not {"completion", "completions"} & set(parameters):
        raise ConfigError(f"{where} takes {', '.join(parameters) or 'nothing'}, but no reply; {WRITE}")
    for name, parameter in parameters.items():
        is_filled = name in known or name in columns or parameter.default is not parameter.empty
        if is_filled or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        raise ConfigError(
            f"{where} takes {name}, and the records have no such column; they have {', '.join(columns)}. Rename the "
            "argument, or give it a default"
        )


def rewards_of(
    functions: Mapping[str, Reward], weights: Sequence[float], columns: Sequence[str], prompt: str = "prompt"
) -> Callable[..., Any]:
    """The sum of these functions with their weights, as a function that `dataset` calls.

    It returns the sum as SUM, and of several functions each one's value, without its weight, as `reward_NAME`.
    columns: names of what each record's metadata has for them; prompt: that of the column with the prompt.
    """
    calls = {
        name: _named(function) if isinstance(function, str) else _call(function, columns, prompt)
        for name, function in functions.items()
    }

    async def reward(args: Any, samples: list[Sample]) -> list[dict[str, float]]:
        totals: list[list[float]] = [[] for _ in samples]
        values: list[dict[str, float]] = [{} for _ in samples]
        for (name, call), weight in zip(calls.items(), weights, strict=True):
            for total, own, value in zip(totals, values, await call(args, samples), strict=True):
                if value is not None:
                    total.append(weight * value)
                    own |= {f"reward_{name}": value} if len(calls) > 1 else {}
        if not all(totals):
            where = "; ".join(definition_of(function) for function in functions.values() if callable(function))
            way = ", in one of several at least" if len(functions) > 1 else " on every path"
            raise EnvError(f"reward {where}: it returned None for a reply; return a float{way}")
        return [{SUM: sum(total)} | own for total, own in zip(totals, values)]

    async def reward_of_one(args: Any, sample: Sample) -> dict[str, float]:
        [value] = await reward(args, [sample])
        return value

    return reward if any(map(is_for_group, functions.values())) else reward_of_one


def _named(name: str) -> Callable[[Any, list[Sample]], Any]:
    """The reward of a name, for samples of one prompt."""
    made: list[WeightedRewards] = []  # once it is known what functions get

    async def of_each(args: Any, samples: list[Sample]) -> list[float]:
        if not made:
            made.append(WeightedRewards({name: 1.0}, args))
        return [(await made[0].score(sample))[0] for sample in samples]

    return of_each


def _call(function: Callable[..., Any], columns: Sequence[str], prompt: str) -> Callable[[Any, list[Sample]], Any]:
    """The function, for samples of one prompt; it gets what it names, or all if it takes `**columns`."""
    parameters = _parameters(function)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    where, others = definition_of(function), [each for each in columns if each not in _OF_ONE]

    def of_names(row: dict[str, Any]) -> dict[str, Any]:
        return row if takes_all else {name: value for name, value in row.items() if name in parameters}

    async def of_group(args: Any, samples: list[Sample]) -> list[Any]:
        rows = [_row(sample, others, prompt) for sample in samples]
        given = {name: [row[name] for row in rows] for name in ("completion_ids", *others)}
        given |= {f"{name}s": [row[name] for row in rows] for name in ("prompt", "completion")}
        values = await _awaited(function(**of_names(given)))
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple) or len(values) != len(samples):
            raise EnvError(
                f"reward {where}: it returned {describe_value(values)} for {len(samples)} replies; return a list with "
                "a number for each"
            )
        return [_number(value, where) for value in values]

    async def of_each(args: Any, samples: list[Sample]) -> list[Any]:
        rows = [of_names(_row(sample, others, prompt)) for sample in samples]
        return [_number(await _awaited(function(**row)), where) for row in rows]

    return of_group if is_for_group(function) else of_each


def _row(sample: Sample, columns: Sequence[str], prompt: str) -> dict[str, Any]:
    """What functions may ask for about one reply, by name."""
    asked = sample.metadata.get(prompt, sample.prompt)
    reply = sample.response if isinstance(asked, str) else [{"role": "assistant", "content": sample.response}]
    start = len(sample.tokens) - sample.response_length
    ids = sample.tokens[start:] if sample.tokens else []
    return {name: sample.metadata.get(name) for name in columns} | dict(zip(_OF_ONE, (asked, reply, ids), strict=True))


def _number(value: Any, where: str) -> float | None:
    return None if value is None else checked_number(value, f"reward {where}", "what it returned for a reply")


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"reward = {function!r} has no readable signature: {cause}; {WRITE}") from None
