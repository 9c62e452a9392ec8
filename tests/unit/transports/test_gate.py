"""How many requests are sent to a router: engines that are busy, that join, and that are full."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
import pytest

from stretto.base.errors import EngineError
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.transports.engine import gate
from stretto.transports.engine.client import EngineClient
from stretto.transports.engine.dispatch import Dispatch
from stretto.transports.engine.fleet import Fleet
from stretto.transports.engine.gate import Queue, limit_of

SEQUENCES = 24


def rounds(
    policy, *, limit: float, num_open: int, changes: dict[int, int], seconds: int
) -> list[tuple[int, float, list[int]]]:
    """Engines that answer 12 requests per second each, one second at a time; what each round served, the limit, queues.

    changes: number of engines by second. policy: which of n engines gets the next request.
    """
    engines: list[int] = []
    found, held = [], num_open
    for second in range(seconds):
        for _ in range(changes.get(second, len(engines)) - len(engines)):
            engines.append(0)
        del engines[changes.get(second, len(engines)) :]
        held = num_open - sum(engines)
        served = 0
        for _ in range(12):
            while held and sum(engines) < limit:
                engines[policy(engines)] += 1
                held -= 1
            for i, num in enumerate(engines):
                if num:
                    engines[i] -= 1
                    held, served = held + 1, served + 1
        queues = [Queue(min(num, SEQUENCES), max(num - SEQUENCES, 0)) for num in engines]
        limit = limit_of(limit, sum(engines), queues)
        found.append((served, limit, [*engines]))
    return found


def in_turn():
    number = 0

    def choose(engines: list[int]) -> int:
        nonlocal number
        number += 1
        return number % len(engines)

    return choose


@pytest.mark.parametrize("policy", [in_turn(), lambda engines: engines.index(min(engines))])
def test_throughput_follows_the_number_of_engines(policy):
    changes = {0: 1, 40: 2, 60: 3, 80: 4, 100: 2, 120: 1}
    found = rounds(policy, limit=gate.FIRST, num_open=288, changes=changes, seconds=140)
    for second, number in changes.items():
        for served, _, _ in found[second + 3 : second + 20]:
            assert served == 12 * number


def test_no_queue_builds_up_at_engines():
    found = rounds(in_turn(), limit=float("inf"), num_open=288, changes={0: 1}, seconds=60)
    assert found[0][2][0] > 250  # all that there are; the next readings take that back
    assert all(queue <= SEQUENCES + 8 for _, _, [queue] in found[40:])


def test_the_limit_is_never_below_what_engines_run_whoever_else_fills_their_queues():
    assert limit_of(60, 2, [Queue(24, 500), Queue(20, 500)]) == 48


def test_engines_that_are_busy_and_have_little_waiting_get_no_more_and_no_less():
    assert limit_of(30, 30, [Queue(24, 6), Queue(24, 1)]) == 30
    assert limit_of(30, 30, []) == 30


def test_an_engine_without_a_queue_gets_as_much_as_others_run_or_twice_what_it_has():
    assert limit_of(30, 30, [Queue(24, 6), Queue(0, 0)]) == 30 + 2 * 26
    assert limit_of(30, 30, [Queue(30, 0)]) == 30 + 30 + 7.5
    assert limit_of(float("inf"), 30, [Queue(30, 0)]) == float("inf")


def routed(num_engines: int = 2) -> Dispatch:
    async def nothing(*_: str) -> None: ...

    fleet = Fleet(
        [f"http://e{i}" for i in range(num_engines)], check=nothing, restore=nothing, prove=nothing,
        interval_s=60.0, recovery_timeout_s=60.0,
    )  # fmt: skip
    return Dispatch(["http://r"], None, fleet, timeout_s=60.0, max_retries=0, recovery_timeout_s=60.0, is_routed=True)


async def test_what_one_engine_rejects_limits_the_router_until_the_next_reading(monkeypatch):
    monkeypatch.setattr(gate, "INTERVAL_S", 0.01)
    dispatch = routed()
    own = dispatch._gates["http://r"]
    read = asyncio.Event()

    async def readings():
        await read.wait()
        return {"a": {gate.RUNNING: 24.0, gate.WAITING: 4.0}, "b": {gate.RUNNING: 2.0, gate.WAITING: 0.0}}

    keeping = asyncio.create_task(dispatch.keep_busy(readings))
    await asyncio.sleep(0)
    assert own.limit == 2 * gate.FIRST
    for _ in range(30):
        await own.enter()
    own.leave(was_full=True)
    assert own.limit == 29
    waiting = asyncio.create_task(own.enter())
    await asyncio.sleep(0)
    assert dispatch.num_held == 1
    read.set()
    await asyncio.wait_for(waiting, 10)
    assert own.limit > 29 and dispatch.num_held == 0
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert own.limit == float("inf")


async def limits_after(monkeypatch, answers: list) -> list[float]:
    """The router's limit before each of these readings, and at the end."""
    monkeypatch.setattr(gate, "INTERVAL_S", 0.0)
    dispatch, left, limits, is_read = routed(), deque(answers), [], asyncio.Event()

    async def readings():
        limits.append(dispatch._gates["http://r"].limit)
        if not left:
            is_read.set()
            await asyncio.Event().wait()
        answer = left.popleft()
        if isinstance(answer, EngineError):
            raise answer
        return answer

    keeping = asyncio.create_task(dispatch.keep_busy(readings))
    await asyncio.wait_for(is_read.wait(), 10)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    return limits


async def test_engines_that_do_not_tell_their_queues_get_all_requests(monkeypatch):
    limits = await limits_after(monkeypatch, [EngineError("down"), {"a": {"vllm:other": 1.0}}])
    assert limits == [2 * gate.FIRST, 2 * gate.FIRST, float("inf")]


async def test_queues_are_followed_again_after_an_engine_has_not_told_its_own(monkeypatch, caplog):
    busy = {"a": {gate.RUNNING: 24.0, gate.WAITING: 40.0}, "b": {gate.RUNNING: 24.0, gate.WAITING: 40.0}}
    starting = busy | {"c": {"vllm:other": 1.0}}
    limits = await limits_after(monkeypatch, [busy, starting, busy])  # one that starts changes nothing
    assert limits == [2 * gate.FIRST, 48, 48, 48] and not caplog.records
    limits = await limits_after(monkeypatch, [busy, *[starting] * gate.MAX_SILENT, busy])
    assert limits[:-2] == [2 * gate.FIRST, *[48] * gate.MAX_SILENT]
    assert limits[-2:] == [float("inf"), 48]
    assert [record.getMessage() for record in caplog.records] == [
        "engines do not tell their queues (c): until they do, requests go to the router as they come"
    ]


async def test_a_request_that_was_rejected_comes_before_those_that_came_later():
    own, order = gate.RequestGate(), []

    async def one(name: str, *, is_again: bool = False) -> None:
        await own.enter(name, is_again=is_again)
        order.append(name)

    own.set_limit(1)
    await own.enter()
    waiting = [asyncio.create_task(one(name)) for name in "bc"]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(one("a", is_again=True)))
    await asyncio.sleep(0)
    for _ in range(4):
        own.leave()
        await asyncio.sleep(0)
    assert order == ["a", "b", "c"] and own.num_running == 0
    await asyncio.gather(*waiting)


async def test_requests_that_wait_here_are_ended_as_those_at_an_engine():
    """A stop ends all requests: none may be sent after it because others have made room."""
    client = EngineClient(["http://r"], ["http://e"], max_retries=0)
    own = client._dispatch._gates["http://r"]
    own.set_limit(1)
    await own.enter()

    def ask(name: str) -> asyncio.Task[list[Completion]]:
        prompt = np.array([20], np.int32)
        request = GenerateRequest(request_id=name, prompt_ids=prompt, n=2, sampling=SamplingParams(max_tokens=4))
        return asyncio.create_task(client.generate(request))

    first, second = ask("first"), ask("second")
    while own.num_waiting < 2:
        await asyncio.sleep(0)
    client._dispatch.end_held(["generate first"])
    for completion in await first:
        assert completion.finish_reason == "abort" and not len(completion.token_ids)
    assert own.num_waiting == 1 and own.num_running == 1 and not second.done()
    client._dispatch.end_held(None)
    assert len(await second) == 2 and own.num_running == 1
    own.leave()
    assert own.num_running == 0 == client._dispatch.num_held
    await client.close()
