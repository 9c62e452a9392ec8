"""Engines that draft: log-probabilities are the policy's, and a new version takes over in the middle of replies."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from processes.add_ons import needs
from servers import logprobs_of, needs_vllm, scratch, serve_ready

from stretto.models.hub import export_tensors
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.shm import ShmPublisher

FLAGS = (
    "--speculation.method", "ngram", "--speculation.num-speculative-tokens", "4",
    "--speculation.prompt-lookup-min", "1", "--speculation.prompt-lookup-max", "3",
)  # fmt: skip
PROMPT = np.tile(np.arange(20, 26, dtype=np.int32), 6)


@pytest.fixture(
    scope="module",
    params=[pytest.param("embedded", marks=needs("speculation")), pytest.param("vllm", marks=needs_vllm)],
)
def engine(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with serve_ready(request.param, scratch(0), directory, *FLAGS) as url:
        yield url


def asked(name: str, n: int = 4, **sampling) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 200, "seed": 1, "ignore_eos": True} | sampling)
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, n=n, sampling=params)


def mismatch(completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """The returned log-probabilities minus those of the policy's version of each token."""
    ids = np.concatenate([PROMPT, completion.token_ids])
    found = np.empty(len(completion.token_ids), np.float32)
    for span in completion.versions:
        expected = logprobs_of(scratch(span.version), ids, temperature)[len(PROMPT) - 1 :]
        found[span.start : span.end] = expected[span.start : span.end]
    return completion.logprobs - found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.2}, {"temperature": 0.2, "stop_token_ids": (30, 31, 32)}])
async def test_logprobs_are_the_policys(engine, sampling):
    async with EngineClient([engine], timeout_s=120) as client:
        completions = await client.generate(asked(f"same {sampling}", **sampling))
    for completion in completions:
        assert np.abs(mismatch(completion, sampling.get("temperature", 1.0))).max() < 2e-5


async def test_drafts_are_made_and_counted(engine):
    """Time decides whether the embedded engine drafts, so on a busy machine it may do without for a while."""
    grown: dict[str, float] = {}
    async with EngineClient([engine], timeout_s=120) as client, asyncio.timeout(240):
        before = await client.metrics()
        for round_ in itertools.count():
            await client.generate(asked(f"count {round_}", n=1, temperature=0.0))
            after = await client.metrics()
            grown = {name: after[name] - before.get(name, 0.0) for name in after if "spec_decode" in name}
            if round_ >= 7 and grown["vllm:spec_decode_num_accepted_tokens_total"] > 0:
                break
    assert grown["vllm:spec_decode_num_drafts_total"] > 0
    drafted, accepted = (grown[f"vllm:spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted"))
    assert 0 < accepted <= drafted
    by_position = [grown[f"vllm:spec_decode_num_accepted_tokens_per_pos_total/{i}"] for i in range(4)]
    assert sum(by_position) == accepted and by_position == sorted(by_position, reverse=True)


async def test_a_new_version_in_the_middle_of_drafts(engine):
    """The first tokens are of version 0, the last of version 1, each with the log-probability of its version."""
    publisher = ShmPublisher("test-drafts")
    try:
        async with EngineClient([engine], timeout_s=120) as client:
            running = asyncio.create_task(client.generate(asked("between", temperature=0.3, max_tokens=400)))
            await asyncio.sleep(0.15)
            await client.update_weights(publisher.publish(1, export_tensors(scratch(1))))
            completions = await running
    finally:
        publisher.close()
    assert {span.version for completion in completions for span in completion.versions} <= {0, 1}
    for completion in completions:
        # The cache of the old version is kept, so the new one's tokens are near, not equal: only the old are exact.
        first = completion.versions[0]
        if first.version == 0:
            assert np.abs(mismatch(completion, 0.3)[: first.end]).max() < 2e-5
