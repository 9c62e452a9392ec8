"""Routes that stretto adds to vLLM's server: liveness that asks the workers, and abort by our own request ids.

vLLM's /health says that the HTTP process lives, also over an engine that is dead or hangs. Everything else of
the contract in transports/engine/api.py are vLLM's own routes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from stretto.config.engines import ADMITTED, HOLD_VAR
from stretto.inference.vllm.adapters import Limits, guard
from stretto.transports.engine import api

LIVENESS_TIMEOUT_S = 10.0
_ID_PREFIX = "generate-tokens-"
"""vLLM's own name for a request of the generate route begins so."""

router = APIRouter()
clients: list[Any] = []
"""The engines of this process, one."""


@router.get(api.LIVENESS)
async def liveness(request: Request) -> JSONResponse:
    """200 when every worker answers in time."""
    client = request.app.state.engine_client
    try:
        async with asyncio.timeout(LIVENESS_TIMEOUT_S):
            await client.check_health()
            await client.collective_rpc("stretto_is_alive")
    except TimeoutError:
        return _error(f"a worker did not answer in {LIVENESS_TIMEOUT_S:g} s", 503)
    except Exception as error:  # whatever a dead engine raises
        return _error(f"{type(error).__name__}: {error}", 500)
    return JSONResponse({"status": "ok"})


@router.get(ADMITTED)
async def admitted(request: Request) -> JSONResponse:
    """200 when this engine is healthy and holds the run's weights: what a router asks."""
    client = request.app.state.engine_client
    try:
        await client.check_health()
        version = await client.get_weight_version()
    except Exception as error:  # whatever a dead engine raises
        return _error(f"{type(error).__name__}: {error}", 503)
    if os.environ.get(HOLD_VAR) and version == "default":
        return _error("this engine waits for the run's weights", 503)
    return JSONResponse({"status": "ok"})


@router.post(api.ABORT)
async def abort(request: Request) -> JSONResponse:
    """End these requests of the generate route, by the ids they were sent with; none given: all."""
    body = await request.body()
    try:
        ids = api.decode_json(body, api.AbortBody).request_ids if body else None
    except api.Refusal as refusal:
        return _error(str(refusal), refusal.status)
    client = request.app.state.engine_client
    if ids is None:
        processor = client.output_processor
        await client.abort([*processor.request_states, *processor.parent_requests], internal=True)
    else:
        await client.abort([name for i in ids for name in (i, _ID_PREFIX + i)])
    return JSONResponse({"status": "ok"})


def _error(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "EngineError", "code": status}}, status)


class Routes:
    """vLLM's protocol of an endpoint plugin."""

    name = "stretto"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Routes reach the engine through the app; launch.py asks it at the end whether it has failed."""
        clients.append(engine_client)
        if args.enable_lora:
            targets = tuple(args.lora_target_modules or ())
            guard(Limits(args.max_loras - 1, args.max_lora_rank, targets, Path(args.model)))
