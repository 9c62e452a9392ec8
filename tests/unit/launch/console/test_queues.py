"""`stretto status` says how many requests run and wait at each engine, with the run's own key."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from stretto.base.files import try_lock, write_holder
from stretto.base.paths import RunDir
from stretto.base.secret import load_secret
from stretto.cli import main
from stretto.launch.queues import queue_text

PAGE = (
    '# HELP vllm:num_requests_waiting\nvllm:num_requests_running{{engine="0",model_name="m"}} {}\n'
    'vllm:num_requests_running{{engine="1",model_name="m"}} 1.0\nvllm:num_requests_waiting {}\n'
    'vllm:num_requests_waiting_by_reason{{reason="x"}} 77.0\n'
)


def engine(key: str, running: float, waiting: float) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ok = self.path == "/metrics" and self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if ok else 401)
            self.end_headers()
            self.wfile.write(PAGE.format(running, waiting).encode() if ok else b"{}")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run with two engines that read prompts, and one that writes replies and is gone."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    key = load_secret(run).text_key("inference.api_key")
    with ExitStack() as stack:
        servers = [engine(key, 3, 40), engine(key, 0, 2)]
        for server in servers:
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        ports = [server.server_address[1] for server in servers] + [1]
        names = ["replica_0_prefill_0", "replica_0_prefill_1", "replica_0_decode_0"]
        specs = [
            {"role": "inference", "name": name, "node": node, "ports": {"http": port}}
            for node, (name, port) in enumerate(zip(names, ports))
        ]
        specs += [{"role": "router", "name": "router", "node": 0, "ports": {"http": 1}}]
        run.plan.write_text(json.dumps({"hosts": ["127.0.0.1"] * 3, "processes": specs}))
        run.config("run").write_text(json.dumps({"inference": {"api_key": None}, "orchestrator": {}}))
        yield run


@pytest.mark.heavy
def test_requests_are_counted_by_engine_and_role(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks of one engine are added up, and one that does not answer is said."""
    assert main(["status", str(run)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("queues"))
    assert line.removeprefix("queues ") == (
        "prefill: 5 running, 42 waiting (replica_0_prefill_0 4 + 40, replica_0_prefill_1 1 + 2); decode: no answer"
    )


@pytest.mark.heavy
def test_a_key_that_is_not_the_runs_is_said_and_one_of_the_environment_is_used(run, monkeypatch) -> None:
    key = load_secret(run).text_key("inference.api_key")
    run.secret.unlink()
    assert "set VLLM_API_KEY" in (queue_text(run) or "")
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert (queue_text(run) or "").startswith("prefill: 5 running")


@pytest.mark.heavy
def test_engines_at_the_ports_of_a_run_that_has_ended_are_those_of_another(run: RunDir, capsys) -> None:
    run.launch.write_text(json.dumps({"by": "local", "host": socket.gethostname()}))
    assert main(["status", str(run)]) == 0 and "queues" not in capsys.readouterr().out
    for lock in (run.lock, run.part_lock("trainer")):  # a run, or its trainer alone
        with closing(os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT))) as file:
            assert try_lock(file.fileno())
            write_holder(file.fileno())
            assert main(["status", str(run)]) == 0 and "queues prefill: 5 running" in capsys.readouterr().out


def test_a_run_that_has_ended_has_no_queues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "old")
    run.configs.mkdir(parents=True)
    assert main(["status", str(run)]) == 0 and "queues" not in capsys.readouterr().out
    assert not run.secret.exists()
