"""Talking to a model from the page: the engines of a run that goes on, or weights of a run in an engine started here.

Only a page that asks for a token offers it (`stretto view --chat`): whoever reaches the page uses the run's engines.
Their key stays in this process. An engine that is started here serves 127.0.0.1 with a key of its own, at the page's
low priority, without GPUs while a run of this page goes on, and ends after IDLE_S without a message.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from stretto import state
from stretto.base import process
from stretto.base.errors import ConfigError, EngineError
from stretto.base.ports import open_near
from stretto.config.sections.inference import KEY_VAR
from stretto_view.page.library import OpenRun

IDLE_S = 600.0
OFF = "this page has no chat; one with a chat asks for a token: stretto view {run} --chat"
_MOST_BYTES = 1_000_000
_WAIT_S = 120.0  # until the first word: engines that share devices with the trainer sleep while it trains
_SHARE = 0.8  # of the free memory that an engine may need
_ROOM = 1.3  # an engine's memory over the bytes of its weights

Words = Mapping[str, Any]


@dataclass
class _Engine:
    """An engine that was started here."""

    run: Path
    step: int
    address: str
    key: str
    child: process.Child
    folder: Path
    began: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    took_s: float | None = None


class Chat:
    """The engine that this page has started, if any, and the ways to every other."""

    def __init__(self) -> None:
        self._engine: _Engine | None = None
        self._lock = asyncio.Lock()

    async def places(self, run: OpenRun, others: list[str]) -> dict[str, Any]:
        """What can be talked to: the run's own engines while it goes on, and its weights, newest first.

        others: names of the runs of this page that go on.
        """
        engine = self._engine
        own = None
        if engine is not None and engine.run == run.path:
            own = {"step": engine.step, **await self._state(engine)}
        weights = await asyncio.to_thread(_weights, run)
        return {"is_on": True, "live": run.name in others, "weights": list(weights), "engine": own, "goes_on": others}

    async def _state(self, engine: _Engine) -> dict[str, Any]:
        """starting, ready or ended; how long the start took, or takes so far; the last lines of one that ended."""
        if engine.child.returncode is not None:
            return {"state": "ended", "seconds": None, "why": "\n".join(engine.child.tail(5))}
        if engine.took_s is None and await _answers(engine):
            engine.took_s = time.monotonic() - engine.began
        seconds = engine.took_s if engine.took_s is not None else time.monotonic() - engine.began
        return {"state": "starting" if engine.took_s is None else "ready", "seconds": round(seconds, 1), "why": None}

    async def start(self, run: OpenRun, words: Words, others: list[str]) -> dict[str, Any]:
        """Start an engine on the weights of a step; one that was started before ends.

        Raises: ConfigError if there are no such weights or memory is short; EngineError if none can be started.
        """
        weights = await asyncio.to_thread(_weights, run)
        step = words.get("step")
        path = weights.get(step) if isinstance(step, int) else None
        if not isinstance(step, int) or path is None:
            raise ConfigError(f"{run.dir}: no weights of step {step!r}; it has {list(weights) or 'none'}.")
        need, free = await asyncio.to_thread(_memory, path)
        if need > free * _SHARE:
            raise ConfigError(
                f"{path}: an engine needs about {need / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free; "
                "end something, or talk to the run's own engines."
            )
        if others and not words.get("is_sure"):
            return {
                "ask": f"{', '.join(others)} goes on at this moment. An engine beside it takes about "
                f"{need / 1e9:.1f} GB of the {free / 1e9:.1f} GB of memory that are free, and CPU time that nothing "
                "else wants."
            }
        async with self._lock:
            await self.close()
            self._engine = _start(run.path, step, path, without_gpus=bool(others))
        return {"ask": None}

    async def reply(self, run: OpenRun, words: Words, others: list[str]) -> AsyncIterator[bytes]:
        """The reply to a conversation, as the engine's server-sent events.

        Raises: ConfigError for a wrong request; EngineError if the engine refuses it or does not answer.
        """
        address, key = self._way(run, words, others)
        if self._engine is not None:
            self._engine.used = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_WAIT_S)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
                async with session.get(f"{address}/models") as answer:
                    served = (await answer.json())["data"][0]["id"] if answer.status == 200 else None
                body = {**_body(words), "model": served, "stream": True}
                async with session.post(f"{address}/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        said = (await answer.text())[:500]
                        raise EngineError(f"the engine refused the message ({answer.status}): {said}")
                    async for piece in answer.content.iter_any():
                        yield piece
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineError(f"the engine at {address} does not answer: {error or type(error).__name__}") from error

    def _way(self, run: OpenRun, words: Words, others: list[str]) -> tuple[str, str | None]:
        if words.get("place") == "live":
            if run.name not in others:
                raise ConfigError(f"{run.dir}: the run does not go on, so it has no engines; start one on its weights.")
            addresses, key = run.engines()
            if not addresses:
                raise ConfigError(f"{run.dir.config('run')}: no orchestrator.client.base_url, or it is another user's.")
            return addresses[0].rstrip("/"), key
        if self._engine is None or not self._engine.run == run.path:
            raise ConfigError("no engine is started on weights of this run.")
        return self._engine.address, self._engine.key

    async def close(self) -> None:
        """End the engine that was started here."""
        if (engine := self._engine) is not None:
            self._engine = None
            await process.stop([engine.child], grace_s=5.0)
            await asyncio.to_thread(shutil.rmtree, engine.folder, ignore_errors=True)

    async def close_idle(self) -> None:
        """End the engine when nobody talked to it for IDLE_S; runs until it is cancelled."""
        while True:
            await asyncio.sleep(IDLE_S / 20)
            if self._engine is not None and time.monotonic() - self._engine.used > IDLE_S:
                async with self._lock:
                    await self.close()


def running(runs: Mapping[str, OpenRun]) -> list[str]:
    """Names of the runs that go on."""
    return [run.name for run in runs.values() if state.describe(run.dir)["state"] == "running"]


def _body(words: Words) -> dict[str, Any]:
    """The fields of a chat request. Raises: ConfigError if one has another form."""
    messages = words.get("messages")
    if not isinstance(messages, list) or not messages or len(json.dumps(messages)) > _MOST_BYTES:
        raise ConfigError("messages: a list of {role, content} of at most a megabyte is needed.")
    temperature, tokens = words.get("temperature", 1.0), words.get("max_tokens", 512)
    if not isinstance(temperature, int | float) or not 0 <= temperature <= 10:
        raise ConfigError(f"temperature: {temperature!r} is not a number from 0 to 10.")
    if not isinstance(tokens, int) or not 1 <= tokens <= 100_000:
        raise ConfigError(f"max_tokens: {tokens!r} is not a number from 1 to 100,000.")
    return {"messages": messages, "temperature": temperature, "max_tokens": tokens}


def _weights(run: OpenRun) -> dict[int, Path]:
    """Directories of weights that an engine can load, by step, newest first."""
    found = {
        _step_of(path): path.resolve() for path in run.dir.weights.glob("step_*") if (path / "config.json").exists()
    }
    return dict(sorted(found.items(), reverse=True))


def _step_of(path: Path) -> int:
    text = path.name.removeprefix("step_")
    return int(text) if text.isdecimal() else -1


def _memory(path: Path) -> tuple[float, float]:
    """Bytes that an engine on these weights needs, and bytes that are free."""
    need = sum(file.stat().st_size for file in path.glob("*.safetensors")) * _ROOM + 5e8
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return need, int(lines["MemAvailable"].split()[0]) * 1024.0


def _start(run: Path, step: int, path: Path, *, without_gpus: bool) -> _Engine:
    """Call it in the main thread, whose end ends the engine."""
    listener = open_near("127.0.0.1", 8770)
    if listener is None:
        raise EngineError("no port near 8770 is free at 127.0.0.1; end something that listens there.")
    port = listener.getsockname()[1]
    listener.close()
    key, folder = secrets.token_urlsafe(24), Path(tempfile.mkdtemp(prefix="stretto-chat-"))
    argv = (
        sys.executable, "-m", "stretto", "inference", "--model.name", str(path), "--server.host", "127.0.0.1",
        "--server.port", str(port), "--output-dir", str(folder),
    )  # fmt: skip
    env = process.thread_env(max(1, process.num_cores() // 2)) | {KEY_VAR: key}
    if without_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
    child = process.start("inference", argv, env=env, log=folder / "engine.log")
    return _Engine(run, step, f"http://127.0.0.1:{port}/v1", key, child, folder)


async def _answers(engine: _Engine) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=2.0)
        address = engine.address.removesuffix("/v1") + "/health"
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(address) as answer:
            return answer.status == 200
    except (TimeoutError, aiohttp.ClientError):
        return False
