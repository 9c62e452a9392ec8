"""Services for tests: `stretto serve` in a process of its own, and loops of a client as users write them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from ports import free_port
from processes import forked
from runs import merged, toml

READY_S = 240.0


class Service:
    """A running `stretto serve`."""

    def __init__(self, directory: Path, model: Path, *, root: dict[str, Any] | None = None, **service: Any) -> None:
        self.run = directory / "service"
        self.port = free_port()
        self.model = str(model)
        settings = {
            "output_dir": directory,
            "seq_len": 128,
            "run": {"name": "service"},
            "model": {"name": self.model},
            "control": {"port": free_port()},
            "inference": {"server": {"port": free_port()}, "max_model_len": 128},
            "service": {"port": self.port, "save_steps": 3, "users": {"alice": {}, "bob": {}}} | service,
        }
        self._config = directory / "serve.toml"
        self._config.write_text(toml(merged(settings, root or {})))
        self._process: subprocess.Popen[bytes] | None = None
        self.output = directory / "serve.log"
        self._clients: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def token(self, user: str) -> str:
        return json.loads((self.run / "tokens.json").read_text())[user]

    def start(self) -> None:
        argv = [sys.executable, "-m", "stretto", "serve", "@", str(self._config)]
        with self.output.open("ab") as log:
            self._process = forked.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._is_ready():
            assert self._process is not None and self._process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return self.call("GET", "/v1/status")[1]["engines"]["ready"] > 0
        except OSError:
            return False

    def stop(self) -> int | None:
        """End it with SIGTERM; its exit status."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(60)
        self._close_connections()
        return status

    def _close_connections(self) -> None:
        """Close the connections that clients keep idle: nobody closes them before they are garbage."""
        loops = set()
        for each in [each for each in gc.get_objects() if issubclass(type(each), asyncio.Transport)]:
            is_open = not each.is_closing() and not each._loop.is_closed()
            if is_open and each.get_extra_info("peername", ("", 0))[1] == self.port:
                loops.add(loop := each._loop)
                loop.call_soon_threadsafe(each.abort)
        for loop in loops:  # what was asked before is done
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), loop).result(10)

    def pid(self, role: str) -> int:
        """The process of a role, found by its command among the service's own."""
        assert self._process is not None
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if role.encode() in words and any(word.startswith(os.fsencode(self.run)) for word in words):
                return int(entry.name)
        raise AssertionError(f"no process {role}")

    def kill(self, role: str) -> None:
        os.kill(self.pid(role), signal.SIGKILL)

    def call(
        self, method: str, path: str, body: object = None, *, user: str = "admin", token: str | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of a request; a body of bytes is sent as it is."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("X-API-Key", self.token(user) if token is None else token)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.read()
                return response.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def client(self, user: str = "alice") -> Any:
        import tinker

        self._clients.append(tinker.ServiceClient(base_url=self.url, api_key=self.token(user)))
        return self._clients[-1]

    def close_clients(self) -> None:
        """End the sessions of all clients; their runs give their places back."""
        while self._clients:
            self._clients.pop().close("success").result(timeout=60)

    def end_sessions(self) -> None:
        """Close the clients that a test has left, here alone if the service cannot be asked: else heartbeats go on."""
        left = list(self._clients)
        if self._process is not None and self._process.poll() is None:
            import tinker

            with suppress(tinker.TinkerError, TimeoutError):
                self.close_clients()
        self._clients.clear()
        for holder in (holder for client in left for holder in (client._session_holder, client._rest_holder)):
            if holder is not None:
                holder.close()  # one that is closed stays as it is

    def rest(self, user: str = "alice") -> Any:
        import tinker

        return tinker.RestClient(base_url=self.url, api_key=self.token(user))


@contextmanager
def serving(directory: Path, model: Path, *, root: dict[str, Any] | None = None, **service: Any) -> Iterator[Service]:
    directory.mkdir(parents=True, exist_ok=True)
    running = Service(directory, model, root=root, **service)
    try:
        running.start()
        yield running
    finally:
        running.end_sessions()
        running.stop()


def sentence(seed: int, length: int = 12) -> Any:
    """A pattern to learn: two letters in turn."""
    from tinker import types

    tokens = (np.random.default_rng(seed).integers(15, 25, 2).tolist() * length)[: length + 1]
    weights = [0.0] + [1.0] * (length - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def learn(
    training: Any, steps: int, *, seed: int = 0, lr: float = 5e-3, at: dict[int, Any] | None = None
) -> list[float]:
    """The losses of a supervised loop with two requests in flight; at: what to do in the middle of a step."""
    from tinker import types

    data, losses = [sentence(seed + i) for i in range(4)], []
    for step in range(steps):
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=lr))
        if at is not None and step in at:
            at[step]()
        losses.append(passed.result(timeout=400).metrics["loss:sum"])
        stepped.result(timeout=400)
    return losses
