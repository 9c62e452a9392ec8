"""Requests of other sites' pages are refused on every route of every HTTP server, whatever the verb that starts it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from http_site import build_directory

from stretto.base.ports import refusal_of
from stretto.config.root import InferenceConfig
from stretto.inference.server import Server

pytest.importorskip("stretto_service")
pytest.importorskip("stretto_view")
from stretto_service.config import ServeConfig
from stretto_service.main import build as build_hub
from stretto_view.page.app import build as build_page
from stretto_view.page.library import Library

EVIL = {
    "origin": {"Origin": "https://evil.example"},
    "origin of a file or a frame": {"Origin": "null"},
    "another port's page": {"Origin": "http://127.0.0.1:1"},
    "cross-site": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "same-site": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    "text": {"Content-Type": "text/plain"},
    "form": {"Content-Type": "application/x-www-form-urlencoded"},
    "upload": {"Content-Type": "multipart/form-data; boundary=x"},
}
REBOUND = {"a name": {"Host": "evil.example"}, "a trick": {"Host": "evil.example\\@127.0.0.1"}, "none": {"Host": ""}}


def engine(path: Path, key: str | None) -> web.Application:
    build_directory(path)
    return Server(InferenceConfig.model_validate({"model": str(path), "api_key": key})).app()


def page(path: Path, token: str) -> web.Application:
    return build_page(Library([path]), token)


@asynccontextmanager
async def hub(path: Path) -> AsyncIterator[web.Application]:
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64}))
    data = {
        "output_dir": str(path),
        "model": {"name": str(path / "model")},
        "service": {"users": {"alice": {}}, "engine_urls": ["http://127.0.0.1:1"]},
    }
    parts, app = build_hub(ServeConfig.model_validate(data))
    yield app
    await parts.close()


async def statuses(app: web.Application, headers: dict[str, dict[str, str]]) -> dict[str, int]:
    """The status of each route for each kind of headers."""
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    assert len(routes) > 4
    found = {}
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        for method, path in sorted(routes):
            path = path.replace("{", "").replace("}", "")
            for name, sent in headers.items():
                async with session.request(
                    method, server.make_url(path), headers=sent, allow_redirects=False
                ) as response:
                    found[f"{method} {path} {name}"] = response.status
    return found


@pytest.mark.parametrize("key", [None, "secret"])
async def test_an_engine_refuses_other_sites_on_every_route(key, tmp_path):
    found = await statuses(engine(tmp_path, key), EVIL | (REBOUND if key is None else {}))
    assert not {where: status for where, status in found.items() if status not in (401, 403, 415)}


@pytest.mark.parametrize("token", ["", "secret"])
async def test_the_page_refuses_other_sites_on_every_route(token, tmp_path):
    found = await statuses(page(tmp_path, token), EVIL | (REBOUND if not token else {}))
    assert not {where: status for where, status in found.items() if status not in (401, 403, 415)}


@pytest.mark.heavy
async def test_the_service_refuses_other_sites_on_every_route(tmp_path):
    async with hub(tmp_path) as app:
        found = await statuses(app, EVIL)
    assert not {where: status for where, status in found.items() if status not in (401, 403, 415)}


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000"},
        {"host": "localhost:8000", "content-type": "application/json"},
        {"host": "[::1]:8000", "origin": "http://[::1]:8000", "sec-fetch-site": "same-origin"},
        {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
)
def test_own_pages_programs_and_followed_links_pass(headers):
    assert refusal_of("GET", headers, has_key=False) is None


@pytest.mark.parametrize("host", ["evil.example\\@127.0.0.1", "a/b", "a@b", "a b", "a:b", "[::1", "http://a", "a:80?"])
def test_a_host_that_is_none_is_refused_with_a_key_too(host: str) -> None:
    refused = refusal_of("GET", {"host": host}, has_key=True)
    assert refused is not None and refused[0] == 400
    assert refusal_of("GET", {"host": "evil.example:80"}, has_key=True) is None
