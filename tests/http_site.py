"""A served engine for tests of its HTTP routes, and an aiohttp session to it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from engine_runs import build_core

from stretto.chat.placeholders import PLACEHOLDER
from stretto.chat.scratch import build_scratch_files
from stretto.chat.tokenizer import load_tokenizer
from stretto.config.root import InferenceConfig
from stretto.config.sections.model import ScratchSection
from stretto.inference.boundary import RUNNER_SETTINGS
from stretto.inference.embedded.engine import Engine, running
from stretto.inference.server import Server
from stretto.models.hub import load_model, random_model, save_hf

KEY = {"Authorization": "Bearer secret"}
MESSAGES = [{"role": "user", "content": "sort: cab"}]


def build_directory(path: Path, **shape: Any) -> Path:
    """A tiny model with the letters tokenizer; with a vision tower, its image processor too."""
    scratch = ScratchSection(max_position_embeddings=512, **shape)
    build_scratch_files(path, scratch)
    tokenizer = load_tokenizer(path)
    model = random_model(
        scratch,
        tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        image_token_id=tokenizer.token_id(PLACEHOLDER),
    )
    save_hf(model, path, path)
    return path


class Site:
    """A served engine and a plain HTTP session to it."""

    def __init__(self, server: Server, port: int, session: aiohttp.ClientSession) -> None:
        self.server, self.port, self.session = server, port, session
        self.engine = server.engine
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, path: str, body=None, **kwargs) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        if data is not None and len(data) > 1 << 19:
            data = io.BytesIO(data)
        async with self.session.post(self.url + path, data=data, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def events(self, path: str, body: dict) -> list[dict]:
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            lines = (await response.text()).strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextlib.asynccontextmanager
async def open_site(
    directory: Path, *, max_waiting: int = 8, max_open_bytes: int | None = None, **settings
) -> AsyncIterator[Site]:
    """The model of a directory behind the routes, with the key `secret`."""
    cfg = InferenceConfig(
        model=str(directory), served_model_name="tiny", api_key="secret", server={"max_open_bytes": max_open_bytes}
    )
    server = Server(cfg)
    tokenizer = load_tokenizer(directory)
    core = build_core(load_model(directory, dtype=torch.float32), eos_ids=tokenizer.eos_ids, **settings)
    texts = {"decoder": server.openai.decoder, "encoder": server.openai.encoder}
    engine = Engine(core, model_name="tiny", max_waiting=max_waiting, **texts)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.5, **RUNNER_SETTINGS)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with running(engine), aiohttp.ClientSession(headers=KEY) as session:
        server.engine = engine
        yield Site(server, runner.addresses[0][1], session)
    await runner.cleanup()
