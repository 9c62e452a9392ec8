"""What the boundary of the routes answers and logs when a request ends with an error."""

from __future__ import annotations

import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from stretto.base.errors import EngineError
from stretto.inference.boundary import build_app
from stretto.transports.engine.api import EngineStopping


@pytest.mark.parametrize(
    ("error", "level"), [(EngineError("out of blocks"), "ERROR"), (EngineStopping("it ends"), "INFO")]
)
async def test_a_request_that_the_end_of_the_engine_cuts_is_answered_and_is_no_error_in_the_log(
    error: EngineError, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(http: web.Request) -> web.Response:
        raise error

    app = build_app(None)
    app.router.add_get("/work", fail)
    caplog.set_level(logging.INFO, "stretto.inference.boundary")
    async with TestClient(TestServer(app)) as client:
        reply = await client.get("/work")
        assert reply.status == 500
        assert (await reply.json())["error"]["message"] == str(error)
    [record] = [each for each in caplog.records if each.name == "stretto.inference.boundary"]
    assert record.levelname == level
