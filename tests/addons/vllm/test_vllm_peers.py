"""A node of an engine ends when another one is gone, and names it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
from aiohttp import web
from ports import free_port
from processes import forked
from waiting import until

from stretto.transports.engine import api
from stretto_vllm import peers
from stretto_vllm.peers import Peers

SOON = {"INTERVAL_S": 0.01, "REFUSED_S": 0.1, "SILENT_S": 0.5, "START_S": 30.0}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SOON.items():
        monkeypatch.setattr(peers, name, value)


@pytest.fixture
async def ended(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when this process gets SIGTERM."""
    killed, kill_other = asyncio.Event(), os.kill

    def kill(pid: int, number: int) -> None:
        if pid != os.getpid():
            return kill_other(pid, number)
        assert number == signal.SIGTERM
        killed.set()

    monkeypatch.setattr(peers.os, "kill", kill)
    monkeypatch.setattr(peers.os, "_exit", lambda status: None)
    return killed


class Server:
    """The server of another node."""

    def __init__(self, port: int = 0) -> None:
        self.status, self.port, self.may_answer = 200, port, asyncio.Event()
        self.may_answer.set()

    async def start(self) -> str:
        app = web.Application()
        app.add_routes([web.get(api.HEALTH, self.health)])
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def health(self, _: web.Request) -> web.Response:
        await self.may_answer.wait()
        return web.Response(status=self.status)


UNWILLING = """
import asyncio, signal, sys
from stretto_vllm import peers
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
peers.INTERVAL_S, peers.START_S, peers.ENDING_S = 0.01, 0.1, 0.5
async def main():
    await peers.Peers([sys.argv[1]]).watch()
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.heavy
def test_a_node_whose_server_does_not_end_when_asked_is_ended() -> None:
    words = [sys.executable, "-c", UNWILLING, f"http://127.0.0.1:{free_port()}"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "asked to end\n") and "is gone" in ended.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("what", "reason"), [("ends", "Cannot connect"), ("fails", "HTTP 503"), ("hangs", "no answer in 0.5 s")]
)
async def test_a_node_that_is_gone_ends_this_one(ended: asyncio.Event, what: str, reason: str) -> None:
    lives, other = Server(), Server()
    watched = Peers([await lives.start(), await other.start()])
    watching = asyncio.create_task(watched.watch())
    await asyncio.sleep(0.3)
    assert not ended.is_set() and watched.failure is None
    if what == "ends":
        await other.runner.cleanup()
    elif what == "fails":
        other.status = 503
    else:
        other.may_answer.clear()
    async with asyncio.timeout(20):
        await ended.wait()
    await watching
    assert watched.failure is not None and watched.urls[1] in watched.failure and reason in watched.failure
    other.may_answer.set()
    for server in (lives, other):
        await server.runner.cleanup()


@pytest.mark.heavy
async def test_a_node_that_does_not_serve_yet_is_waited_for(ended: asyncio.Event) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    watched = Peers([f"http://127.0.0.1:{port}"])
    watching = asyncio.create_task(watched.watch())
    await asyncio.sleep(0.4)
    assert not ended.is_set()
    server = Server(port)
    await server.start()
    await asyncio.sleep(0.2)
    await server.runner.cleanup()
    async with asyncio.timeout(20):
        await ended.wait()
    await watching


def start_headless(port: int, *others: str) -> subprocess.Popen[bytes]:
    """A node whose ranks belong to the server of another one, without its ranks."""
    node = f"HeadlessNode('127.0.0.1', {port}, Peers({others!r})).start()"
    code = f"import time; from stretto_vllm import peers; vars(peers).update({SOON}); "
    code += f"from stretto_vllm.peers import HeadlessNode, Peers; {node}; time.sleep(600)"
    return forked.Popen([sys.executable, "-c", code])


@pytest.mark.heavy
async def test_a_headless_node_that_is_started_anew_is_missed_although_it_answers_at_once(
    ended: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REFUSED_S", "SILENT_S"):
        monkeypatch.setattr(peers, name, 60.0)
    port = free_port()
    watched = Peers([f"http://127.0.0.1:{port}"])
    watching = asyncio.create_task(watched.watch())
    node = start_headless(port)
    try:
        await until(lambda: can_connect(port))
        await asyncio.sleep(0.5)
        assert not ended.is_set()
        node.kill()
        node.wait()
        node = start_headless(port)
        async with asyncio.timeout(60):
            await ended.wait()
        await watching
    finally:
        node.kill()
        node.wait()
    assert watched.failure is not None and "it was restarted" in watched.failure


@pytest.mark.heavy
async def test_a_headless_node_ends_when_the_server_of_its_engine_is_gone() -> None:
    port, head = free_port(), Server()
    node = start_headless(port, await head.start())
    try:
        await until(lambda: can_connect(port))
        await asyncio.sleep(0.5)
        assert node.poll() is None
        await head.runner.cleanup()
        assert await asyncio.to_thread(node.wait, 60) == -signal.SIGTERM
    finally:
        node.kill()
        node.wait()


def can_connect(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_engine_that_fails_says_which_node_has_ended_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as lives, socket.create_server(("127.0.0.1", 0)) as other:
        watched = Peers([f"http://127.0.0.1:{each.getsockname()[1]}" for each in (lives, other)])
        watched.find_lost()
        assert watched.failure is None
        other.close()
        watched.find_lost()
        assert watched.failure is not None and watched.urls[1] in watched.failure
