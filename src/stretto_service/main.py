"""The hub process: opens the API at once, waits for trainer and engines, and serves until SIGTERM or SIGINT.

Before it ends it saves every run. Its state is in RUN/service, from which the next hub continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import sys
import time

from aiohttp import web

from stretto.base import log
from stretto.base.errors import ConfigError
from stretto.base.runtime import raise_file_limit
from stretto.base.secret import load_secret
from stretto.transports.engine.client import EngineClient
from stretto_service.access import Access, Reading, User, prepare_tokens
from stretto_service.config import ServeConfig
from stretto_service.engines import Engines, WeightSlot
from stretto_service.futures import Futures
from stretto_service.hub import MAX_BODY_BYTES, Hub, boundary, model_facts
from stretto_service.runs.admin import AdminRoutes
from stretto_service.runs.directory import RunsDirectory
from stretto_service.runs.engine import EngineRoutes
from stretto_service.runs.native import NativeRoutes
from stretto_service.runs.routes import RunRoutes
from stretto_service.store import Audit, Session, Store
from stretto_service.tinker.account import AccountRoutes
from stretto_service.tinker.rest import RestRoutes
from stretto_service.tinker.routes import TinkerRoutes
from stretto_service.tinker.samples import SampleRoutes
from stretto_service.training.jobs import Limits
from stretto_service.training.training import Training
from stretto_service.wires.operations import BASE_WEIGHTS

logger = logging.getLogger(__name__)

SAVE_S = 20.0
"""Longest wait at the end until the runs are saved."""
_IDLE_POLL_S = 5.0
SWEEP_S = 10.0
SWITCH_S = 0.001
"""A thread that reads a large request gives the interpreter back to the event loop after so long."""


def main(cfg: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    log.setup("hub", cfg.run_dir, cfg.log.level, cfg.log.json_logging)
    raise_file_limit()
    sys.setswitchinterval(SWITCH_S)
    return asyncio.run(serve(cfg))


def build(cfg: ServeConfig) -> tuple[Hub, web.Application]:
    """The hub of a service and its routes. Raises: ConfigError."""
    directory = cfg.run_dir.path / "service"
    secret = load_secret(cfg.run_dir)
    vocab_size, max_model_len = model_facts(cfg)
    section = cfg.service
    if not section.engine_urls:
        raise ConfigError("service.engine_urls: the hub needs the addresses of engines; `serve` fills them in")
    tokens = {name: user.token for name, user in section.users.items()}
    access = Access(section.users, prepare_tokens(cfg.run_dir.path / "tokens.json", tokens))
    store, futures = Store(directory), Futures()
    audit = Audit(directory / "audit.jsonl", max_bytes=section.max_audit_bytes)
    training = Training(cfg, secret, store, futures, audit, Limits(cfg.seq_len, vocab_size))
    urls = section.engine_urls
    routers = [] if section.router_url is None else [section.router_url]
    client = EngineClient(routers or urls, urls if routers else None, api_key=cfg.inference.key)
    whole = None
    if section.full_finetuning:
        whole = WeightSlot(client, directory / BASE_WEIGHTS, directory / "engine_weights")
    engines = Engines(
        client,
        training.meter,
        max_adapters=section.max_adapters,
        max_samples=section.max_samples,
        max_waiting=section.max_waiting_samples,
        whole=whole,
    )
    reading = Reading(section.max_waiting_bytes, training.places.waiting_bytes)
    hub = Hub(cfg, store, futures, audit, access, training, engines, reading, vocab_size, max_model_len, time.time())
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[boundary(hub)])
    kinds = (TinkerRoutes, SampleRoutes, NativeRoutes, RunRoutes, EngineRoutes, AccountRoutes, AdminRoutes)
    for handlers in (*(kind(hub) for kind in kinds), RestRoutes(hub, secret.key("service.download"))):
        app.add_routes(handlers.routes())
    return hub, app


async def serve(cfg: ServeConfig) -> int:
    hub, app = build(cfg)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    host, port = cfg.service.host, cfg.service.port
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"[service] cannot listen on {host}:{port}: {error.strerror or error}; give another service.port"
        ) from error
    logger.info("serving %s at http://%s:%d", hub.model_name, host, port)
    tasks = [
        asyncio.create_task(hub.training.work()),
        asyncio.create_task(hub.engines.client.watch()),
        asyncio.create_task(_evict_idle(hub)),
        asyncio.create_task(_sweep(hub)),
        *(asyncio.create_task(each.watch()) for each in runs_directories(hub)),
    ]
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAVE_S):
                await hub.training.save_all()
        return 0
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        await hub.close()


def runs_directories(hub: Hub) -> list[RunsDirectory]:
    """The directory whose files register runs, if the config has one."""
    section = hub.cfg.service
    if section.runs_dir is None:
        return []
    name = section.runs_user or next(iter(section.users))
    return [RunsDirectory(hub, section.runs_dir.expanduser().resolve(), User(name, section.users[name]))]


async def _sweep(hub: Hub) -> None:
    """Delete expired and unneeded records and files, and write the usage."""
    while True:
        num_deleted = await hub.checkpoints.sweep(
            hub.engines.is_used, since=hub.started_at, sampler_timeout_s=hub.cfg.service.sampler_timeout_s
        )
        if num_deleted:
            logger.info("%d checkpoints and samplers have expired and are deleted", num_deleted)
        hub.checkpoints.sweep_traces()
        hub.futures.sweep()
        hub.training.meter.write()
        await asyncio.sleep(SWEEP_S)


async def _evict_idle(hub: Hub) -> None:
    """Evict runs whose clients are silent for too long, so that others get their places."""
    limit = hub.cfg.service.idle_timeout_s or math.inf
    while True:
        await asyncio.sleep(min(_IDLE_POLL_S, limit / 2))
        now = time.time()
        for tenant in list(hub.training.places.tenants.values()):
            run = tenant.run
            session = hub.store.get(Session, run.session or "")
            last_seen_at = session.last_seen_at if session is not None else 0.0
            silence_s = now - max(run.last_request_at, last_seen_at, hub.started_at)
            is_idle = silence_s > limit and not hub.training.queue.waiting(run.id)
            if is_idle and run.state in ("active", "frozen"):
                hub.training.evict(run, f"its client was silent for {limit:g} s")
