"""The hub's connection to the ranks of the trainer, from their registration until one of them has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from stretto.base.errors import StrettoError
from stretto.base.secret import Secret
from stretto_service.config import ServeConfig
from stretto_service.wires.tenants import TenantServer

logger = logging.getLogger(__name__)

_POLL_S = 1.0


@asynccontextmanager
async def connected_ranks(cfg: ServeConfig, secret: Secret) -> AsyncIterator[TenantServer]:
    """The wire to all ranks; ranks end when the context ends.

    Raises: EngineError or WireError if the wire fails or a rank does not register.
    """
    server = TenantServer(cfg.control, cfg.run_name, secret, world_size=cfg.trainer.num_ranks)
    watcher = None
    try:
        await server.open()
        await server.wait_registered()
        watcher = asyncio.create_task(_watch_ranks(server))
        logger.info("%d trainer ranks are connected", cfg.trainer.num_ranks)
        yield server
    finally:
        if watcher is not None:
            watcher.cancel()
        with contextlib.suppress(StrettoError):
            await server.close()


async def _watch_ranks(server: TenantServer) -> None:
    """End the wire as soon as a rank of this machine is dead, long before its missing heartbeats are noticed."""
    while True:
        await asyncio.sleep(_POLL_S)
        for rank, info in server.ranks.items():
            if info.host == socket.gethostname() and not Path(f"/proc/{info.pid}").exists():
                server.fail(f"trainer rank {rank} (pid {info.pid}) has died")
                return
