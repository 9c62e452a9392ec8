"""The chat of the page: which engines it reaches, with which key, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ledger_runs
import pytest
from aiohttp import CookieJar, web
from aiohttp.test_utils import TestClient, TestServer

from stretto.base.files import open_locked
from stretto.base.paths import RunDir
from stretto.base.secret import load_secret
from stretto_view.page import chat, now
from stretto_view.page.app import build
from stretto_view.page.library import Library, OpenRun

METRICS = """# HELP vllm:num_requests_running
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:weight_version{engine="0"} 7
vllm:generation_tokens_total{engine="0"} %d
"""


class SmallEngine:
    """An engine that says back what it was asked, with what it was asked."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.asked: list[Any] = []
        self.sampled = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/chat/completions", self.reply)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}]})

    async def metrics(self, request: web.Request) -> web.Response:
        self.sampled += 100
        return web.Response(text=METRICS % self.sampled)

    async def reply(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        self.asked.append(await request.json())
        if self.asked[-1]["temperature"] == 9:
            return web.json_response({"error": {"message": "too hot"}}, status=400)
        return web.Response(text='data: {"choices": [{"delta": {"content": "yes"}}]}\n\ndata: [DONE]\n\n')


@pytest.fixture
async def engine() -> AsyncIterator[tuple[SmallEngine, str]]:
    small = SmallEngine()
    async with TestServer(small.app()) as server:
        yield small, f"http://127.0.0.1:{server.port}"


@pytest.fixture
async def run(tmp_path: Path, engine: tuple[SmallEngine, str]) -> AsyncIterator[RunDir]:
    """A run that goes on, whose engine's key is made from its secret."""
    run_dir = RunDir(tmp_path / "talks")
    ledger_runs.steps(run_dir, 2).close()
    run_dir.configs.mkdir()
    settings = {"orchestrator": {"client": {"base_url": engine[1] + "/v1", "api_key_var": "NO_SUCH_KEY"}}}
    run_dir.config("run").write_text(json.dumps(settings))
    load_secret(run_dir)
    lock = open_locked(run_dir.lock)
    os.write(lock, b"17")
    yield run_dir
    os.close(lock)


@pytest.fixture
async def page(run: RunDir) -> AsyncIterator[TestClient]:
    server = TestServer(build(Library([run.path]), "sesame", has_chat=True))
    async with TestClient(server, cookie_jar=CookieJar(unsafe=True)) as client:
        await client.get("/?token=sesame")
        yield client


async def test_a_message_goes_to_the_runs_engine_with_the_key_of_its_secret(
    page: TestClient, run: RunDir, engine: tuple[SmallEngine, str]
) -> None:
    assert (await (await page.get("/api/run/talks/chat")).json())["live"]
    messages = [{"role": "user", "content": "is it so?"}]
    answer = await page.post("/api/run/talks/chat", json={"place": "live", "messages": messages, "max_tokens": 4})
    assert answer.status == 200 and '"content": "yes"' in await answer.text()
    assert engine[0].keys == [f"Bearer {load_secret(run).text_key('inference.api_key')}"]
    assert engine[0].asked[0] == {
        "model": "small", "messages": messages, "temperature": 1.0, "max_tokens": 4, "stream": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"temperature": 11}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"place": "started"}, "no engine is started"),
        ({"temperature": 9}, "too hot"),
    ],
)
async def test_a_wrong_message_gets_one_sentence(page: TestClient, words: dict[str, Any], says: str) -> None:
    body = {"place": "live", "messages": [{"role": "user", "content": "x"}], **words}
    answer = await page.post("/api/run/talks/chat", json=body)
    assert answer.status in (400, 404) and says in (await answer.json())["error"]


async def test_without_the_token_there_is_no_chat_and_another_site_is_refused(page: TestClient) -> None:
    body = {"place": "live", "messages": [{"role": "user", "content": "x"}]}
    own = page.make_url("/api/run/talks/chat")
    other = await page.post("/api/run/talks/chat", json=body, headers={"Origin": "http://evil.example"})
    form = await page.post("/api/run/talks/chat", data={"place": "live"})
    page.session.cookie_jar.clear()
    assert other.status == 403 and form.status == 415 and (await page.session.post(own, json=body)).status == 401


async def test_weights_that_are_not_there_or_need_too_much_memory_start_nothing(
    page: TestClient, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await page.post("/api/run/talks/chat/start", json={"step": 5})).status == 400
    weights = run.weights_step(5)
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    asks = (await (await page.post("/api/run/talks/chat/start", json={"step": 5})).json())["ask"]
    assert "talks goes on" in asks and "GB of memory" in asks
    monkeypatch.setattr(chat, "_memory", lambda path: (9e9, 1e9))
    answer = await page.post("/api/run/talks/chat/start", json={"step": 5, "is_sure": True})
    assert answer.status == 400 and "9.0 GB" in await answer.text()


async def test_each_engine_says_what_it_does_and_one_that_is_gone_breaks_nothing(
    run: RunDir, engine: tuple[SmallEngine, str]
) -> None:
    settings = json.loads(run.config("run").read_text())
    settings["orchestrator"]["client"]["admin_base_url"] = [engine[1], "http://127.0.0.1:9"]
    run.config("run").write_text(json.dumps(settings))
    opened = OpenRun(run.path)
    await asyncio.to_thread(now.engines, opened)
    busy, gone = await asyncio.to_thread(now.engines, opened)
    assert (busy["running"], busy["waiting"], busy["cache"], busy["version"]) == (3.0, 0.0, 0.25, 7.0)
    assert busy["tokens_per_s"] > 0 and "does not answer" in gone["error"]
    assert sum((await asyncio.to_thread(now.staleness, opened) or {}).values()) == pytest.approx(1.0)


async def test_a_run_of_another_user_is_not_told_our_key(
    page: TestClient, run: RunDir, engine: tuple[SmallEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    body = {"place": "live", "messages": [{"role": "user", "content": "x"}]}
    answer = await page.post("/api/run/talks/chat", json=body)
    assert answer.status == 400 and "another user's" in (await answer.json())["error"]
    assert await asyncio.to_thread(now.engines, OpenRun(run.path)) == [] and engine[0].keys == []
