"""Engines that take turns with a trainer, as `EngineClient` asks them: the embedded engine, and what vLLM is sent.

vLLM on a CPU has no sleep mode. Its `/wake_up` lets requests run when weights and cache are both there, its
`/resume` at once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from aiohttp import web
from servers import logprobs_of, save, scratch, serve

from stretto.models.hub import export_tensors
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher

PROMPT = np.arange(20, 90, dtype=np.int32)


def ask(name: str, max_tokens: int = 8) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, cache_salt=name)


def test_a_request_that_comes_while_engines_sleep_is_answered_when_weights_and_cache_are_there(tmp_path: Path) -> None:
    """Between the two steps of waking an engine has no cache: the update of weights must not let requests run."""
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    model = save(scratch(0), tmp_path / "model")

    async def check(url: str) -> None:
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(300)
            await client.update_weights(publisher.publish(1, export_tensors(scratch(0))))
            for version, level in ((2, 2), (3, 2), (4, 1)):
                running = asyncio.create_task(client.generate(ask(f"long-{version}", 400)))
                await asyncio.sleep(0.5)
                await client.sleep(level)
                [ended] = await running
                assert ended.finish_reason == "abort" or len(ended.token_ids) == 400
                waiting = asyncio.create_task(client.generate(ask(f"asleep-{version}")))
                await asyncio.sleep(0.3)
                await client.wake_up("weights")
                if version == 3:  # what a failed update leads to: all of its calls are made again
                    client._load_between_steps.clear()
                    await client._admin(url, f"{api.PAUSE}?mode=keep&clear_cache=false")
                await client.update_weights(publisher.publish(version, export_tensors(scratch(version % 2))))
                await asyncio.sleep(0.5)
                assert not waiting.done()
                await client.wake_up("kv_cache")
                [completion] = await waiting
                assert [span.version for span in completion.versions] == [version]
                whole = np.concatenate([PROMPT, completion.token_ids])
                expected = logprobs_of(scratch(version % 2), whole)[len(PROMPT) - 1 :]
                np.testing.assert_allclose(completion.logprobs, expected, atol=5e-5, rtol=0)

    with serve("embedded", model, tmp_path / "log", "--device", "cpu") as (url, _):
        asyncio.run(check(url))


async def test_an_engine_without_a_cache_is_not_resumed(tmp_path: Path) -> None:
    """Like vLLM it is paused to load; resumed without a cache, it would run requests on memory that is not there."""
    called: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        called.append(request.path_qs)
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    async with EngineClient([url], timeout_s=30) as client:
        for version in (1, 2):
            await client.sleep(2)
            await client.wake_up("weights")
            await client.update_weights(publisher.publish(version, export_tensors(scratch(0))))
            await client.wake_up("kv_cache")
        await client.update_weights(publisher.publish(3, export_tensors(scratch(0))))
    await runner.cleanup()
    load = [f"{api.PAUSE}?mode=keep&clear_cache=false", api.START_UPDATE, api.UPDATE_WEIGHTS, api.FINISH_UPDATE]
    turn = [f"{api.SLEEP}?level=2&mode=abort", f"{api.WAKE_UP}?tags=weights", *load, f"{api.WAKE_UP}?tags=kv_cache"]
    assert called == [*turn, *turn, *load, api.RESUME]
