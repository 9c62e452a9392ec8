"""Wishes for one address that follow each other faster than they are applied; tests/e2e/test_engines.py asks a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import run_virtual

from stretto.base.errors import EngineError
from stretto.base.paths import RunDir
from stretto.ledger import Ledger
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.run.membership import Membership
from stretto.transports.engine import handover
from stretto.transports.engine.client import EngineClient
from stretto.transports.engine.fleet import EngineState

A, B, C = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"
ROUTER = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("wishes", "left"),
    [
        (["removed", "removed"], None),
        (["drained", "removed"], None),
        (["removed", "on"], "down"),
        (["removed", "drained"], "drained"),
        (["removed", "on", "removed"], None),
    ],
)
def test_the_last_wish_for_an_engine_is_what_becomes_of_it(tmp_path: Path, wishes: list[str], left: str | None) -> None:
    run, ledger = RunDir(tmp_path), Ledger(RunDir(tmp_path))
    run.engines.mkdir()

    async def scenario() -> None:
        async with EngineClient([A, B]) as client, asyncio.TaskGroup() as tasks:
            parts: Any = SimpleNamespace(run_dir=run, engines=client, ledger=ledger)
            membership = Membership(parts)
            reply = tasks.create_task(asyncio.sleep(5, b""))
            client.fleet.nodes[B].requests.add(reply)
            reply.add_done_callback(client.fleet.nodes[B].requests.discard)
            for number, state in enumerate(wishes):
                wish = {"url": B, "state": state, "wait_s": 30.0, "asked_at": number}
                run.engine_wish("b").write_text(json.dumps(wish))
                membership.update(tasks)
                await asyncio.sleep(1)
            await asyncio.sleep(30)
            membership.update(tasks)

    run_virtual(scenario())
    ledger.close()
    with LedgerReader(run) as reader:
        [*_, newest] = reader.events("fleet")
    assert newest["data"]["refused"] == {}
    assert newest["data"]["engines"].get(B, {"state": None})["state"] == left


def engines_after_wishes(run: RunDir, ledger: Ledger) -> list[str]:
    """The engines of a run with A and B, a second after it has read the wishes that are there."""

    async def scenario() -> list[str]:
        async with EngineClient([A, B]) as client, asyncio.TaskGroup() as tasks:
            parts: Any = SimpleNamespace(run_dir=run, engines=client, ledger=ledger)
            Membership(parts).update(tasks)
            await asyncio.sleep(1)
            return list(client.fleet.nodes)

    return run_virtual(scenario())


def test_after_a_resume_engines_that_had_joined_join_again_and_those_that_had_left_are_there(tmp_path: Path) -> None:
    run, ledger = RunDir(tmp_path), Ledger(RunDir(tmp_path))
    run.engines.mkdir()
    for name, url, state in (("b", B, "removed"), ("c", C, "on")):
        run.engine_wish(name).write_text(json.dumps({"url": url, "state": state, "wait_s": 30.0}))

    assert engines_after_wishes(run, ledger) == [A, B, C]
    ledger.close()


def test_an_engine_that_joins_by_another_name_of_this_machine_is_the_one_that_is_there(tmp_path: Path) -> None:
    run, ledger = RunDir(tmp_path), Ledger(RunDir(tmp_path))
    run.engines.mkdir()
    for name, url in (("b", "http://localhost:2"), ("c", "http://127.0.0.2:2")):
        run.engine_wish(name).write_text(json.dumps({"url": url, "state": "on", "wait_s": 30.0}))

    async def scenario() -> list[str]:
        async with EngineClient([A, B]) as client, asyncio.TaskGroup() as tasks:
            parts: Any = SimpleNamespace(run_dir=run, engines=client, ledger=ledger)
            Membership(parts).update(tasks)
            await asyncio.sleep(1)
            return list(client.fleet.nodes)

    assert run_virtual(scenario()) == [A, B, "http://127.0.0.2:2"]
    ledger.close()


class Router:
    """What `stretto_routers.register.RouterList` is to the fleet; `fault` is raised."""

    def __init__(self, *listed: str, fault: Exception | None = None) -> None:
        self.listed, self.fault = [*listed], fault

    def engines(self) -> list[str]:
        if self.fault is not None:
            raise self.fault
        return self.listed

    def correct(self, wanted: Mapping[str, bool]) -> None:
        self.listed = [url for url in self.engines() if wanted.get(url, True)]
        self.listed += [url for url, is_wanted in wanted.items() if is_wanted and url not in self.listed]


def behind(router: Router) -> EngineClient:
    client = EngineClient([ROUTER], [A, B])
    client._routed._lists[ROUTER] = router
    return client


async def test_no_engine_leaves_a_router_without_a_list_and_one_that_joins_is_told_so() -> None:
    async with behind(Router(A, B, fault=EngineError("the router has no list"))) as client:
        with pytest.raises(EngineError, match=f"has no list: it would go on sending requests to {B}"):
            await client.drain_engine(B, 1.0)
        assert client.fleet.ready() == [A, B]
        await client.add_engine(C)
        assert client.fleet.nodes[C].note == "the router has no list: it must find this engine by itself"


async def test_a_router_that_does_not_answer_is_waited_for_by_nobody() -> None:
    async with behind(Router(A, B, fault=OSError("refused"))) as client:
        for call in (client.drain_engine(B, 1.0), client.add_engine(C)):
            with pytest.raises(EngineError, match=r"the router .* does not show its list: refused; try again"):
                await call
        assert list(client.fleet.nodes) == [A, B] and client.fleet.ready() == [A, B]


@pytest.mark.heavy
async def test_a_router_has_an_engine_that_joins_or_leaves_on_its_list_while_it_is_ready() -> None:
    router = Router(A, B)
    async with behind(router) as client:
        routed, fleet = client._routed, client.fleet
        await client.add_engine(C)
        await routed.correct()
        assert router.listed == [A, B]
        fleet.nodes[C].state = EngineState.READY
        await routed.correct()
        assert router.listed == [A, B, C]
        await fleet.mark_down(C, "killed")
        await fleet.mark_down(A, "the router finds that out: the launcher starts it anew")
        await routed.correct()
        assert router.listed == [A, B]
        fleet.nodes[A].state = EngineState.READY
        await client.drain_engine(B, 0.0)  # nobody answers at its address
        assert router.listed == [A]
        client.forget_engine(B)
        router.listed = [A, B]  # it was started anew
        assert await routed.correct() and router.listed == [A]
        router.fault = OSError("it ends")
        assert not await routed.correct()


def test_two_names_of_one_engine_that_are_added_at_once_are_one_engine(tmp_path: Path) -> None:
    run, ledger = RunDir(tmp_path), Ledger(RunDir(tmp_path))
    run.engines.mkdir()
    for name, url in (("c", C), ("d", "http://localhost:3")):
        run.engine_wish(name).write_text(json.dumps({"url": url, "state": "on", "wait_s": 30.0}))

    assert engines_after_wishes(run, ledger) == [A, B, C]
    ledger.close()


@pytest.mark.heavy
def test_an_engine_behind_a_router_is_leaving_until_its_replies_have_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(handover, "_COUNT_S", 0.02)
    run, ledger = RunDir(tmp_path), Ledger(RunDir(tmp_path))
    run.engines.mkdir()

    async def scenario() -> None:
        async with behind(Router(A, B)) as client, asyncio.TaskGroup() as tasks:
            left = [2.0] * 20

            async def num_requests(url: str) -> float:
                return left.pop() if left else 0.0

            client._handover.num_requests = num_requests  # type: ignore[method-assign]
            parts: Any = SimpleNamespace(run_dir=run, engines=client, ledger=ledger)
            membership = Membership(parts)
            run.engine_wish("b").write_text(json.dumps({"url": B, "state": "drained", "wait_s": 30.0}))
            while membership._recorded.get("engines", {}).get(B, {}).get("state") != "drained":
                membership.update(tasks)
                await asyncio.sleep(0.01)

    # Not in virtual time: the router's list is asked in threads.
    asyncio.run(asyncio.wait_for(scenario(), 60))
    ledger.close()
    with LedgerReader(run) as reader:
        states = [event["data"]["engines"][B]["state"] for event in reader.events("fleet")]
    assert states == ["ready", "leaving", "drained"]


def test_after_a_resume_an_engine_that_had_left_is_on_the_list_of_its_router_again(tmp_path: Path) -> None:
    run, ledger = RunDir(tmp_path), Ledger(RunDir(tmp_path))
    run.engines.mkdir()
    run.engine_wish("b").write_text(json.dumps({"url": B, "state": "removed", "wait_s": 30.0}))
    router, asked = Router(A), []

    async def scenario() -> None:
        async with behind(router) as client, asyncio.TaskGroup() as tasks:

            async def admit(url: str, *, is_open: bool) -> None:
                asked.append((url, is_open))

            client._handover.admit = admit  # type: ignore[method-assign]
            parts: Any = SimpleNamespace(run_dir=run, engines=client, ledger=ledger)
            Membership(parts).update(tasks)
            await asyncio.sleep(0.1)
            await client._routed.correct()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert router.listed == [A, B] and asked == [(B, True)]
    ledger.close()


@pytest.mark.heavy
async def test_an_engine_behind_a_router_that_fails_to_answer_once_still_ends_its_replies(monkeypatch) -> None:
    monkeypatch.setattr(handover, "_COUNT_S", 0.02)
    answers: list[float | Exception] = [2.0, EngineError("HTTP 503"), 2.0, 0.0, 0.0, *[EngineError("refused")] * 9]

    async def num_requests(url: str) -> float:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    async with behind(Router(A, B, C)) as client:
        client._handover.num_requests = num_requests  # type: ignore[method-assign]
        await client.drain_engine(B, 30.0)
        assert len(answers) == 9  # idle, asked twice
        await client.add_engine(B)
        await client.drain_engine(B, 30.0)
        assert len(answers) == 6  # it is gone
