"""`stretto chat`: what is asked, what is shown, and what is said to a name that means no model."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from stretto import signals
from stretto.base.errors import ConfigError, EngineError
from stretto.base.paths import RunDir
from stretto_start import chat as module
from stretto_start.chat import Server, chat


class Handler(BaseHTTPRequestHandler):
    """Streams the number of messages and the last of them; "fail" is answered with an error."""

    bodies: ClassVar[list[dict]] = []

    def do_GET(self):
        self._send(200, json.dumps({"data": [{"id": "small"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        last = body["messages"][-1]["content"]
        if last == "fail":
            return self._send(400, json.dumps({"error": {"message": "too long"}}).encode())
        pieces = [str(len(body["messages"])), " ", last.upper(), "\x1b[2J"]
        chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, status: int, data: bytes):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    Handler.bodies.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def said(url, text, monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert chat([url, *words]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.heavy
def test_a_conversation_goes_on_until_it_is_forgotten_and_replies_cannot_steer_the_terminal(url, monkeypatch, capsys):
    lines = said(url, "a\nb\n\n/new\nc\n", monkeypatch, capsys, "--temperature", "0", "--max-tokens", "5")
    assert lines == ["1 A\\x1b[2J", "3 B\\x1b[2J", "1 C\\x1b[2J"]
    first = Handler.bodies[0]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("small", 0.0, 5)


@pytest.mark.heavy
def test_a_system_prompt_comes_first_also_one_that_is_set_later(url, monkeypatch, capsys):
    said(url, "a\n/system Be rude.\nb\n/quit\nc\n", monkeypatch, capsys, "--system", "Be kind.")
    assert [body["messages"][0]["content"] for body in Handler.bodies] == ["Be kind.", "Be rude."]


@pytest.mark.heavy
def test_a_command_that_there_is_not_is_no_message(url, monkeypatch, capsys):
    (line,) = said(url, "/help\n", monkeypatch, capsys)
    assert line.startswith("there is no /help: /new") and not Handler.bodies


@pytest.mark.heavy
def test_what_a_server_refuses_is_said_with_its_words(url, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("fail\n"))
    with pytest.raises(EngineError, match=r"HTTP 400: too long"):
        chat([url])


def test_comments_in_the_stream_are_passed_over_and_thoughts_are_shown_before_the_reply():
    chunk = {"choices": [{"delta": {"reasoning_content": "hm, ", "content": "yes"}, "finish_reason": "stop"}]}
    stream = f": still working\n\nevent: x\ndata: {json.dumps(chunk)}\n\n"
    assert "".join(replied(stream.encode())) == "hm, yes"


WRONG_STREAMS = {
    "cut": (b'data: {"choices": [{"delta": {"content": "hel"}}]}\n\n', "broke off before the end"),
    "no JSON": (b"data: {oops\n\n", "not answer as an OpenAI-compatible server"),
    "no text": (b"\xff\xfe\n", "not answer as an OpenAI-compatible server"),
    "no object": (b"data: [1]\n\n", "not answer as an OpenAI-compatible server"),
    "a page": (b"<html>\n", "broke off before the end"),
    "an error": (b'data: {"error": "out of memory"}\n\n', "stretto chat: out of memory"),
}


@pytest.mark.parametrize("name", WRONG_STREAMS)
def test_a_stream_that_ends_early_or_is_none_is_an_error_of_the_server(name):
    stream, message = WRONG_STREAMS[name]
    with pytest.raises(EngineError, match=message):
        list(replied(stream))


@pytest.mark.parametrize("listed", [b"<html>", b"[1]", b'{"data": [{"name": "a"}]}'])
def test_a_list_of_models_that_is_none_is_an_error_of_the_server(listed, monkeypatch):
    monkeypatch.setattr(Server, "_open", lambda *_: io.BytesIO(listed))
    with pytest.raises(EngineError, match="not answer as an OpenAI-compatible server"):
        Server("http://h").model()


def replied(stream: bytes):
    """The pieces of a reply that is sent as this stream."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "_open", lambda *_: io.BytesIO(stream))
        yield from Server("http://h", model="m").reply([], Namespace(temperature=0.0, max_tokens=5))


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9/v1 does not answer"):
        Server("http://127.0.0.1:9").model()


@pytest.fixture
def as_command(monkeypatch):
    """Ctrl-C does what it does to a command that has begun its verb."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signals, "_signals", [signal.SIGINT])
    signals.unwind_at_signals()
    yield
    signal.signal(signal.SIGINT, before)


class Terminal(io.StringIO):
    """Lines that somebody types."""

    def isatty(self):
        return True


def test_ctrl_c_ends_one_reply_after_the_other_and_then_the_command(as_command, monkeypatch, capsys):
    class Endless:
        def model(self):
            return "endless"

        def reply(self, messages, options):
            yield "begun"
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            raise AssertionError("Ctrl-C was ignored")

    lines = iter("ab")

    def typed(prompt):
        if (line := next(lines, None)) is None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(KeyboardInterrupt):
        module._talk(Endless(), Namespace(system=None))
    assert capsys.readouterr().out.splitlines()[1:] == ["begun", "begun"]


def run_with(tmp_path, *steps, latest=None):
    run = RunDir(tmp_path / "outputs" / "mine")
    for step in steps:
        run.weights_step(step).mkdir(parents=True)
        (run.weights_step(step) / "config.json").write_text("{}")
    if latest is not None:
        run.link_latest_weights(latest)
    return run


def meant(*words):
    """The model that is served for these words."""
    seen = []

    class Stop(Exception):
        pass

    def served(model):
        seen.append(model)
        raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(module, "_served", served)
        chat(words)
    return seen[0]


def test_a_run_means_its_newest_export_and_a_step_or_the_best_may_be_asked_for(tmp_path):
    run = run_with(tmp_path, 10, 20, latest=20)
    (run.best_weights).mkdir()
    (run.best_weights / "config.json").write_text("{}")
    assert meant(str(run)) == str(run.weights_step(20))
    assert meant(str(run), "--step", "10") == str(run.weights_step(10))
    assert meant(str(run), "--best") == str(run.best_weights)
    assert meant(str(run.weights_step(10))) == str(run.weights_step(10))
    assert meant("lab/model-of-the-hub") == "lab/model-of-the-hub"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["outputs/mine", "--step", "15"], "exported are steps 10, 20"),
        (["outputs/mine", "--best"], "keep_best = true"),
        (["outputs/other"], r"outputs/other: there is no such directory\."),
        (["outputs/mien"], r"outputs/mien: there is no such directory; did you mean outputs/mine\?"),
        (["scores"], "scores is a reward model, which scores conversations and writes no text"),
        (["."], "is no run with exported weights, and no model"),
        (["http://h", "--api-key-var", "NOT_SET_HERE"], "NOT_SET_HERE is not set"),
        (["http://h", "--best"], "--best is for a run"),
        (["http://h:port"], "http://h:port is no URL"),
        (["http://"], "it names no host"),
        (["http://[::1"], "is no URL"),
        (["outputs/mine", "--served-model", "a"], "--served-model is for a URL"),
        (["outputs/mine", "--step", "10", "--best"], "leave one of them out"),
        (["outputs/mine/weights/step_10", "--best"], "--best is for a run, and .*step_10 is a model"),
        (["lab/model-of-the-hub", "--step", "0"], "--step is for a run"),
        (["outputs/mine", "--tempe", "1"], "did you mean --temperature"),
        ([], "a word is missing: model"),
    ],
)
def test_a_name_that_means_no_model_is_told_what_there_is(words, message, tmp_path, monkeypatch):
    run = run_with(tmp_path, 10, 20, latest=20)
    run.configs.mkdir()
    run.config("run").write_text("{}")
    run.launch.write_text("{}")
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        chat(words)
