"""Reward functions as users write them, called as the environment `dataset` calls its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from stretto.base.errors import EnvError
from stretto.vime.arguments import Arguments
from stretto.vime.calls import Hook
from stretto.vime.sample import Sample
from stretto_python.given.rewards import check, is_for_group, rewards_of

COLUMNS = ["prompt", "answer", "level"]


def sample(reply: str, answer: str = "b", prompt: Any = "a") -> Sample:
    metadata = {"prompt": prompt, "answer": answer, "level": 2}
    return Sample(prompt="rendered", response=reply, tokens=[1, 2, 3, 4], response_length=2, metadata=metadata)


def called(function: Any, given: Any) -> Any:
    """What the function of the sum returns; of one entry its value alone."""
    found = asyncio.run(function(None, given))
    return [_alone(each) for each in found] if isinstance(found, list) else _alone(found)


def _alone(entries: dict[str, float]) -> Any:
    return entries["score"] if len(entries) == 1 else entries


def summed(functions: list[Any], weights: list[float]) -> Any:
    return rewards_of({getattr(each, "__name__", "f"): each for each in functions}, weights, COLUMNS)


def exact(completion, answer):
    return completion == answer


def of_all(prompts, completions, **columns):
    assert prompts == ["a", "a"] and columns == {"answer": ["b", "b"], "level": [2, 2], "completion_ids": [[3, 4]] * 2}
    return [float(len(each)) for each in completions]


def nothing(completions, level):
    return [None] * len(completions)


async def waits(completion, completion_ids, level=5):
    await asyncio.sleep(0)
    return len(completion_ids) * level


def test_one_reply_gets_its_columns_by_name() -> None:
    reward = summed([exact], [1.0])
    assert called(reward, sample("b")) == 1.0 and called(reward, sample("c")) == 0.0
    assert called(summed([waits], [0.5]), sample("b")) == 2.0


def test_all_replies_to_a_prompt_are_one_call_and_sums_have_weights_and_parts() -> None:
    assert called(summed([of_all, exact, nothing], [0.1, 2.0, 1.0]), [sample("b"), sample("ccc")]) == [
        {"score": pytest.approx(2.1), "reward_of_all": 1.0, "reward_exact": 1.0},
        {"score": pytest.approx(0.3), "reward_of_all": 3.0, "reward_exact": 0.0},
    ]
    assert is_for_group(of_all) and not is_for_group(exact)


def test_a_prompt_of_messages_has_replies_of_messages() -> None:
    seen = []
    called(summed([lambda completion: seen.append(completion) or 0.0], [1.0]), sample("b", prompt=[{}]))
    assert seen == [[{"role": "assistant", "content": "b"}]]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda completions, **_: 1.0, "returned 1.0 for 2 replies; return a list with a number for each"),
        (lambda completions, **_: [1.0], "for 2 replies"),
        (lambda completions, **_: ["high", 1], "is 'high', not a finite number; return a float, such as float"),
        (nothing, r"reward nothing, .*returned None for a reply; return a float on every path"),
        (lambda completions, **_: ["0.5"] * 2, r"reward .*<lambda>, .*\.py:\d+: .* is '0.5', not a finite number"),
        (lambda completions, **_: [float("nan")] * 2, r"<lambda>.* is nan, .*division by zero"),
        (lambda completions, **_: [[1.0], [0.0]], r"<lambda>.* is list \[1.0\], .*return one float"),
        (lambda completions, **_: [torch.zeros(2)] * 2, r"is Tensor tensor\(\[0., 0.\]\), .*return one float"),
    ],
)
def test_what_is_no_reward_fails_with_what_to_return(function: Any, words: str) -> None:
    with pytest.raises(EnvError, match=words):
        called(summed([function], [1.0]), [sample("a"), sample("b")])


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), (np.bool_(True), 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (torch.tensor(0.25), 0.25)],
)
def test_scalars_of_numpy_and_torch_and_truth_values_are_numbers(value: Any, number: float) -> None:
    assert called(summed([lambda completion: value], [2.0]), sample("a")) == 2.0 * number
    assert Sample(reward=value).get_reward_value(Arguments()) == number


def test_arguments_with_a_default_need_no_column() -> None:
    check(waits, ["prompt"], "reward")


def test_rewards_by_name_stand_beside_functions() -> None:
    """Each has its own value, as in the list `rewards` of a file."""
    labelled = [sample("b"), sample("ccc")]
    for each in labelled:
        each.label = "b"
    reward = rewards_of({"exact": "exact", "of_all": of_all, "f1": "f1"}, [1.0, 0.1, 0.0], COLUMNS)
    found = asyncio.run(reward(Arguments(reward_key="score"), labelled))
    assert found == [
        {"score": pytest.approx(1.1), "reward_exact": 1.0, "reward_of_all": 1.0, "reward_f1": 1.0},
        {"score": pytest.approx(0.3), "reward_exact": 0.0, "reward_of_all": 3.0, "reward_f1": 0.0},
    ]


def test_an_error_of_a_function_is_told_with_its_own_line() -> None:
    def divides(completion: str) -> float:
        return 1 / (len(completion) - 1)

    hook = Hook(summed([divides], [1.0]), "reward")
    with pytest.raises(EnvError) as caught:
        asyncio.run(hook.call(None, sample("b")))
    line = divides.__code__.co_firstlineno + 1
    assert str(caught.value) == f"reward: {__file__}:{line}: ZeroDivisionError: division by zero"
