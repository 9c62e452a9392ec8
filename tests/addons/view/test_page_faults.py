"""The page over runs that are damaged, replaced or gone, with odd logs, before many tabs and other names."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import ledger_runs
import pytest
from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestClient, TestServer

from stretto.base.files import open_locked, unlock
from stretto.base.paths import RunDir
from stretto.base.ports import is_local
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import MetricsFile
from stretto.records import codec
from stretto_view.page import conversation, library, logs, now, rollouts, timeline
from stretto_view.page.app import POLL_S, _Cached, build
from stretto_view.page.library import Library, OpenRun


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Three steps in the ledger and in the metrics."""
    found = RunDir(tmp_path / "run")
    ledger_runs.steps(found, 3).close()
    found.configs.mkdir()
    found.config("run").write_text('{"max_steps": 5}')
    file = MetricsFile(found.metrics("orchestrator"))
    for step in (1, 2, 3):
        file.log(step, {"reward/mean": step / 10, "time/step": 1.0})
    file.close()
    return found


@pytest.fixture
async def page(run: RunDir) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build(Library([run.path.parent])))) as client:
        yield client


async def test_a_ledger_of_a_newer_version_is_one_message_where_it_is_needed(page: TestClient, run: RunDir) -> None:
    with sqlite3.connect(run.ledger) as ledger:
        ledger.execute("PRAGMA user_version = 99")
    ledger.close()
    for route in ("rollouts", "timeline"):
        answer = await page.get(f"/api/run/run/{route}")
        assert answer.status == 404 and "ledger schema 99" in (await answer.json())["error"], route
    found = await (await page.get("/api/run/run/now")).json()
    assert found["step"] == 3 and found["metrics"] and found["queues"] is None
    assert "ledger schema 99" in found["no_queues"]


ROUTES = (
    "now", "metrics", "curve?key=reward/mean&axis=time", "curve?key=reward/mean&axis=tokens", "rollouts",
    "rollouts?text=a", "rollouts?step=2&sort=best", "rollouts?status=running", "rollout?group=1&member=0", "timeline",
    "evals", "evals?version=2", "eval_task?task=t1&env=e", "scores", "config", "logs", "curves.csv", "evals.csv",
    "rollouts.csv", "rollout.html?group=1&member=0",
)  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("damage", ["emptied", "cut", "other bytes", "other JSON", "a directory", "gone"])
async def test_a_damaged_file_is_a_message_and_hides_no_other_run(run: RunDir, tmp_path: Path, damage: str) -> None:
    build_letters_tokenizer(run.tokenizer)
    run.logs.mkdir(exist_ok=True)
    run.log("trainer").write_text("10:00:00.000 WARNING trainer | slow\n")
    run.eval(2).mkdir(parents=True)
    run.eval_results(2).write_text('[{"env": "e", "mode": "sampled", "mean": 0.5}]')
    reply = {"task_id": "t1", "env": "e", "reward": 1.0, "branches": [{"prompt": "a", "reply": "b"}]}
    (run.eval(2) / "e.jsonl").write_text(json.dumps(reply) + "\n")
    (run.path / "scores").mkdir()
    found = {"mean": {"old": 0.5, "new": 1.0}, "disagreements": [{"rollout": "g0.0", "prompt": "a", "reply": "b"}]}
    (run.path / "scores" / "other.json").write_text(json.dumps(found))
    shutil.copytree(run.path, tmp_path / "whole")
    files = [file for file in sorted(run.path.rglob("*")) if file.is_file() and not file.name.endswith("-shm")]
    assert len(files) > 7
    rng = random.Random(damage)
    for file in files:
        kept = file.read_bytes()
        damaged = {
            "emptied": b"", "cut": kept[: len(kept) // 2], "other JSON": b'[[1], {"a": "\\ud83d"}]\n{"step": "x"}\n3',
            "other bytes": bytes(rng.randrange(256) if rng.random() < 0.02 else byte for byte in kept),
        }.get(damage)  # fmt: skip
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        elif damage == "a directory":
            file.mkdir()
        async with TestClient(TestServer(build(Library([tmp_path])))) as client:
            answer = await client.get("/api/runs")
            assert answer.status == 200 and "whole" in [row["id"] for row in await answer.json()], file
            for route in ROUTES:
                answer = await client.get(f"/api/run/run/{route}")
                assert answer.status < 500, (file, route, await answer.text())
        if file.is_dir():
            file.rmdir()
        file.write_bytes(kept)


async def test_a_fault_that_nobody_foresaw_is_a_message_too(page: TestClient, run: RunDir) -> None:
    with run.metrics("orchestrator").open("a") as file:
        file.write('{"step": 4, "reward/mean": 1.0}\n')  # without a time
    answer = await page.get("/api/run/run/curve?key=reward/mean&axis=time")
    assert answer.status == 500 and "is a file of this run damaged" in (await answer.json())["error"]
    assert (await page.get("/api/run/run/rollouts")).status == 200


async def test_a_run_without_a_config_has_no_keys_and_one_that_is_gone_is_said_to_be(
    page: TestClient, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_RESCAN_S", 0.0)
    run.config("run").unlink()
    assert await (await page.get("/api/run/run/config")).json() == {}
    shutil.rmtree(run.path)
    answer = await page.get("/api/run/run/now")
    assert answer.status == 404 and "may have been deleted" in await answer.text()
    assert await (await page.get("/api/runs")).json() == []


async def test_a_run_that_is_resumed_with_other_settings_is_shown_with_them(
    page: TestClient, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_RESCAN_S", 0.0)
    assert await (await page.get("/api/run/run/config")).json() == {"max_steps": 5}
    run.config("run").write_text('{"max_steps": 5000}')
    assert await (await page.get("/api/run/run/config")).json() == {"max_steps": 5000}


def test_results_of_an_eval_and_the_end_of_a_killed_run_are_changes(run: RunDir) -> None:
    opened = OpenRun(run.path)
    run.eval(2).mkdir(parents=True)
    lock = open_locked(run.lock)
    os.write(lock, b"17")
    before = opened.stamp()
    run.eval_results(2).write_text("[]")
    after = opened.stamp()
    assert before["evals"] != after["evals"] and before["state"] == after["state"]
    unlock(lock)  # as the kernel does for a process that was killed
    assert opened.stamp()["state"] != after["state"]


async def test_files_are_looked_at_once_for_all_tabs() -> None:
    looks: list[float] = []
    shared = _Cached(lambda: looks.append(time.monotonic()) or len(looks))
    began = time.monotonic()
    assert len(set(await asyncio.gather(*(shared.get() for _ in range(50))))) <= 2
    assert len(looks) <= 1 + (time.monotonic() - began) // (POLL_S * 0.9)


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True), ("LOCALHOST:80", True), ("127.0.0.5:8765", True), ("[::1]:8765", True),
        ("127.0.0.1.evil.example", False), ("localhost.evil.example:80", False), ("10.0.0.1", False), ("", False),
        ("[::1", False), ("evil.example:127.0.0.1", False),
    ],
)  # fmt: skip
def test_only_names_that_no_name_server_gives_are_this_machines(host: str, is_own: bool) -> None:
    assert is_local(host) is is_own


async def test_two_pages_of_a_host_do_not_take_each_others_cookie(run: RunDir) -> None:
    servers = [TestServer(build(Library([run.path]), token=token)) for token in ("one", "two")]
    async with servers[0], servers[1], ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
        for server, token in zip(servers, ("one", "two")):
            assert (await session.get(server.make_url(f"/?token={token}"))).status == 200
        for server in servers:
            assert (await session.get(server.make_url("/api/runs"))).status == 200


def test_tokens_of_another_version_leave_the_rest_of_a_rollout(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SCHEMA", codec.SCHEMA + 1)
    with LedgerReader(run) as ledger:
        row, *_ = rollouts.page(ledger, rollouts.Filters(step=2))["rows"]
    found = conversation.conversation(OpenRun(run.path), row["group_id"], row["member"])
    assert found["branches"] == [] and "schema" in found["no_tokens"] and found["group"]


# -- logs --


def test_lines_that_only_look_like_a_logs_are_text(tmp_path: Path) -> None:
    odd = [
        "99:99:99.000 INFO    trainer | no time of a day",
        json.dumps({"time": 1, "message": 2, "level": 3}),
        json.dumps({"time": "yesterday", "message": "m", "level": "info"}),
        "{" * 5000,
        "[" * 100_000,
    ]
    file = tmp_path / "trainer.log"
    file.write_text("\n".join(["10:00:00.000 ERROR   trainer | first", *odd]) + "\n")
    entries = logs.read("trainer", file)
    assert entries[0].text.startswith("first") and "".join(each.text for each in entries).count("99:99:99") == 1


def test_pages_of_a_log_lose_no_entry_of_one_time(run: RunDir) -> None:
    run.logs.mkdir(exist_ok=True)
    lines = [f"10:00:0{n // 5}.000 INFO    trainer | {n}" for n in range(20)]
    run.log("trainer").write_text("\n".join(lines) + "\n")
    seen: list[str] = []
    before = None
    while True:
        found = logs.merged(run, limit=3, before=before)
        seen = [row["text"] for row in found["lines"]] + seen
        if (before := found["next"]) is None:
            break
    assert seen == [str(n) for n in range(20)]


def test_logs_of_nodes_are_beside_the_runs_own(run: RunDir) -> None:
    for place in (run.logs, *(run.path.with_name(f"run-node-{n}") / "logs" for n in (1, 2))):
        place.mkdir(parents=True)
        (place / "trainer.log").write_text("10:00:00.000 INFO    trainer | here\n")
    assert sorted(logs.files(run)) == ["trainer", "trainer node-1", "trainer node-2"]


def test_of_a_large_log_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trainer.log"
    file.write_text("".join(f"10:00:00.{n % 1000:03} INFO    trainer | {n}\n" for n in range(5000)))
    found = logs.read("trainer", file, 10_000)
    assert 100 < len(found) < 400 and found[-1].text == "4999" and found[0].text.isdecimal()


def test_warnings_are_counted_anew_when_a_log_has_grown(run: RunDir) -> None:
    run.logs.mkdir(exist_ok=True)
    for number in (1, 2):
        with run.log("trainer").open("a") as log:
            log.write("10:00:00.000 WARNING trainer | slow\n")
        assert [row["count"] for row in logs.warnings(run)] == [number]


# -- now --


def test_what_a_run_does_not_have_is_not_shown_as_zero(run: RunDir) -> None:
    assert now.waits([{"time/step": 1.0}]) is None  # sft
    found = now.waits([{"time/step": 2.0, "time/wait_for_rollouts": 1.0}])
    assert found == {"trainer waits for rollouts": 0.5}


def test_the_time_that_a_run_stood_still_is_not_in_what_is_left() -> None:
    day = 86_400.0
    steps = [{"step": n, "incarnation": 1, "time": float(n)} for n in (1, 2)]
    steps += [{"step": n, "incarnation": 2, "time": day + n} for n in (3, 4, 5)]
    assert now._left(steps, 10) == pytest.approx(5.0)


def test_what_is_left_survives_a_clock_that_is_set_back() -> None:
    steps = [{"step": n, "incarnation": 1, "time": float(n) - 3600.0 * (n > 3)} for n in range(1, 6)]
    assert now._left(steps, 10) == pytest.approx(5 * 3 / 4)


def test_gpus_are_asked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(now, "_cached_gpus", [float("-inf"), []])
    monkeypatch.setattr(now, "_query_gpus", lambda: asked.append(1) or [{"index": "0"}])
    assert now.gpus() == now.gpus() == [{"index": "0"}] and len(asked) == 1


def test_rollouts_are_chosen_by_length_from_both_sides(run: RunDir) -> None:
    with LedgerReader(run) as ledger:
        every = rollouts.page(ledger, rollouts.Filters())["rows"]
        longest = max(row["num_sampled_tokens"] for row in every)
        shorter = rollouts.page(ledger, rollouts.Filters(max_tokens=longest - 1))["rows"]
    assert len(shorter) == sum(row["num_sampled_tokens"] < longest for row in every)


# -- engines --


def with_engines(run: RunDir, *loads: dict[str, list[float | None]], began: float = 100.0) -> RunDir:
    """The run after its engines were looked at every five seconds."""
    with sqlite3.connect(run.ledger) as ledger:
        for at, load in enumerate(loads):
            values = (began + 5 * at, json.dumps(load))
            ledger.execute("INSERT INTO events (at, incarnation, kind, data) VALUES (?, 1, 'engines', ?)", values)
    ledger.close()
    return run


def test_each_engine_has_a_lane_of_what_it_did(run: RunDir) -> None:
    idle, busy, full = [0.0, 0.0, 0.0, 3.0], [4.0, 0.0, 0.5, 3.0], [4.0, 2.0, 1.0, None]
    with_engines(run, {"a:1": idle, "b:1": busy}, {"a:1": idle, "b:1": full}, {"a:1": busy})
    with_engines(run, {"a:1": busy}, began=1000.0)  # nobody looked for a long time
    with LedgerReader(run) as ledger:
        a, b = timeline.engine_lanes(ledger, 100.0, 1000.0)
    assert (a["name"], b["name"]) == ("engine a:1", "engine b:1")
    assert [(span["kind"], span["start"], span["end"]) for span in a["spans"]] == [
        ("idle", 100.0, 110.0), ("busy", 110.0, 110.0), ("busy", 1000.0, 1000.0),
    ]  # fmt: skip
    assert [span["kind"] for span in b["spans"]] == ["busy", "full"] and "2 wait" in b["spans"][1]["text"]
    assert "version 3" in b["spans"][0]["text"] and "version" not in b["spans"][1]["text"]


def test_engines_that_wait_and_old_weights_are_told_apart(run: RunDir) -> None:
    idle, busy, full = [0.0, 0.0, 0.0, 3.0], [4.0, 0.0, 0.5, 1.0], [4.0, 2.0, 1.0, None]
    with_engines(run, {"a:1": idle, "b:1": busy}, {"a:1": busy, "b:1": busy}, {"a:1": idle, "b:1": full})
    a, b = now.engine_waits(OpenRun(run.path))
    assert (a["idle"], a["busy"], a["full"], a["behind"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3), 0.0, 0)
    assert b["full"] == pytest.approx(1 / 3) and b["looks"] == 3 and b["behind"] is None


def test_many_looks_at_engines_are_thinned(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engines(run, *({"a:1": [1.0, 0.0, 0.1, 1.0]} for _ in range(50)))
    monkeypatch.setattr(timeline, "_MOST_SEEN", 10)
    with LedgerReader(run) as ledger:
        assert len(timeline.seen_engines(ledger, 0.0, 1000.0)) == 10
