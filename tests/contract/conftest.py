"""One server of each engine for all tests of the contract."""

from __future__ import annotations

import asyncio

import pytest
from servers import needs_vllm, save, scratch, serve

from stretto.transports.engine.client import EngineClient


@pytest.fixture(scope="session", params=["embedded", pytest.param("vllm", marks=needs_vllm)])
def engine(request, tmp_path_factory):
    """(name, address) of a ready engine that serves scratch(0)."""
    directory = tmp_path_factory.mktemp(request.param)
    with serve(request.param, save(scratch(0), directory / "model"), directory / "log") as (url, _):

        async def wait() -> None:
            async with EngineClient([url]) as client:
                await client.wait_ready(240)

        asyncio.run(wait())
        yield request.param, url
