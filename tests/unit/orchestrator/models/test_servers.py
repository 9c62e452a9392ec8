"""A dry run asks the servers that it will use, all at once, and says what each answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stretto import dry_run
from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import EvalConfig, OrchestratorConfig, RLConfig
from stretto.orchestrator.servers import Server, ask, servers_of


@contextmanager
def served(
    status: int = 200, body: bytes = b'{"data": [{"id": "large"}]}', delay_s: float = 0.0, alias: str | None = None
) -> Iterator[str]:
    """The address of a server that gives every request this answer, and 401 to a wrong key.

    alias: a model that it has, and does not list.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_known = self.path == "/v1/chat/completions" and asked["model"] == alias and asked["max_tokens"] == 1
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(b'{"choices": [{}]}' if is_known else b"{}")

        def do_GET(self) -> None:
            time.sleep(delay_s)
            is_refused = self.headers.get("Authorization", "Bearer right") != "Bearer right"
            self.send_response(401 if is_refused else status)
            self.end_headers()
            with suppress(BrokenPipeError):  # whoever asked may have gone
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def judge(url: str, **settings: str) -> RLConfig:
    words = [f"--models.judge.{key}={value}" for key, value in {"base_url": url, **settings}.items()]
    return load(RLConfig, [*words, "--orchestrator.env.0.id", "sort-letters"])


def answers(cfg: RLConfig) -> list[str]:
    return [text for _, text in dry_run._servers(cfg_of(cfg), has_engine=True)]


def cfg_of(cfg: RLConfig) -> OrchestratorConfig:
    return dry_run.with_model_names(cfg).orchestrator_config()


def test_one_that_answers_is_shown_with_its_models() -> None:
    with served() as url:
        [text] = answers(judge(url))
    assert text == f"models.judge.base_url: {url}/v1/models answers and serves large"


@pytest.mark.parametrize(
    ("answer", "settings", "message"),
    [
        (
            {},
            {"served_model_name": "small"},
            "serves large, and not small (asked for it: HTTP 404); correct models.judge.served_model_name",
        ),
        ({"status": 404}, {}, "answers HTTP 404"),
        ({"status": 500, "body": b"out of memory"}, {"served_model_name": "large"}, "HTTP 500 (out of memory)"),
        ({"body": b"<html>"}, {}, "answers with no list of models, but '<html>'"),
        ({"body": b'{"data": []}'}, {}, "lists no model; name one as models.judge.served_model_name"),
        ({"status": 403}, {}, "it needs a key, so set the environment variable TEACHER_API_KEY"),
    ],
)
def test_an_answer_with_which_the_run_would_fail_says_what_to_do(answer, settings, message, monkeypatch) -> None:
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    with served(**answer) as url:
        [text] = answers(judge(url, **settings))
    assert text.startswith("NOT READY: models.judge.base_url: ") and message in text, text


def test_a_name_that_is_not_listed_is_asked_for() -> None:
    with served(alias="small") as url:
        [text] = answers(judge(url, served_model_name="small"))
    assert text == f"models.judge.base_url: {url}/v1/models lists large, and also answers as small"


def test_a_wrong_key_names_its_variable(monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    with served() as url:
        cfg = judge(url, **{"client.api_key_var": "JUDGE_KEY"})
        [text] = answers(cfg)
        assert "HTTP 401: correct the key in the environment variable JUDGE_KEY" in text
        monkeypatch.setenv("JUDGE_KEY", "right")
        assert answers(cfg) == [f"models.judge.base_url: {url}/v1/models answers and serves large"]
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
            answers(cfg)


@pytest.mark.parametrize("answer", [{"status": 404}, {"status": 405}, {"body": b"<html>"}])
def test_a_server_without_a_list_is_taken_as_it_is_if_its_model_is_named(answer) -> None:
    with served(**answer) as url:
        [text] = answers(judge(url, served_model_name="large"))
    assert not text.startswith("NOT READY") and text.endswith("it is taken as it is")


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


def test_every_server_that_is_not_started_by_the_run_is_asked_once() -> None:
    algo = {"type": "opd", "teacher": {"base_url": "http://t:1/v1"}}
    reward = {"reward": "remote_rm", "path": "x.jsonl", "hook_args": {"rm_url": "http://r:2/score"}}
    env = [{"id": "dataset", "args": reward, "algo": algo}]
    cfg = load(RLConfig, [f"--orchestrator.env={json.dumps(env)}", "--no-inference", "--models.own.model", "/nowhere"])
    player = cfg_of(cfg)
    found = {server.key: server.url for server in servers_of(player, has_engine=False, started=["own"])}
    assert found == {
        "orchestrator.client.base_url": "http://127.0.0.1:8000/v1/models",
        "orchestrator.env.0.algo.teacher.base_url": "http://t:1/v1/models",
        "orchestrator.env.0.args.hook_args.rm_url": "http://r:2/score",
    }
    assert "orchestrator.client.base_url" not in {s.key for s in servers_of(player, has_engine=True, started=["own"])}


@pytest.mark.parametrize("is_verb", [True, False])
def test_the_servers_that_reward_evals_are_asked(is_verb: bool) -> None:
    env = {"id": "dataset", "args": {"reward": "remote_rm", "path": "x", "hook_args": {"rm_url": "http://r:2/score"}}}
    words = ["--orchestrator.env.0.id", "x", f"--orchestrator.eval.env={json.dumps([env])}"]
    cfg = load(EvalConfig, [f"--eval.env={json.dumps([env])}"]) if is_verb else cfg_of(load(RLConfig, words))
    found = {server.key: server.url for server in servers_of(cfg, has_engine=True, started=())}
    assert found == {f"{'' if is_verb else 'orchestrator.'}eval.env.0.args.hook_args.rm_url": "http://r:2/score"}


def test_eval_asks_its_engines_and_models() -> None:
    words = ["--client.base_url", "http://a:1/v1", "--models.judge.base_url", "https://j/v1", "--eval.env.0.id", "x"]
    cfg = load(EvalConfig, words)
    found = [server.key for server in servers_of(cfg, has_engine=False, started=())]
    assert found == ["client.base_url", "models.judge.base_url"]


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
