"""The order of calls in a weight update."""

from __future__ import annotations

import asyncio

import pytest

from stretto.inference.update_order import UpdateOrder, UpdateState
from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal

CALLS = {
    "pause": api.PAUSE,
    "resume": api.RESUME,
    "start": api.START_UPDATE,
    "update": api.UPDATE_WEIGHTS,
    "finish": api.FINISH_UPDATE,
}


def after(*words: str) -> UpdateOrder:
    """The order after these calls; a call that ends in `!` fails."""
    order = UpdateOrder()
    for word in words:
        try:
            with order.call(CALLS[word.removesuffix("!")]):
                if word.endswith("!"):
                    raise ConnectionError
        except ConnectionError:
            pass
    return order


@pytest.mark.parametrize(
    "words",
    [
        ("start",),
        ("pause", "resume", "start"),
        ("pause!", "start"),
        ("pause", "start", "resume"),
        ("pause", "start", "finish"),
        ("pause", "start", "update", "resume"),
        ("pause", "start", "update!", "resume"),
        ("pause", "start", "update!", "finish"),
        ("pause", "start", "update", "finish!", "resume"),
        ("pause", "start", "update", "update!", "finish"),
        ("pause", "start", "pause", "resume"),
        ("pause", "start", "update", "start", "finish"),
    ],
)
def test_what_comes_out_of_order_is_refused(words: tuple[str, ...]) -> None:
    order = after(*words[:-1])
    with pytest.raises(Refusal) as refused, order.call(CALLS[words[-1]]):
        raise AssertionError("it was let through")
    assert refused.value.status == 409


@pytest.mark.parametrize(
    "words",
    [
        ("update",),  # of an engine that loads between two steps
        ("pause", "pause", "resume", "resume"),
        ("pause", "start", "update", "finish", "resume"),
        ("pause", "start", "update", "update", "finish", "resume"),
        ("pause", "start!", "resume"),
        ("pause", "start", "update!", "pause", "start", "update", "finish", "resume"),
        ("pause", "start", "update", "start!", "finish", "resume"),
        ("pause", "start", "update", "finish", "start", "update", "finish", "resume"),
    ],
)
def test_what_comes_in_order_passes(words: tuple[str, ...]) -> None:
    assert after(*words).state is UpdateState.SERVING


async def test_a_pause_that_another_caller_has_ended_is_none() -> None:
    order, goes_on = UpdateOrder(), asyncio.Event()

    async def pause() -> None:
        with order.call(api.PAUSE):
            await goes_on.wait()

    pausing = asyncio.create_task(pause())
    await asyncio.sleep(0)
    with order.call(api.RESUME):
        pass
    goes_on.set()
    await pausing
    assert order.state is UpdateState.SERVING
