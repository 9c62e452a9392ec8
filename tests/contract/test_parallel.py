"""vLLM over two processes on a CPU: tensor parallel workers, stages of a pipeline, replicas of data parallelism."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from ports import free_port
from servers import logprobs_of, needs_vllm, save, scores_of, scratch, serve

from stretto.models.hub import export_tensors
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto_broadcast.collective import CollectivePublisher

pytestmark = [pytest.mark.slow, needs_vllm]
PROMPT = np.arange(20, 90, dtype=np.int32)


def two_headed(seed: int):
    from stretto.config.sections.model import ScratchSection
    from stretto.models.hub import random_model

    section = ScratchSection(
        seed=seed, num_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False
    )
    return random_model(section, 112, eos_token_id=2)


def ask(name: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, cache_salt=name)


async def check_updates(url: str, make, publisher) -> None:
    """Weights A -> B -> A, scored by the engine and by a plain forward pass; replies carry their version."""
    async with EngineClient([url], timeout_s=120) as client:
        await client.wait_ready(240)
        for version, seed in enumerate((1, 0, 1), start=1):
            await client.update_weights(publisher.publish(version, export_tensors(make(seed))))
            publisher.release(version - 1)
            scores = await scores_of(client, PROMPT, f"canary-{version}")
            np.testing.assert_allclose(scores[1:], logprobs_of(make(seed), PROMPT), atol=5e-5, rtol=0)
            for i in range(4):
                [completion] = await client.generate(ask(f"v{version}-{i}"))
                assert [span.version for span in completion.versions] == [version]
    publisher.close()


def test_tensor_parallel_workers_load_an_untied_head_from_files(tmp_path):
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    model = save(two_headed(0), tmp_path / "model")
    with serve("vllm", model, tmp_path / "log", "--parallel.tp", "2") as (url, _):
        asyncio.run(check_updates(url, two_headed, publisher))


def test_stages_of_a_pipeline_load_what_is_theirs_and_both_a_tied_head(tmp_path):
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    model = save(scratch(0), tmp_path / "model")
    with serve("vllm", model, tmp_path / "log", "--parallel.pp", "2") as (url, _):
        asyncio.run(check_updates(url, scratch, publisher))


def test_data_parallel_engines_all_receive_a_broadcast(tmp_path):
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=50_000, timeout_s=60)
    model = save(scratch(0), tmp_path / "model")
    with serve("vllm", model, tmp_path / "log", "--parallel.dp", "2") as (url, _):
        asyncio.run(check_updates(url, scratch, publisher))
