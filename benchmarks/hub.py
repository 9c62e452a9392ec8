"""How long one user's large request delays another user's at the hub of a service.

    python benchmarks/hub.py --mb 60

One process is the hub, without trainer and engines. This one sends a small request as bob every 5 ms while alice's
large one is read, and prints the longest answer for each kind of large request.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
from aiohttp import web

from stretto.records.sample import MicroBatch
from stretto_service.config import ServeConfig
from stretto_service.main import SWITCH_S, build
from stretto_service.requests import protobuf
from stretto_service.wires import service
from stretto_service.wires.operations import TenantWork

TOKENS = {"alice": "tml-" + "a" * 20, "bob": "tml-" + "b" * 20}


def serve(directory: Path, sock: socket.socket) -> None:
    cfg = ServeConfig.model_validate(
        {
            "output_dir": str(directory),
            "model": {"name": str(directory / "model")},
            "seq_len": 1024,
            "service": {
                "users": {name: {"token": token} for name, token in TOKENS.items()},
                "engine_urls": ["http://127.0.0.1:1"],
            },
        }
    )

    async def run() -> None:
        _, app = build(cfg)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, sock).start()
        await asyncio.Event().wait()

    sys.setswitchinterval(SWITCH_S)
    asyncio.run(run())


def passes(num_bytes: int) -> bytes:
    """A training request of the Tinker API: sequences of 1000 tokens with their targets and weights."""
    tokens = np.random.default_rng(0).integers(0, 100, 1000).astype("<i8").tobytes()
    field, number = protobuf._field, protobuf._number
    prompt = field(1, field(1, field(1, np.frombuffer(tokens, "<i8").astype("<i4").tobytes())))
    tensor = lambda dtype, data: field(1, data) + number(3, dtype) + number(4, 1000)
    arrays = {"target_tokens": (2, tokens), "weights": (1, np.ones(1000, "<f4").tobytes())}
    inputs = [field(2, field(1, name.encode()) + field(2, tensor(*array))) for name, array in arrays.items()]
    one = field(3, prompt + b"".join(inputs))
    head = field(1, b"alice:run") + number(2, 1) + field(4, b"cross_entropy")
    return head + one * (num_bytes // len(one))


def batch(num_bytes: int) -> bytes:
    """A training request of `rl --service`: micro batches of 1000 tokens."""
    tokens = np.random.default_rng(0).integers(0, 100, 1000).astype(np.int32)
    bounds = np.array([0, 1000], np.int32)
    floats = lambda: np.ones(1000, np.float32)
    rows = [
        MicroBatch(
            token_ids=tokens.copy(), cu_seqlens=bounds, loss_mask=np.ones(1000, bool), logprobs=floats(),
            advantages=floats(), temperatures=floats(), sample_ids=("0",), envs=("",),
        )
        for _ in range(num_bytes // 17_000)
    ]  # fmt: skip
    return service.encode_work(TenantWork(tenant="", micro_batches=tuple(rows)))


def send(url: str, user: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[float, int, bytes]:
    """Seconds, status and answer of a request."""
    request = urllib.request.Request(url + path, body, {"X-API-Key": TOKENS[user], **headers}, method="POST")
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return time.perf_counter() - start, answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return time.perf_counter() - start, error.code, error.read()


def measure(url: str, requests: dict[str, tuple[str, bytes, dict[str, str]]]) -> None:
    """alice's requests are sent by a process of their own, so that only the hub can delay bob's."""
    small, plain = b'{"sdk_version": "1"}', {"Content-Type": "application/json"}
    with multiprocessing.get_context("spawn").Pool(1) as alice:
        alice.apply(abs, (1,))
        for name, (path, body, headers) in requests.items():
            big, waits = alice.apply_async(send, (url, "alice", path, body, headers)), []
            while not big.ready():
                waits.append(send(url, "bob", "/api/v1/client/config", small, plain)[0])
                time.sleep(0.005)
            took, status, text = big.get()
            print(
                f"{name:24} {len(body) / 2**20:5.1f} MB  status {status}  {took:5.2f} s; another user waits at most "
                f"{max(waits) * 1e3:5.0f} ms ({len(waits)} requests)  {text[:70].decode()}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=60.0)
    num_bytes = int(parser.parse_args().mb * 2**20)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        (model / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 4096}')
        sock = socket.create_server(("127.0.0.1", 0))
        hub = multiprocessing.get_context("fork").Process(target=serve, args=(Path(directory), sock), daemon=True)
        hub.start()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        plain = {"Content-Type": "application/json"}
        run = json.dumps({"spec": {"name": "run", "rank": 4}, "base_model": str(model)}).encode()
        session = json.dumps({"tags": ["x" * num_bytes]}).encode()
        tokens = {"chunks": [{"tokens": [7] * (num_bytes // 2)}]}
        sample = msgspec.json.encode({"prompt": tokens, "sampling_params": {}, "base_model": str(model)})
        proto = {"Content-Type": "application/x-protobuf"}
        requests = {
            "a small one": ("/v1/runs", run, plain),
            "create_session": ("/api/v1/create_session", session, plain),
            "create_session, gzip": (
                "/api/v1/create_session", gzip.compress(session, 1), plain | {"Content-Encoding": "gzip"},
            ),
            "asample": ("/api/v1/asample", sample, plain),
            "forward_backward": ("/api/v1/forward_backward", passes(num_bytes), proto),
            "batch of rl --service": ("/v1/runs/alice:run/batch?seq=2", batch(num_bytes), proto),
            "a step's body": ("/v1/runs/alice:run/step?seq=3", sample, plain),
        }  # fmt: skip
        measure(url, requests)
        hub.kill()


if __name__ == "__main__":
    main()
