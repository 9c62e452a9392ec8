"""One engine whose tensor parallel ranks two nodes share, here two addresses of this machine.

Weights come by both wires, and either node dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from servers import logprobs_of, needs_vllm, save, scores_of
from test_parallel import PROMPT, ask, two_headed
from waiting import until

from stretto.base import keeper
from stretto.base.errors import EngineError
from stretto.models.hub import export_tensors
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.layout import Publisher
from stretto_broadcast.collective import CollectivePublisher

pytestmark = [pytest.mark.slow, needs_vllm]
START_S = 700
END_S = 180  # processes of vLLM end slowly on a busy machine


@dataclass
class Shared:
    """An engine over two nodes, started by the same command; `marks` in the environment tell their processes apart."""

    url: str
    other: str
    nodes: list[subprocess.Popen[bytes]]
    marks: list[str]
    logs: list[Path]

    def said(self) -> str:
        return "\n\n".join(log.read_text() for log in self.logs)


@pytest.fixture
def shared(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shared]:
    model, port = save(two_headed(0), tmp_path / "model"), free_port()
    words = ["--model", str(model), "--output-dir", str(tmp_path), "--device", "cpu", "--max-model-len", "512"]
    words += ["--hosts", "127.0.0.1", "127.0.0.2", "--deployment.type", "multi_node", "--parallel.tp", "2"]
    words += ["--deployment.nodes-per-engine", "2", "--server.port", str(port)]
    words += ["--deployment.data-parallel-rpc-port", str(free_port()), *getattr(request, "param", ())]
    urls = [f"http://127.0.0.{1 + node}:{port}" for node in range(2)]
    engine = Shared(*urls, [], [], [])
    for node in range(2):
        engine.marks.append(mark := f"test{os.urandom(4).hex()}.1;")
        engine.logs.append(log := tmp_path / f"node-{node}.log")
        with log.open("wb") as output:
            engine.nodes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "stretto", "inference", *words, "--node-rank", str(node)],
                    env=os.environ | {keeper.VARIABLE: os.environ.get(keeper.VARIABLE, "") + mark},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    yield engine
    for node, mark in zip(engine.nodes, engine.marks):
        node.kill()
        node.wait()
        keeper.kill_marked(mark)


async def check_update(client: EngineClient, publisher: Publisher, version: int, seed: int) -> None:
    """Load a version; its scores are those of a plain forward pass, which half of the ranks alone cannot compute."""
    await client.update_weights(publisher.publish(version, export_tensors(two_headed(seed))))
    publisher.release(version - 1)
    scores = await scores_of(client, PROMPT, f"canary-{version}")
    np.testing.assert_allclose(scores[1:], logprobs_of(two_headed(seed), PROMPT), atol=5e-5, rtol=0)
    for i in range(3):
        [completion] = await client.generate(ask(f"v{version}-{i}"))
        assert [span.version for span in completion.versions] == [version]
        whole = np.concatenate([PROMPT, completion.token_ids])
        expected = logprobs_of(two_headed(seed), whole)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=5e-5, rtol=0)


async def test_nodes_that_share_ranks_load_both_kinds_of_weights_and_are_started_anew_together(
    shared: Shared, tmp_path: Path
) -> None:
    broadcast = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=50_000, timeout_s=60)
    files = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    async with EngineClient([shared.url], timeout_s=120, max_retries=20) as client:
        await client.wait_ready(START_S)
        await check_update(client, broadcast, 1, seed=1)
        await check_update(client, files, 2, seed=0)
        await check_update(client, broadcast, 3, seed=1)
        [worker] = [pid for pid in keeper.marked_processes(shared.marks[1]) if b"Worker" in name_of(pid)]
        os.kill(worker, signal.SIGKILL)

        def is_anew() -> bool:
            assert [node.poll() for node in shared.nodes] == [None, None], shared.said()
            return all("anew" in log.read_text() for log in shared.logs)

        await until(is_anew, END_S)
        await client.wait_ready(START_S)
        await check_update(client, broadcast, 4, seed=1)
    broadcast.close()
    assert f"another node of this engine, {shared.other}, is gone" in shared.said()
    assert "a worker of this node has died" in shared.said()
    for node in shared.nodes:
        node.terminate()
    assert [node.wait(END_S) for node in shared.nodes] == [0, 0]


@pytest.mark.parametrize("shared", [("--max-restarts", "0")], indirect=True)
@pytest.mark.parametrize(("killed", "is_busy"), [(1, True), (0, False)])
async def test_a_node_that_is_killed_ends_the_one_that_shares_its_ranks(
    shared: Shared, killed: int, is_busy: bool
) -> None:
    """All of a node's processes at once; the other one is idle, or has running requests."""
    left, urls = 1 - killed, (shared.url, shared.other)
    async with EngineClient([shared.url], timeout_s=120, max_retries=0) as client:
        await client.wait_ready(START_S)
        await client.generate(ask("before"))

        async def ask_on() -> None:
            for i in range(1_000_000):
                await client.generate(ask(f"r{i}"))

        asking = asyncio.create_task(ask_on()) if is_busy else None
        await asyncio.sleep(3)
        shared.nodes[killed].kill()
        keeper.kill_marked(shared.marks[killed])
        if asking is not None:
            async with asyncio.timeout(END_S):
                with pytest.raises(EngineError):
                    await asking
    assert await asyncio.to_thread(shared.nodes[left].wait, END_S) == 1
    log = shared.logs[left].read_text()
    assert f"error: another node of this engine, {urls[killed]}, is gone" in log, log
    assert keeper.marked_processes(shared.marks[left]) == []


def name_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/comm").read_bytes()
