"""Routes that stretto adds to vLLM's server: liveness of workers, admission, abort, world size.

vLLM's /health answers 200 as long as the HTTP process lives, even if the engine is dead or hangs. All other routes of
the contract in transports/engine/api.py are vLLM's own.
"""

# mypy: disable-error-code="untyped-decorator"
# FastAPI is installed with vLLM only.

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.rl.online.metrics import weight_operation_metrics

from stretto.base.errors import EngineError, WireError
from stretto.config.sections.engines import ADMITTED, HOLD_VAR, PEERS_VAR
from stretto.config.sections.inference import KEY_VAR
from stretto.inference.update_order import UpdateState
from stretto.transports.engine import api
from stretto.transports.engine.updates import encode_started
from stretto_vllm.command import OPEN_BYTES_VAR, WAITING_VAR
from stretto_vllm.guard import Guard
from stretto_vllm.patches.adapters import AdapterLimits, enforce_limits
from stretto_vllm.peers import Peers
from stretto_vllm.updates import Updates, loads_between_steps
from stretto_vllm.worker import num_workers

LIVENESS_TIMEOUT_S = 10.0
_ID_PREFIX = "generate-tokens-"
"""Prefix of vLLM's internal ids for requests of the generate route."""

router = APIRouter()
failures: list[bool] = []
"""For each shutdown call, whether the engine had failed before it; only the first entry is reliable."""
peers = Peers(os.environ.get(PEERS_VAR, "").split())
"""The other nodes of an engine over several nodes."""
engine_callbacks: list[Callable[[], None]] = []
"""Called when the engine is ready, and before it shuts down."""


@router.get(api.LIVENESS)
async def liveness(request: Request) -> JSONResponse:
    """200 when every worker answers in time; while weights are loaded, workers are called only with ?idle=true.

    A worker that loads weights, or waits for other engines to load them, answers no other call until then. Loading has
    a deadline of its own.
    """
    client, updating = request.app.state.engine_client, request.app.state.updates
    is_loading = request.state.num_commands > 0 and not updating.is_receiving and api.IDLE not in request.url.query
    try:
        async with asyncio.timeout(LIVENESS_TIMEOUT_S):
            await client.check_health()
            if not is_loading:
                await client.collective_rpc("stretto_is_alive")
    except TimeoutError:
        return _error(f"a worker did not answer in {LIVENESS_TIMEOUT_S:g} s", 503)
    except Exception as error:  # a dead engine may raise anything
        return _error(f"{type(error).__name__}: {error}", 500)
    return JSONResponse({"status": "ok"})


@router.get(ADMITTED)
async def admitted(request: Request) -> JSONResponse:
    """200 if this engine is healthy, in a run has loaded its weights, and does not leave it; routers call this."""
    client = request.app.state.engine_client
    try:
        await client.check_health()
        version = await client.get_weight_version()
    except Exception as error:  # a dead engine may raise anything
        return _error(f"{type(error).__name__}: {error}", 503)
    if os.environ.get(HOLD_VAR) and version == "default":
        return _error("this engine is waiting for the run's weights", 503)
    if not getattr(request.app.state, "is_open", True):
        return _error("this engine leaves its run", 503)
    return JSONResponse({"status": "ok"})


@router.post(api.ADMIT)
async def admit(request: Request) -> JSONResponse:
    """Whether routers may send this engine requests, from now on."""
    try:
        request.app.state.is_open = api.decode_open(request.query_params)
    except api.Refusal as refusal:
        return _error(str(refusal), refusal.status)
    return JSONResponse({"status": "ok"})


@router.get(api.WORLD_SIZE)
async def world_size(request: Request) -> JSONResponse:
    """The number of processes behind this address that receive weights.

    vLLM's own route counts the processes of all nodes. Servers that return the same `engine` are nodes of one engine:
    their ranks compute every step together.
    """
    config = request.app.state.engine_client.vllm_config
    parallel, name = config.parallel_config, None
    if parallel.local_engines_only and config.model_config.is_moe:
        name = f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}"
    return JSONResponse({"world_size": num_workers(parallel), "engine": name})


@router.post(api.START_UPDATE)
async def start_update(request: Request) -> Response:
    """vLLM's, also after an update that was not finished; says whether UPDATE_WEIGHTS alone would do."""
    client, updating = request.app.state.engine_client, request.app.state.updates
    with weight_operation_metrics().record("start"):
        await updating.start(request.state.update_order)
    started = encode_started(loads_between_steps=loads_between_steps(client.vllm_config))
    return Response(started, media_type="application/json")


@router.post(api.UPDATE_WEIGHTS)
async def update_weights(request: Request) -> JSONResponse:
    """Load a version; without START_UPDATE before it, a whole update."""
    updating, order = request.app.state.updates, request.state.update_order
    info = (await request.json())["update_info"]
    with weight_operation_metrics().record("update"):
        if order.state is UpdateState.STARTED:  # the guard's, also after an earlier UPDATE_WEIGHTS
            await updating.load_paused(info)
        else:
            try:
                await updating.load(info, order)
            except (EngineError, WireError) as error:
                return _error(str(error), 409)
    return JSONResponse({"message": "Weights updated"})


@router.post(api.ABORT)
async def abort(request: Request) -> JSONResponse:
    """End requests of the generate route by the ids in the body; all requests if there are none."""
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


def hide_directories(models: Any) -> None:
    """Let vLLM's list of models give names where it gives directories of this machine."""
    list_all = models.show_available_models

    async def show_available_models() -> Any:
        found = await list_all()
        for card in found.data:
            card.root = card.id
        return found

    models.show_available_models = show_available_models


class Routes:
    """Our endpoint plugin; vLLM calls its methods by these names."""

    name = "stretto"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.include_router(router)
        waiting, num_bytes = (
            int(text) if (text := os.environ.get(name)) else None for name in (WAITING_VAR, OPEN_BYTES_VAR)
        )
        key = os.environ.get(KEY_VAR) or None
        app.add_middleware(Guard, key=key, max_waiting=waiting, max_open_bytes=num_bytes)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called when the engine is ready: wraps shutdown, updates and the list of models, and limits adapters."""
        original_shutdown = engine_client.shutdown

        def shutdown(*args: Any, **kwargs: Any) -> None:
            if not failures and engine_client.errored:
                peers.find_lost()
            failures.append(engine_client.errored)
            for call in engine_callbacks:
                call()
            original_shutdown(*args, **kwargs)

        engine_client.shutdown = shutdown
        state.updates = Updates(engine_client)
        hide_directories(state.openai_serving_models)
        for call in engine_callbacks:
            call()
        config = engine_client.vllm_config
        # Data-parallel ranks depend on each other only in a mixture; in other models they are independent engines.
        if peers.urls and (config.model_config.is_moe or config.parallel_config.nnodes > 1):
            self._watching = asyncio.create_task(peers.watch())
        if args.enable_lora:
            targets = tuple(args.lora_target_modules or ())
            enforce_limits(AdapterLimits(args.max_loras - 1, args.max_lora_rank, targets, Path(args.model)))
