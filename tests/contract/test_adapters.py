"""LoRA adapters on every engine: loaded, replaced and unloaded while it serves, several in a batch."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from unittest.mock import ANY

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from ports import free_port
from servers import VOCAB, logprobs_of, needs_vllm, save, scratch, serve, serve_ready, until_counted

from stretto.base.errors import EngineError
from stretto.config.sections.model import LoRASection, ScratchSection
from stretto.config.sections.transport import DeltaSection
from stretto.models.hub import export_tensors, random_model
from stretto.models.lora import Adapter, attach_adapters, save_adapter
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.weight_manifest import AdapterInfo
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.shm import ShmPublisher
from stretto_broadcast.collective import CollectivePublisher
from stretto_broadcast.delta import DeltaPublisher

PROMPT = np.arange(20, 90, dtype=np.int32)
CLOSE = {"atol": 3e-5, "rtol": 0}
LORA = LoRASection(rank=8, alpha=16.0)
FLAGS = ("--lora.max-loras", "2", "--lora.max-lora-rank", "8")
_labels = itertools.count()


def moe(seed: int):
    section = ScratchSection(
        family="qwen3_moe", seed=seed, num_heads=2, num_kv_heads=1, head_dim=32, max_position_embeddings=512
    )
    return random_model(section, VOCAB, eos_token_id=2)


def adapted(seed: int, base=scratch, lora: LoRASection = LORA):
    """The served model with a random adapter beside it."""
    model = base(0)
    attach_adapters(model, lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2, generator=generator)
    return model


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])])
def url(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with serve_ready(request.param, scratch(0), directory, *FLAGS) as url:
        yield url


class Served:
    """An engine with routes for adapters; unloads at the end what a test has loaded."""

    def __init__(self, url: str, directory, http: aiohttp.ClientSession, client: EngineClient) -> None:
        self.url, self.directory, self.http, self.client = url, directory, http, client
        self.loaded: set[str] = set()

    async def post(self, path: str, **body) -> tuple[int, str]:
        async with self.http.post(self.url + path, json=body) as answer:
            return answer.status, await answer.text()

    async def load(self, name: str, model, lora: LoRASection = LORA, path: str | None = None, **body):
        path = self.directory / (path or f"{name}-{next(_labels)}")
        save_adapter(model, path, lora)
        status, text = await self.post(api.LOAD_ADAPTER, lora_name=name, lora_path=str(path), **body)
        if status == 200:
            self.loaded.add(name)
        return status, text

    async def unload(self, name: str) -> tuple[int, str]:
        self.loaded.discard(name)
        return await self.post(api.UNLOAD_ADAPTER, lora_name=name)

    async def models(self) -> list[dict]:
        async with self.http.get(self.url + api.MODELS) as answer:
            return (await answer.json())["data"]

    async def check(self, name: str | None, model, **settings) -> list:
        """Sample and compare with this model; returns the completions."""
        spec = ask(name, **settings)
        done = await self.client.generate(spec)
        for completion in done:
            expected = logprobs_of(model, np.concatenate([PROMPT, completion.token_ids]))
            np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], **CLOSE)
            if spec.prompt_logprobs:
                scores = completion.prompt_logprobs[1:]
                np.testing.assert_allclose(scores, expected[: len(PROMPT) - 1], **CLOSE)
        return done


@pytest.fixture
async def served(url, tmp_path):
    async with aiohttp.ClientSession() as http, EngineClient([url], timeout_s=120) as client:
        served = Served(url, tmp_path, http, client)
        yield served
        for name in set(served.loaded):
            assert (await served.unload(name))[0] == 200


def ask(
    name: str | None, n: int = 1, *, scored: bool = False, tokens: int = 8, salt: str | None = None
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"adapter-{next(_labels)}",
        prompt_ids=PROMPT,
        n=n,
        sampling=SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True),
        adapter=name,
        prompt_logprobs=scored,
        cache_salt=salt,
    )


async def test_all_adapters_and_the_base_model_in_one_batch(served):
    models = {"one": adapted(1), "two": adapted(2)}
    for name, model in models.items():
        assert (await served.load(name, model))[0] == 200
    calls = [served.check(name, model, n=2, tokens=24) for name, model in models.items()]
    await asyncio.gather(
        *calls,
        served.check(None, scratch(0), n=2, tokens=24),
        *(served.check(name, model, n=2, tokens=16) for name, model in models.items()),
    )


async def test_prompts_of_several_adapters_are_scored_in_one_batch(served):
    models = {"one": adapted(1), "two": adapted(2)}
    for name, model in models.items():
        assert (await served.load(name, model))[0] == 200
    status, text = await served.load("one", models["one"])
    assert status == 400 and "already" in text
    calls = [served.check(name, model, scored=True) for name, model in models.items() for _ in range(3)]
    await asyncio.gather(*calls, served.check(None, scratch(0), scored=True))


async def test_an_adapter_is_replaced_in_place_and_no_cache_of_the_old_one_is_used(served):
    await served.load("one", adapted(1), path="same")
    await served.check("one", adapted(1))
    assert (await served.check("one", adapted(1)))[0].cached_tokens > 0
    status, text = await served.load("one", adapted(3))
    assert status == 400 and "load_inplace" in text
    for seed, path in ((3, "same"), (4, "other"), (5, "other")):
        for salt in (None, "own"):
            await served.client.generate(ask("one", salt=salt))
        running = asyncio.create_task(served.client.generate(ask("one", tokens=300, salt="running")))
        await until_counted(served.client, "vllm:num_requests_running", 1)  # its blocks are in use
        if seed == 5:  # not in place
            assert (await served.unload("one"))[0] == 200
        assert (await served.load("one", adapted(seed), path=path, load_inplace=seed != 5))[0] == 200
        for salt in (None, "own"):
            [completion] = await served.check("one", adapted(seed), salt=salt)
            assert completion.cached_tokens == 0
        await running


@needs_vllm
@pytest.mark.slow
async def test_requests_that_wait_while_their_adapter_is_replaced_read_only_caches_of_the_new_one(tmp_path):
    """A salt of the caller names no adapter, so it does not keep the old one's cache either."""
    flags = (*FLAGS, "--max-num-seqs", "1")
    with serve("vllm", save(scratch(0), tmp_path / "model"), tmp_path / "log", *flags) as (url, _):
        async with aiohttp.ClientSession() as http, EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            served = Served(url, tmp_path, http, client)
            await served.load("one", adapted(1))
            for seed in (2, 3):
                for salt in (None, "own"):
                    await client.generate(ask("one", salt=salt))
                await client.generate(ask(None))
                running = asyncio.create_task(client.generate(ask(None, tokens=350)))
                await until_counted(client, "vllm:num_requests_running", 1)
                asked = (("one", None), ("one", "own"), ("one", None), (None, None))
                queued = [asyncio.create_task(client.generate(ask(name, salt=salt))) for name, salt in asked]
                await until_counted(client, "vllm:num_requests_waiting", len(asked))
                assert (await served.load("one", adapted(seed), load_inplace=True))[0] == 200
                assert not any(task.done() for task in (running, *queued)), "nothing waited"
                await running
                [first], [own], [second], [base] = await asyncio.gather(*queued)
                assert first.cached_tokens == own.cached_tokens == 0 < min(second.cached_tokens, base.cached_tokens)
                for completion in (first, own, second):
                    expected = logprobs_of(adapted(seed), np.concatenate([PROMPT, completion.token_ids]))
                    np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], **CLOSE)


async def test_models_lists_adapters_under_their_parent(served):
    [base] = await served.models()
    await served.load("one", adapted(1))
    base_again, one = await served.models()
    assert base_again["id"] == base["id"] and base["parent"] is None
    assert (one["id"], one["root"], one["parent"]) == ("one", "one", base["id"])
    await served.unload("one")
    assert len(await served.models()) == 1


async def test_an_unloaded_adapter_is_unknown_and_frees_its_place(served):
    for round_ in range(3):
        for name in ("one", "two"):
            assert (await served.load(f"{name}{round_}", adapted(round_)))[0] == 200
        status, text = await served.load("third", adapted(9))
        assert status == 400 and "max_loras" in text
        await asyncio.gather(
            served.check(f"one{round_}", adapted(round_)), served.check(None, scratch(0)),
            served.check(f"two{round_}", adapted(round_)),
        )  # fmt: skip
        for name in ("one", "two"):
            assert (await served.unload(f"{name}{round_}"))[0] == 200
    with pytest.raises(EngineError, match="one0"):
        await served.client.generate(ask("one0"))
    status, _ = await served.unload("one0")
    assert status == 404


async def check_places(served: Served, base) -> None:
    """Adapters are unloaded, and others loaded, while their requests are running; `base` serves those without one."""
    for round_ in range(2):
        for name in ("one", "two"):
            assert (await served.load(f"{name}{round_}", adapted(round_), path=f"{name}{round_}"))[0] == 200
        running = asyncio.create_task(served.check(f"one{round_}", adapted(round_), n=4, tokens=400))
        await asyncio.sleep(0.3)
        assert (await served.unload(f"one{round_}"))[0] == 200
        shutil.rmtree(served.directory / f"one{round_}")
        assert (await served.load(f"new{round_}", adapted(9)))[0] == 200
        others = ((f"new{round_}", adapted(9)), (f"two{round_}", adapted(round_)), (None, base))
        await asyncio.gather(*(served.check(*other, tokens=50) for other in others))
        await running
        await asyncio.gather(*(served.check(*other) for other in others))
        for name in ("new", "two"):
            assert (await served.unload(f"{name}{round_}"))[0] == 200


async def test_an_unloaded_adapter_ends_its_requests_and_its_place_is_free(served):
    await check_places(served, scratch(0))


async def test_a_loaded_adapter_needs_its_files_no_more(served, tmp_path):
    """Nor does an update bring back what was there before a replacement."""
    for seed in (1, 2):
        assert (await served.load("one", adapted(seed), path=f"{seed}", load_inplace=True))[0] == 200
    shutil.rmtree(served.directory / "2")
    await served.check("one", adapted(2))
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
    await served.client.update_weights(publisher.publish(1, export_tensors(scratch(0))))
    await asyncio.gather(served.check("one", adapted(2)), served.check(None, scratch(0)))


async def test_what_is_no_adapter_of_this_model_is_refused_with_the_reason(served):
    base = (await served.models())[0]["id"]
    cases = [
        (await served.post(api.LOAD_ADAPTER, lora_name="x", lora_path="/nowhere"), "no such file"),
        (await served.post(api.LOAD_ADAPTER, lora_name=base, lora_path="/nowhere"), ""),
        (await served.post(api.LOAD_ADAPTER, lora_name="", lora_path="/nowhere"), "lora_name"),
        (await served.load("x", adapted(1), LoRASection(rank=3, alpha=6)), "rank 3"),
    ]
    other = random_model(ScratchSection(num_heads=2, num_kv_heads=1, head_dim=32, hidden_size=32), VOCAB)
    attach_adapters(other, LORA)
    cases.append((await served.load("x", other), "do not fit"))
    for (status, text), word in cases:
        assert status == 400 and word in text, text
    assert len(await served.models()) == 1
    await served.check(None, scratch(0))


PUBLISHERS = {
    "filesystem": lambda path: FilesystemPublisher(path, keep_versions=2),
    "shm": lambda path: ShmPublisher("test-contract-adapters"),
    "collective": lambda path: CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=20_000, timeout_s=60),
    "changes": lambda path: DeltaPublisher(
        FilesystemPublisher(path, keep_versions=2), "test-contract-adapters", DeltaSection()
    ),
}


@pytest.mark.parametrize("transport", PUBLISHERS)
async def test_the_policys_adapter_comes_as_a_weight_update(served, transport, tmp_path):
    publisher = PUBLISHERS[transport](tmp_path / "broadcasts")
    try:
        for version in (1, 2):
            model = adapted(10 + version)
            manifest = publisher.publish(version, Adapter.of(model).tensors())
            info = AdapterInfo(LORA.rank, LORA.alpha / LORA.rank)
            await served.client.update_weights(msgspec.structs.replace(manifest, adapter=info))
            publisher.release(version - 1)
            [completion] = await served.check(None, model, salt=f"{transport} {version}")
            assert [span.version for span in completion.versions] == [version]
        await served.load("one", adapted(1))
        await served.client.update_weights(publisher.publish(3, export_tensors(scratch(0))))
        await asyncio.gather(
            served.check(None, scratch(0), salt=f"{transport} 3"),
            served.check("one", adapted(1), salt=f"{transport} 3"),
        )
    finally:
        await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])])
async def test_a_mixture_of_experts_with_adapters_of_its_attention(engine, tmp_path):
    attention = LoRASection(rank=8, alpha=16.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    with serve(engine, save(moe(0), tmp_path / "model"), tmp_path / "log", *FLAGS) as (url, _):
        async with aiohttp.ClientSession() as http, EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            served = Served(url, tmp_path, http, client)
            models = {"one": adapted(1, moe, attention), "two": adapted(2, moe, attention)}
            for name, model in models.items():
                assert (await served.load(name, model, attention))[0] == 200
            calls = [served.check(name, model) for name, model in models.items()]
            await asyncio.gather(*calls, served.check(None, moe(0)))
            whole = adapted(5, moe)
            status, text = await served.load("one", whole, load_inplace=True)
            if engine == "embedded":
                await served.check("one", whole)
            else:
                assert status == 400 and "experts" in text
            publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
            manifest = publisher.publish(1, Adapter.of(whole).tensors())
            manifest = msgspec.structs.replace(manifest, adapter=AdapterInfo(LORA.rank, 2.0))
            await client.update_weights(manifest)
            await served.check(None, whole, salt="1")


@needs_vllm
@pytest.mark.slow
async def test_vllm_computes_the_policys_adapter_beside_its_weights(tmp_path):
    """By every transport, with named adapters in the batch; weights and targets that it cannot compute are refused."""
    flags = (*FLAGS, "--lora.compute-policy", "true", "--lora.target-modules", '["q_proj", "v_proj", "o_proj"]')
    lora = LoRASection(rank=8, alpha=16.0, target_modules=("q_proj", "v_proj", "o_proj"))
    info = AdapterInfo(lora.rank, lora.alpha / lora.rank)
    with serve("vllm", save(scratch(0), tmp_path / "model"), tmp_path / "log", *flags) as (url, _):
        async with aiohttp.ClientSession() as http, EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            served, named = Served(url, tmp_path, http, client), adapted(1, lora=lora)
            assert await served.load("one", named, lora) == (200, ANY)
            await asyncio.gather(served.check(None, scratch(0)), served.check("one", named))
            version = 0
            for transport, build in PUBLISHERS.items():
                publisher = build(tmp_path / transport)
                for _ in range(2):
                    version += 1
                    model = adapted(10 + version, lora=lora)
                    manifest = publisher.publish(version, Adapter.of(model).tensors())
                    running = asyncio.create_task(client.generate(ask(None, tokens=200, salt=f"before {version}")))
                    await client.update_weights(msgspec.structs.replace(manifest, adapter=info))
                    salt = f"after {version}"
                    [completion], _ = await asyncio.gather(
                        served.check(None, model, salt=salt, n=1), served.check("one", named, salt=salt)
                    )
                    assert [span.version for span in completion.versions] == [version]
                    assert len((await running)[0].token_ids) == 200
                await asyncio.to_thread(publisher.close)
            publisher = PUBLISHERS["filesystem"](tmp_path / "refused")
            for version, tensors, adapter in (
                (9, Adapter.of(adapted(9)).tensors(), info),
                (10, export_tensors(scratch(1)), None),
            ):
                manifest = msgspec.structs.replace(publisher.publish(version, tensors), adapter=adapter)
                with pytest.raises(EngineError, match="compute_policy"):
                    await client.update_weights(manifest)
            publisher.close()


@needs_vllm
@pytest.mark.slow
async def test_named_adapters_beside_the_policys_keep_their_places_and_contents(tmp_path):
    flags = (*FLAGS, "--policy-lora.rank", "8", "--policy-lora.alpha", "16")
    with serve("vllm", save(scratch(0), tmp_path / "model"), tmp_path / "log", *flags) as (url, _):
        async with aiohttp.ClientSession() as http, EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            served = Served(url, tmp_path, http, client)
            await check_places(served, scratch(0))
            assert (await served.load("one", adapted(1), path="gone"))[0] == 200
            shutil.rmtree(tmp_path / "gone")
            publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
            for version in (1, 2):
                running = asyncio.create_task(served.check("one", adapted(1), tokens=200))
                policy = adapted(10 + version)
                manifest = publisher.publish(version, Adapter.of(policy).tensors())
                await client.update_weights(msgspec.structs.replace(manifest, adapter=AdapterInfo(LORA.rank, 2.0)))
                salt = f"{version}"
                await asyncio.gather(running, served.check("one", adapted(1)), served.check(None, policy, salt=salt))
            await served.unload("one")
