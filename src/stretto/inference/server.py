"""The inference process: one embedded engine behind vLLM's and OpenAI's HTTP routes.

`main` listens immediately (/liveness 200, /health 503), loads the model, then serves. Token routes are here, text
routes in openai.py; embedded/ computes the replies, and boundary.py answers requests that fail. For a reward
model an add-on has a server of its own. An exception in the engine itself ends the process with a traceback in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from aiohttp import web

from stretto import addons
from stretto.base import log
from stretto.base.errors import ConfigError, StrettoError, WireError
from stretto.base.process import visible_gpus
from stretto.base.runtime import freeze_objects, keep_freed_memory, raise_file_limit
from stretto.base.status import is_supervised
from stretto.chat.tokenizer import end_ids
from stretto.check.engines import EMBEDDED, engine_of
from stretto.config.sections.engines import ADMITTED, HOLD_VAR, LEAVES_FIRST_VAR
from stretto.data.hub_model import fetch
from stretto.data.model_file import has_own_family, is_classifier
from stretto.inference.boundary import (
    MAX_ADMIN_BYTES,
    RUNNER_SETTINGS,
    build_app,
    hold_pixels,
    json_response,
    max_body_bytes,
    read_body,
)
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.inference.embedded.engine import FAILED, Engine, EngineState
from stretto.inference.limits import too_many_adapters
from stretto.inference.openai import OpenAIRoutes
from stretto.inference.update_order import UpdateOrder
from stretto.models.hub import dtype_of, load_model
from stretto.models.tracing.tracer import Tracer
from stretto.records.generate import GenerateRequest
from stretto.transports.engine import api, updates
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.completions import encode_completions
from stretto.transports.engine.images import VisionSizes

if TYPE_CHECKING:
    from stretto.config.root import InferenceConfig

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 0.5
_LARGE_BODY_BYTES = 1 << 20
_ONE_THREAD_BELOW_PARAMETERS = 30_000_000


class Server:
    """The routes over one engine, which is None until the model is loaded."""

    def __init__(self, cfg: InferenceConfig) -> None:
        self.cfg = cfg
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self._loaded_version: str | None = None  # of the last weight update
        self._is_open = True  # to routers
        self.order = UpdateOrder()
        self.directory = model_directory(cfg)
        assert cfg.model is not None, "refused by model_directory"
        self.model_name = cfg.served_model_name or cfg.model
        self.openai = OpenAIRoutes(self.directory, self.model_name, self.ready_engine)

    def app(self) -> web.Application:
        app = build_app(self.cfg.key, self.cfg.server.max_open_bytes)
        get = {
            api.HEALTH: self.health,
            api.LIVENESS: self.liveness,
            ADMITTED: self.admitted,
            api.WORLD_SIZE: self.world_size,
            api.MODELS: self.models,
            api.METRICS: self.metrics,
            api.IS_PAUSED: self.is_paused,
            api.IS_SLEEPING: self.is_sleeping,
        }
        post = {
            api.GENERATE: self.generate,
            api.COMPLETIONS: self.openai.completions,
            api.CHAT_COMPLETIONS: self.openai.chat_completions,
            api.TOKENIZE: self.openai.tokenize,
            api.DETOKENIZE: self.openai.detokenize,
            api.PAUSE: self.pause,
            api.RESUME: self.resume,
            api.SLEEP: self.sleep,
            api.WAKE_UP: self.wake_up,
            api.START_UPDATE: self.start_update,
            api.UPDATE_WEIGHTS: self.update_weights,
            api.FINISH_UPDATE: self.finish_update,
            api.LOAD_ADAPTER: self.load_adapter,
            api.UNLOAD_ADAPTER: self.unload_adapter,
            api.RESET_PREFIX_CACHE: self.reset_prefix_cache,
            api.ABORT: self.abort,
            api.ABORT_REQUESTS: self.abort,
            api.ADMIT: self.admit,
        }
        app.router.add_routes([web.get(path, handler) for path, handler in get.items()])
        app.router.add_routes([web.post(path, handler) for path, handler in post.items()])
        return app

    async def run(self) -> None:
        """Load the model, then compute replies as long as this task lives."""
        cfg, started = self.cfg, time.perf_counter()
        core = await asyncio.get_running_loop().run_in_executor(None, build_core, cfg, self.directory)
        self.engine = Engine(
            core,
            model_name=self.model_name,
            max_waiting=cfg.server.max_waiting_requests,
            decoder=self.openai.decoder,
            encoder=self.openai.encoder,
            tracer=Tracer(cfg.run_dir if cfg.run.name else None, f"inference-{cfg.server.port}"),
        )
        freeze_objects()
        logger.info(
            "ready on http://%s:%d in %.1f s: %s, %s on %s, max_model_len=%d, %d blocks of %d tokens",
            cfg.server.host, cfg.server.port, time.perf_counter() - started, self.model_name,
            str(core.model.output_weight.dtype).removeprefix("torch."),
            core.cache.device, core.max_model_len, core.pool.num_usable, core.settings.block_size,
        )  # fmt: skip
        await self.engine.run()

    @property
    def is_loaded(self) -> bool:
        return self.engine is not None

    def close(self) -> None:
        """End the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()

    def ready_engine(self) -> Engine:
        """The engine. Raises: Refusal 503 while the model is loading."""
        if self.engine is None:
            raise Refusal("the model is being loaded; wait until /health answers 200", 503)
        return self.engine

    async def health(self, _: web.Request) -> web.Response:
        if self.failure is not None or (self.engine and self.engine.state is EngineState.FAILED):
            raise Refusal(FAILED, 500)
        if self.engine is None:
            raise Refusal("the model is being loaded", 503)
        return web.Response()

    async def liveness(self, _: web.Request) -> web.Response:
        return web.Response()

    async def admitted(self, _: web.Request) -> web.Response:
        """200 if the engine is healthy, in a run has loaded its weights, and does not leave it; routers call this."""
        if self.engine is None or (os.environ.get(HOLD_VAR) and self._loaded_version is None):
            raise Refusal("this engine is waiting for the run's weights", 503)
        if not self._is_open:
            raise Refusal("this engine leaves its run", 503)
        return await self.health(_)

    async def admit(self, http: web.Request) -> web.Response:
        self._is_open = api.decode_open(http.query)
        return json_response({"status": "ok"})

    async def load_adapter(self, http: web.Request) -> web.Response:
        body = api.decode_json(await read_body(http, MAX_ADMIN_BYTES), api.LoadAdapterBody)
        name = body.lora_name
        if not name or not body.lora_path:
            raise Refusal("lora_name and lora_path: both are needed")
        if name == self.model_name:
            raise Refusal(f"lora_name: {name!r} is the name of the model itself; use another")
        adapters, section = self.ready_engine().core.adapters, self.cfg.lora
        if section is not None and adapters.get(name) is None and len(list(adapters)) >= section.max_loras:
            raise Refusal(too_many_adapters(section.max_loras))
        await self.ready_engine().load_adapter(name, body.lora_path, is_replacing=body.load_inplace)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, http: web.Request) -> web.Response:
        name = api.decode_json(await read_body(http, MAX_ADMIN_BYTES), api.UnloadAdapterBody).lora_name
        await self.ready_engine().unload_adapter(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def models(self, _: web.Request) -> web.Response:
        core = self.ready_engine().core
        card = {
            "id": self.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "stretto",
            "root": self.model_name,  # vLLM's has the directory, which is no business of a client
            "parent": None,
            "max_model_len": core.max_model_len,
        }
        adapters = [card | {"id": each.name, "root": each.name, "parent": self.model_name} for each in core.adapters]
        return json_response({"object": "list", "data": [card, *adapters]})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.ready_engine().metrics_page())

    async def generate(self, http: web.Request) -> web.Response:
        request = await self._read_generate(http)
        done = await self.ready_engine().generate(request)
        return json_response(encode_completions(request, done.results, done.stop_reasons))

    async def _read_generate(self, http: web.Request) -> GenerateRequest:
        """Decode a body; requests with equal images share their pixels."""
        core = self.ready_engine().core
        limit = max_body_bytes(core.max_model_len, vision=VisionSizes.of(core.config.hf))
        body = await read_body(http, limit)
        if len(body) < _LARGE_BODY_BYTES:
            request, model = api.decode_generate(body)
        else:  # pixels of images, which are hashed as well
            request, model = await asyncio.to_thread(api.decode_generate, body)
        images = request.images if core.images is None else core.images.shared(request.images)
        hold_pixels(http, images)
        return msgspec.structs.replace(request, adapter=self.openai.adapter_of(model), images=images)

    async def pause(self, http: web.Request) -> web.Response:
        mode = api.pause_mode(http.query)
        clear = http.query.get("clear_cache", "true").lower() not in ("false", "0")
        with self.order.call(api.PAUSE):
            await self.ready_engine().pause(mode, clear_cache=clear)
        return json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        with self.order.call(api.RESUME):
            await self.ready_engine().resume()
        return json_response({"status": "resumed"})

    async def sleep(self, http: web.Request) -> web.Response:
        level = http.query.get("level", "1")
        if level not in ("1", "2"):
            raise Refusal(f"level: {level!r} must be 1 (keeps the weights) or 2 (drops them)")
        await self.ready_engine().sleep(int(level))
        return json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, http: web.Request) -> web.Response:
        tags = http.query.getall("tags", list(api.SLEEP_TAGS))
        if unknown := sorted({*tags} - {*api.SLEEP_TAGS}):
            raise Refusal(f"tags: {unknown[0]!r} is not one of {', '.join(api.SLEEP_TAGS)}")
        await self.ready_engine().wake_up(tags)
        is_asleep = self.ready_engine().state is EngineState.SLEEPING
        return json_response({"status": "sleeping" if is_asleep else "awake", "tags": tags})

    async def is_sleeping(self, _: web.Request) -> web.Response:
        return json_response({"is_sleeping": self.ready_engine().state is EngineState.SLEEPING})

    async def is_paused(self, _: web.Request) -> web.Response:
        return json_response({"is_paused": self.ready_engine().state is EngineState.PAUSED})

    async def world_size(self, _: web.Request) -> web.Response:
        return json_response(updates.encode_world_size(1))

    async def start_update(self, _: web.Request) -> web.Response:
        with self.order.call(api.START_UPDATE):
            self.ready_engine()
        return json_response(updates.encode_started(loads_between_steps=True))

    async def update_weights(self, http: web.Request) -> web.Response:
        update = updates.decode_update(await read_body(http, MAX_ADMIN_BYTES))
        manifest = update.manifest
        try:
            with self.order.call(api.UPDATE_WEIGHTS):
                updated = await self.ready_engine().update(manifest, update.group)
        except WireError as error:  # nothing was loaded; the engine continues
            raise Refusal(str(error), 409) from error
        self._loaded_version = str(manifest.version)
        return json_response(updates.encode_updated(self._loaded_version, updated))

    async def finish_update(self, http: web.Request) -> web.Response:
        """End an update; if the body has a version, it must be that of the manifest."""
        version = updates.decode_finish(await read_body(http, MAX_ADMIN_BYTES))
        with self.order.call(api.FINISH_UPDATE):
            if self._loaded_version is None:
                raise Refusal("no weights were loaded; send them to /update_weights first", 409)
            if version is not None and version != self._loaded_version:
                raise Refusal(f"weight_version: {version!r}, but the loaded weights are {self._loaded_version!r}")
        return json_response({"message": "Weight update finished"})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        await self.ready_engine().reset_prefix_cache()
        return json_response({"success": True})

    async def abort(self, http: web.Request) -> web.Response:
        body = await read_body(http, MAX_ADMIN_BYTES)
        ids = api.decode_json(body, api.AbortBody).request_ids if body else None
        await self.ready_engine().abort(ids)
        return json_response({"status": "ok"})


def model_directory(cfg: InferenceConfig) -> Path:
    """The directory of the model. Raises: ConfigError if it is not configured or does not exist."""
    if cfg.model is None:
        raise ConfigError("[inference] model is missing; give the directory of a model.")
    return fetch(cfg.model)


def main(cfg: InferenceConfig) -> int:
    """Serve until SIGTERM or SIGINT (0), or until the engine fails (1)."""
    log.setup("inference", cfg.run_dir if cfg.run.name else None, cfg.log.level, cfg.log.json_logging)
    raise_file_limit()
    cfg = with_address(cfg)
    if cfg.model is not None and is_classifier(cfg.model):
        return addons.load("stretto.inference", "scorer", f"{cfg.model}, a reward model,")(cfg, model_directory(cfg))
    is_own = cfg.model is None or has_own_family(cfg.model)
    engine = engine_of(cfg, has_gpu=bool(visible_gpus()), is_own=is_own)
    if engine is not EMBEDDED:
        return engine.serve(cfg, model_directory(cfg))
    keep_freed_memory()
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    return asyncio.run(serve(cfg))


def with_address(cfg: InferenceConfig) -> InferenceConfig:
    """Listen on all addresses if this engine was started alone, with a key and without an address.

    The key protects it. Engines that a launcher starts have an address in their config.
    """
    if cfg.key is None or "host" in cfg.server.model_fields_set or is_supervised():
        return cfg
    logger.info("listening on all addresses, because a key is set; --host 127.0.0.1 is for this machine only")
    return cfg.model_copy(update={"server": cfg.server.model_copy(update={"host": "0.0.0.0"})})


async def serve(cfg: InferenceConfig) -> int:
    """Serve the language model of an [inference] section; returns the process's exit code."""
    return await listen(cfg, Server(cfg))


class Served(Protocol):
    """What `listen` serves."""

    failure: BaseException | None

    @property
    def is_loaded(self) -> bool:
        """Whether its model is loaded: what fails before is the user's to mend."""

    def app(self) -> web.Application:
        """Its routes."""

    async def run(self) -> None:
        """Load the model, then work as long as this task lives."""

    def close(self) -> None:
        """End what it has started."""


async def listen(cfg: InferenceConfig, server: Served) -> int:
    """Listen, load, serve; returns the process's exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: None if _is_leaving_first() else stop.set())
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=_SHUTDOWN_S, **RUNNER_SETTINGS)
    await runner.setup()
    host, port = cfg.server.host, cfg.server.port
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"[inference.server] cannot listen on {host}:{port}: {error.strerror or error}. `ss -ltnp` shows which "
            "process uses the port: stop it, or set another server.port."
        ) from error
    work = asyncio.create_task(server.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            logger.info("stopping")
            return 0
        server.failure = work.exception()
        if isinstance(server.failure, StrettoError) and not server.is_loaded:
            raise server.failure
        return 1
    finally:
        stopping.cancel()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work
        server.close()
        await runner.cleanup()


def _is_leaving_first() -> bool:
    """Whether the process that let this engine join a run was asked to let it leave, at which it ends this one."""
    asked = os.environ.get(LEAVES_FIRST_VAR)
    if asked is None or int(asked) != os.getppid():
        return False
    logger.info("leaving the run first")
    os.kill(int(asked), signal.SIGTERM)
    return True


def build_core(cfg: InferenceConfig, directory: Path) -> EngineCore:
    """Build the engine of an [inference] section."""
    device = cfg.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('[inference] device = "cuda", but no CUDA device is visible; use "cpu" or "auto".')
    model = load_model(directory, dtype=dtype_of(cfg.dtype, device), device=device, may_be_quantized=True)
    is_small = sum(p.numel() for p in model.parameters()) < _ONE_THREAD_BELOW_PARAMETERS
    if is_small and cfg.num_threads is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # starting threads takes longer than computing a small product
    drafts = None
    if cfg.speculation is not None:
        drafts = addons.load("stretto.inference", "drafts", "[inference.speculation]")(cfg.speculation)
    settings = CoreSettings(
        max_model_len=cfg.max_model_len,
        kv_cache_tokens=cfg.kv_cache_tokens,
        block_size=cfg.block_size or CoreSettings.block_size,
        max_num_seqs=cfg.max_num_seqs,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        enable_prefix_caching=cfg.enable_prefix_caching,
        gpu_memory_utilization=cfg.gpu_memory_utilization,
        enable_return_routed_experts=cfg.enable_return_routed_experts,
        enable_return_sampling_mask=cfg.enable_return_sampling_mask,
        seed=cfg.seed,
        use_kernels=model.layout is None,
        build_drafter=drafts,
        eos_ids=end_ids(directory),
    )
    return EngineCore(model, settings)
