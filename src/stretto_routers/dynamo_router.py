"""Dynamo's frontend in front of engines that are not Dynamo's; run by a Python that has Dynamo.

    PYTHON -P dynamo_router.py --model DIRECTORY --name NAME --engines URL... -- FLAGS OF dynamo.frontend

In: addresses of engines with the routes of transports/engine/api.py. Out: the frontend, which chooses an engine for
each request to /inference/v1/generate. For Dynamo, engines are workers on its own wire. So every engine has a worker
here: it joins Dynamo's list while its engine is admitted, leaves the list when the engine does not answer, and passes
requests on unchanged. The answer has tokens and log-probabilities; for what Dynamo has no field for (versions of the
weights, cached tokens) it uses `kv_transfer_params`, which Dynamo does not read.

All of Dynamo is in this process: workers, frontend and their list, which is a directory of files. Its wires listen at
127.0.0.1 on ports that the system chooses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any

LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
GENERATE = "/inference/v1/generate"
ADMITTED = "/admitted"
CAPABILITY = "vllm_inference_v1_generate"
BLOCK_TOKENS = 16
POLL_S = 0.5
TIMEOUT_S = 10.0  # for an engine's answer to /admitted
# The engine is full or starting: Dynamo answers 503, and the client tries again.
RETRY_STATUSES = (409, 429, 503)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the frontend handles it
    at = sys.argv.index("--")
    options, frontend = _options(sys.argv[1:at]), sys.argv[at + 1 :]
    with tempfile.TemporaryDirectory(prefix="stretto-dynamo-") as directory:
        os.environ.update(dict.fromkeys(LOOPBACK, "127.0.0.1"))
        os.environ.update(
            DYN_DISCOVERY_BACKEND="file",
            DYN_FILE_KV=directory,
            DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE="1",
            DYN_SELF_HOST_METADATA="0",
            HF_HUB_OFFLINE="1",
        )
        os.environ.setdefault("DYN_LOG", "warn")
        sys.argv = [sys.argv[0], *frontend, "--discovery-backend", "file"]
        asyncio.run(_run(options))


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--engines", nargs="+", required=True)
    return parser.parse_args(words)


async def _run(options: argparse.Namespace) -> None:
    import aiohttp
    from dynamo.frontend.main import async_main

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        workers = [Worker(http, url, rank, options) for rank, url in enumerate(options.engines)]
        watches = [asyncio.create_task(worker.watch()) for worker in workers]
        frontend = asyncio.ensure_future(async_main())  # ends at SIGTERM
        done, _ = await asyncio.wait([frontend, *watches], return_when=asyncio.FIRST_COMPLETED)
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        if not frontend.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await frontend
        for task in done:
            task.result()  # raises the error that ended it


class Worker:
    """One engine, as a worker of Dynamo."""

    def __init__(self, http: Any, url: str, rank: int, options: argparse.Namespace) -> None:
        self.http, self.url, self.rank, self.options = http, url, rank, options

    async def watch(self) -> None:
        """Serve as a worker of Dynamo while the engine is admitted; runs for ever."""
        while True:
            if await self._is_admitted():
                await self._serve()
            await asyncio.sleep(POLL_S)

    async def _is_admitted(self) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_S), self.http.get(self.url + ADMITTED) as answer:
                return answer.status == 200
        except (OSError, TimeoutError):
            return False

    async def _serve(self) -> None:
        """Join Dynamo's list; leave it when the engine is no longer admitted."""
        from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
        from dynamo.runtime import DistributedRuntime

        runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
        endpoint = runtime.endpoint("stretto.engines.generate")
        model_config = ModelRuntimeConfig()
        model_config.set_engine_specific(CAPABILITY, "true")
        serving = asyncio.ensure_future(endpoint.serve_endpoint(self.generate, graceful_shutdown=False))
        try:
            await register_model(
                ModelInput.Tokens,
                ModelType.Completions,
                endpoint,
                self.options.model,
                self.options.name,
                runtime_config=model_config,
                kv_cache_block_size=BLOCK_TOKENS,
                worker_type=WorkerType.Aggregated,
            )
            print(f"{self.url} takes requests", flush=True)
            while await self._is_admitted():
                await asyncio.sleep(POLL_S)
            print(f"{self.url} takes no requests", flush=True)
        finally:
            runtime.shutdown()
            with contextlib.suppress(BaseException):
                await serving

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Send one request to the engine; yields its answer as Dynamo's chunks, one per sample."""
        from dynamo.llm.exceptions import HttpError

        body = {**request["extra_args"]["vllm_tito"], "token_ids": request["token_ids"]}
        post = asyncio.create_task(self._post(body))
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        try:
            await asyncio.wait([post, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not post.done():
                return
            status, answer = post.result()
        finally:
            post.cancel()  # the engine ends a request whose client has disconnected
            stopped.cancel()
        if status != 200:
            raise HttpError(503 if status in RETRY_STATUSES else status, str(answer)[:1000])
        for chunk in chunks(answer):
            yield chunk

    async def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with self.http.post(self.url + GENERATE, json=body, headers=headers) as answer:
                is_json = answer.content_type == "application/json"
                return answer.status, await (answer.json() if is_json else answer.text())
        except OSError as error:
            return 503, f"{self.url}: {error}"


def chunks(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """An engine's answer in the form of Dynamo's workers: one chunk per sample."""
    choices = answer["choices"]
    versions = {str(choice["index"]): choice.get("weight_versions") or [] for choice in choices}
    more = {"stretto": {"weight_versions": versions, "usage": answer.get("usage")}}
    optional = ("routed_experts", "sampling_mask")
    return [
        {
            "index": choice["index"],
            "token_ids": choice["token_ids"],
            "log_probs": [token["logprob"] for token in choice["logprobs"]["content"]],
            "finish_reason": choice["finish_reason"],
            "engine_data": {key: choice[key] for key in optional if choice.get(key) is not None}
            | {"kv_transfer_params": more},
        }
        for choice in choices
    ]


if __name__ == "__main__":
    main()
