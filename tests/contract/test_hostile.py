"""Thousands of hostile requests (hostile.py) leak no memory; that none ends an engine is in test_contract.py."""

from __future__ import annotations

import asyncio
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

import pytest
from hostile import fire, greedy, shots
from servers import needs_vllm, save, scratch, serve

from stretto.transports.engine.client import EngineClient

KEY = "k"
ROUNDS, IN_A_ROUND = 10, 500  # many, since memory comes in huge pages of 2 MiB
WARM_UP = 4000
"""Requests until caches of code and memory have reached their size."""
FLAT_BYTES = 1024
"""Bytes by which an engine may grow per request, in the median of the rounds: allocators take memory in large steps, a
leak shows in every round."""
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""oneDNN keeps a kernel for each of the last 1024 shapes that it has computed, some 200 MB."""


def own_bytes(pid: int) -> int:
    """Memory of a process and all below it, without mapped files."""
    children = [c for path in Path(f"/proc/{pid}/task").glob("*/children") for c in path.read_text().split()]
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = {words[0]: int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:")}
    return sum(sizes.values()) + sum(own_bytes(int(child)) for child in children)


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["embedded", pytest.param("vllm", marks=needs_vllm)])
async def test_five_thousand_requests_leave_an_engine_as_it_was(engine_name, tmp_path):
    model = save(scratch(0), tmp_path / "model")
    flags = ("--api-key", KEY, "--server.max-waiting-requests", "64")
    with serve(engine_name, model, tmp_path / "log", *flags, env=FEW_KERNELS) as (url, child):
        async with EngineClient([url], api_key=KEY) as client:
            await client.wait_ready(240)
        before = await greedy(url, KEY)
        await fire(url, shots(seed=100, count=WARM_UP), key=KEY)
        requests, sizes = shots(seed=2, count=ROUNDS * IN_A_ROUND), [own_bytes(child.pid)]
        for _ in range(ROUNDS):
            outcome = await fire(url, islice(requests, IN_A_ROUND), key=KEY)
            assert outcome.failures == [] and outcome.statuses.total() == IN_A_ROUND
            await asyncio.sleep(1)
            sizes.append(own_bytes(child.pid))
        assert child.poll() is None and await greedy(url, KEY) == before
        growth = [after - before for before, after in pairwise(sizes)]
        assert median(growth) < FLAT_BYTES * IN_A_ROUND, growth
