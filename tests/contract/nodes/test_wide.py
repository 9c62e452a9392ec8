"""One engine over two nodes, here two addresses of this machine: experts on both, weights broadcast to all at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from servers import logprobs_of, needs_vllm, save
from test_contract_moe import mixture
from waiting import until

from stretto.base import keeper
from stretto.base.errors import EngineError
from stretto.models.hub import export_tensors
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto_broadcast.collective import CollectivePublisher

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
    pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not installed"),
]
DEADLINE_S = 180  # processes of vLLM end slowly on a busy machine
PROMPT = np.arange(20, 90, dtype=np.int32)


def ask(name: str, salt: str, max_tokens: int = 8) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, cache_salt=salt, session_id=name)


async def check(url: str, engines: list[str], publisher: CollectivePublisher) -> None:
    """Weights A -> B -> A -> B while requests run, scored by both nodes and by a plain forward pass."""
    async with EngineClient([url], engines, timeout_s=120, max_retries=20) as client:
        await client.wait_ready(300)
        for version, seed in enumerate((1, 0, 1, 0), start=1):
            running = [
                asyncio.create_task(client.generate(ask(f"during-{version}-{i}", str(version - 1), 200)))
                for i in range(4)
            ]
            await client.update_weights(publisher.publish(version, export_tensors(mixture(seed))))
            publisher.release(version - 1)
            scores = await client.score_canary(PROMPT, f"canary-{version}")
            assert len(scores) == 2
            for found in scores.values():
                np.testing.assert_allclose(found.prompt[1:], logprobs_of(mixture(seed), PROMPT), atol=5e-5, rtol=0)
            for i in range(6):
                [completion] = await client.generate(ask(f"v{version}-{i}", str(version)))
                assert [span.version for span in completion.versions] == [version]
                whole = np.concatenate([PROMPT, completion.token_ids])
                expected = logprobs_of(mixture(seed), whole)[len(PROMPT) - 1 :]
                np.testing.assert_allclose(completion.logprobs, expected, atol=5e-5, rtol=0)
            for [completion] in await asyncio.gather(*running):
                assert len(completion.token_ids) == 200
    publisher.close()


@dataclass
class Wide:
    """An engine over two nodes, started by the same command; `marks` in the environment tell their processes apart."""

    url: str
    backends: list[str]
    nodes: list[subprocess.Popen]
    marks: list[str]
    logs: list[Path]


@pytest.fixture
def wide(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Wide]:
    model, port, backend = save(mixture(0), tmp_path / "model"), free_port(), free_port()
    words = ["--model", str(model), "--output-dir", str(tmp_path), "--max-model-len", "512", "--device", "cpu"]
    words += ["--hosts", "127.0.0.1", "127.0.0.2", "--deployment.type", "multi_node"]
    words += ["--enable-expert-parallel", "--parallel.dp", "2"]
    words += ["--deployment.router-port", str(port), "--deployment.backend-port", str(backend)]
    words += ["--deployment.data-parallel-rpc-port", str(free_port()), *getattr(request, "param", ())]
    backends = [f"http://127.0.0.{1 + rank}:{backend}" for rank in range(2)]
    engine = Wide(f"http://127.0.0.1:{port}", backends, [], [], [])
    for rank in range(2):
        engine.marks.append(mark := f"test{os.urandom(4).hex()}.1;")
        engine.logs.append(log := tmp_path / f"node-{rank}.log")
        with log.open("wb") as output:
            engine.nodes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "stretto", "inference", *words, "--node-rank", str(rank)],
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


def test_a_wide_engine_receives_broadcasts_on_both_of_its_nodes(wide: Wide) -> None:
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=50_000, timeout_s=60)
    asyncio.run(check(wide.url, wide.backends, publisher))
    for node in wide.nodes:
        node.terminate()
    assert [node.wait(DEADLINE_S) for node in wide.nodes] == [0, 0]


@pytest.mark.parametrize("wide", [("--max-restarts", "0")], indirect=True)
@pytest.mark.parametrize(("killed", "is_busy"), [(1, False), (0, True)])
async def test_a_node_that_is_killed_ends_the_other_one(wide: Wide, killed: int, is_busy: bool) -> None:
    """All of a node's processes at once; the other one is idle, or has running requests."""
    left = 1 - killed
    async with EngineClient([wide.backends[left]], timeout_s=120, max_retries=0) as client:
        async with EngineClient([wide.backends[killed]]) as other:
            await asyncio.gather(client.wait_ready(300), other.wait_ready(300))
        await client.generate(ask("before", "0"))
        answers = Counter[int]()

        async def ask_on(stream: int) -> None:
            while True:
                await client.generate(ask(f"r{stream}-{answers[stream]}", "0", 100))
                answers[stream] += 1

        streams = [asyncio.create_task(ask_on(stream)) for stream in range(4 * is_busy)]
        await until(lambda: len(answers) == len(streams) or any(stream.done() for stream in streams))
        wide.nodes[killed].kill()
        keeper.kill_marked(wide.marks[killed])
        async with asyncio.timeout(DEADLINE_S):
            for result in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(result, EngineError), result
        assert len(answers) == len(streams)
    assert await asyncio.to_thread(wide.nodes[left].wait, DEADLINE_S) == 1
    log = wide.logs[left].read_text()
    assert f"error: another node of this engine, {wide.backends[killed]}, is gone" in log, log
    assert keeper.marked_processes(wide.marks[left]) == []


async def test_an_engine_whose_one_node_fails_is_started_anew_on_both(wide: Wide) -> None:
    async with EngineClient([wide.url], wide.backends, timeout_s=120, max_retries=20) as client:
        await client.wait_ready(300)
        await client.generate(ask("before", "0"))
        [engine] = [pid for pid in keeper.marked_processes(wide.marks[1]) if b"EngineCor" in name_of(pid)]
        os.kill(engine, signal.SIGKILL)

        def is_anew() -> bool:
            shown = [log.read_text() for log in wide.logs]
            assert [node.poll() for node in wide.nodes] == [None, None], shown
            return all("anew" in text for text in shown)

        await until(is_anew, DEADLINE_S)
        await client.wait_ready(300)
        await client.generate(ask("after", "0"))


def name_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/comm").read_bytes()
