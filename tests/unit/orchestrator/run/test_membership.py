"""Wishes for one address that follow each other faster than they are applied; tests/e2e/test_engines.py asks a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import run_virtual

from stretto.base.paths import RunDir
from stretto.ledger import Ledger
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.run.membership import Membership
from stretto.transports.engine.client import EngineClient

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


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
