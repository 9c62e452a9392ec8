"""A dry run asks the servers that it will use, all at once, and says what each answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from processes.answering import served

from stretto.config.load import load
from stretto.config.root import EvalConfig, RLConfig
from stretto.orchestrator.servers import Server, ask, servers_of


@pytest.mark.parametrize("sent", [b"\x15\x03\x01 no words\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"])
def test_an_answer_that_is_no_http_or_breaks_off_is_told_as_that(sent: bytes) -> None:
    with talking(lambda connection: connection.sendall(sent)) as url:
        [text] = ask([Server("k", url)])
    assert "gives no answer of HTTP (" in text and text.endswith("; correct the address"), text
    [text] = ask([Server("k", "http://exa mple/v1/models")])
    assert "can't contain control characters" in text


def test_servers_that_never_end_their_answers_share_one_deadline() -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        with suppress(OSError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.05)

    with talking(drip) as url:
        began = time.monotonic()
        found = ask([Server("k", f"{url}/{number}") for number in range(4)], timeout_s=0.3)
        assert time.monotonic() - began < 2.0
    assert all("(no answer in 0.3 s)" in text for text in found)


@contextmanager
def talking(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that reads a request and does `answer` with its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=talk, args=(server.accept()[0],), daemon=True).start()

        def talk(connection: socket.socket) -> None:
            with connection:
                connection.recv(65536)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_all_are_asked_at_once_and_none_is_waited_for_longer_than_the_deadline() -> None:
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
    with served(delay_s=2.0) as slow, served() as quick, closed:
        urls = [slow, slow + "/b", slow + "/c", quick, f"http://127.0.0.1:{closed.getsockname()[1]}"]
        began = time.monotonic()
        found = ask([Server("k", url) for url in urls], timeout_s=0.3)
        assert time.monotonic() - began < 1.5
    assert all(text.startswith("NOT READY: k: from this machine nothing answers at") for text in [*found[:3], found[4]])
    assert found[3].endswith("answers and serves large") and "Connection refused" in found[4]


@pytest.mark.parametrize("is_verb", [True, False])
def test_the_servers_that_reward_evals_are_asked(is_verb: bool) -> None:
    env = {"id": "dataset", "args": {"reward": "remote_rm", "path": "x", "hook_args": {"rm_url": "http://r:2/score"}}}
    words = ["--orchestrator.env.0.id", "x", f"--orchestrator.eval.env={json.dumps([env])}"]
    cfg = (
        load(EvalConfig, [f"--eval.env={json.dumps([env])}"])
        if is_verb
        else load(RLConfig, words).orchestrator_config()
    )
    found = {server.key: server.url for server in servers_of(cfg, has_engine=True, started=())}
    assert found == {f"{'' if is_verb else 'orchestrator.'}eval.env.0.args.hook_args.rm_url": "http://r:2/score"}


@pytest.mark.parametrize(
    ("api", "address", "asked"),
    [
        ("tokens", "http://gateway/pool", "http://gateway/pool/v1/models"),
        ("tokens", "http://a:1/v1/", "http://a:1/v1/models"),
        ("chat", "http://gateway/pool", "http://gateway/pool/models"),
    ],
)
def test_engines_are_asked_where_the_run_asks_them(api: str, address: str, asked: str) -> None:
    cfg = load(EvalConfig, ["--client.base_url", address, "--client.api", api, "--eval.env.0.id", "x"])
    assert [server.url for server in servers_of(cfg, has_engine=False, started=())] == [asked]
