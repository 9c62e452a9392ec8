"""Wishes for one address that follow each other faster than they are applied; tests/e2e/test_engines.py asks a run."""

from __future__ import annotations

import asyncio
import json
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
from stretto.transports.engine.client import EngineClient

A, B, C = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"


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


def test_after_a_resume_engines_that_had_joined_join_again_and_those_that_had_left_are_there(tmp_path: Path) -> None:
    run, ledger = RunDir(tmp_path), Ledger(RunDir(tmp_path))
    run.engines.mkdir()
    for name, url, state in (("b", B, "removed"), ("c", C, "on")):
        run.engine_wish(name).write_text(json.dumps({"url": url, "state": state, "wait_s": 30.0}))

    async def scenario() -> list[str]:
        async with EngineClient([A, B]) as client, asyncio.TaskGroup() as tasks:
            parts: Any = SimpleNamespace(run_dir=run, engines=client, ledger=ledger)
            membership = Membership(parts)
            membership.update(tasks)
            await asyncio.sleep(1)
            return list(client.fleet.nodes)

    assert run_virtual(scenario()) == [A, B, C]
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


async def test_an_engine_behind_a_router_is_not_drained() -> None:
    async with EngineClient(["http://127.0.0.1:9"], [A, B]) as client:
        with pytest.raises(EngineError, match="take the engine out of its list"):
            await client.drain_engine(B, 1.0)
        assert client.num_ready == 2
