"""vLLM on a GPU: it computes what the policy does, takes new weights, and gives its memory back while it sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from stretto.config.sections.model import ScratchSection
from stretto.models.hub import export_tensors, random_model
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.shm import ShmPublisher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `pip install 'stretto[vllm]'`"),
]
PROMPT = (np.arange(100, dtype=np.int32) * 7 % 90 + 10).astype(np.int32)
TOLERANCE = 0.05
"""Nats on average, in bfloat16; two random models differ by some tenths."""
FLAGS = ("--gpu-memory-utilization", "0.3", "--max-model-len", "1024", "--enable-sleep-mode")


def policy(version: int):
    sizes = ScratchSection(seed=version, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=256)
    from servers import VOCAB

    return random_model(sizes, VOCAB, eos_token_id=2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from servers import serve_ready

    with serve_ready("vllm", policy(0), tmp_path_factory.mktemp("vllm"), *FLAGS) as url:
        yield url


async def error_of(client: EngineClient, version: int) -> float:
    """How far the engine's log-probabilities of the prompt are from a version's."""
    from servers import logprobs_of

    [scores] = (
        await client.score_canary(PROMPT, f"canary-{version}-{np.random.default_rng().integers(1 << 30)}")
    ).values()
    return float(np.abs(scores.prompt[1:] - logprobs_of(policy(version), PROMPT)).mean())


async def test_it_computes_the_policy_before_and_after_updates_and_after_it_slept(engine: str, record_property):
    publisher = ShmPublisher("test-gpu")
    async with EngineClient([engine], timeout_s=120) as client:
        assert await error_of(client, 0) < TOLERANCE
        assert await error_of(client, 1) > TOLERANCE, "the versions do not differ"
        for version in (1, 2):
            await client.update_weights(publisher.publish(version, export_tensors(policy(version))))
            record_property(f"error, version {version}", error := await error_of(client, version))
            assert error < TOLERANCE
        awake = torch.cuda.mem_get_info()[0]
        await client.sleep(2)
        freed = (torch.cuda.mem_get_info()[0] - awake) / 2**30
        record_property("GiB that are free while it sleeps", round(freed, 2))
        assert freed > 1, "an engine that sleeps holds its memory"
        await client.wake_up("weights")
        await client.update_weights(publisher.publish(3, export_tensors(policy(3))))
        await client.wake_up("kv_cache")
        record_property("error after it slept", error := await error_of(client, 3))
        assert error < TOLERANCE
        sampling = SamplingParams(max_tokens=32, seed=1, ignore_eos=True)
        [reply] = await client.generate(GenerateRequest(request_id="after", prompt_ids=PROMPT, n=1, sampling=sampling))
        assert len(reply.token_ids) == 32 and {span.version for span in reply.versions} == {3}
    publisher.close()
