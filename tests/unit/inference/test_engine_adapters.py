"""Several LoRA adapters in one engine: against merged weights, alone and in any batch, replaced and unloaded."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import msgspec
import numpy as np
import pytest
import torch
from engine_runs import ask, audit, build_core, build_model, run, submit
from tiny import randomly_adapted

from stretto.base.errors import DataError
from stretto.config.sections.model import LoRASection
from stretto.inference.embedded.engine import Engine, running
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.lora import Adapter, save_adapter
from stretto.records.weight_manifest import AdapterInfo, WeightGroup
from stretto.transports.engine.api import Refusal
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.shm import ShmPublisher

pytestmark = pytest.mark.usefixtures("both_engines")

SHAPES = {"dense": {}, "moe": {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}}
PROMPT = np.arange(3, 24, dtype=np.int32)


def adapted(seed: int, rank: int = 4, **shape):
    """The base model with a random adapter beside it."""
    return randomly_adapted(build_model(**shape), LoRASection(rank=rank, alpha=2.0 * rank), seed, 0.15)


def adapter(seed: int, **settings) -> Adapter:
    return Adapter.of(adapted(seed, **settings))


def logprobs_of(model, ids) -> np.ndarray:
    ids = torch.as_tensor(np.asarray(ids), dtype=torch.int64)
    with torch.no_grad():
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
        logprobs = torch.log_softmax(hidden @ model.output_weight.T, -1)
    return logprobs[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()


def of(name: str | None, **settings):
    label = settings.pop("label", name or "base")
    return msgspec.structs.replace(ask(label, settings.pop("prompt", PROMPT), **settings), adapter=name)


def same(one, other) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.logprobs, other.logprobs)


@pytest.mark.heavy
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_adapter_in_a_mixed_batch_is_its_merged_model(shape):
    core = build_core(build_model(**shape))
    ranks = {"a": 4, "b": 8, "c": 3}
    for seed, (name, rank) in enumerate(ranks.items()):
        core.load_adapter(name, adapter(seed, rank=rank, **shape))
    answers = run(core, of(None, n=2), *(of(name, n=2, scored=True) for name in ranks))
    references = [build_model(**shape), *(adapted(i, r, **shape) for i, r in enumerate(ranks.values()))]
    for completions, reference in zip(answers, references):
        for completion in completions:
            expected = logprobs_of(reference, np.concatenate([PROMPT, completion.token_ids]))
            np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], atol=2e-5, rtol=0)
            if completion.prompt_logprobs is not None:
                prompt = completion.prompt_logprobs[1:]
                np.testing.assert_allclose(prompt, expected[: len(PROMPT) - 1], atol=2e-5, rtol=0)
    assert audit(core) == []


@pytest.mark.heavy
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_do_not_depend_on_what_else_is_in_the_batch(shape):
    def fresh(*names):
        core = build_core(build_model(**shape))
        for seed, name in enumerate("abc"):
            if name in names:
                core.load_adapter(name, adapter(seed, **shape))
        return core

    mixed = run(fresh(*"abc"), of(None, n=3), *(of(name, n=5) for name in "abc"))
    [base] = run(fresh(), of(None, n=3))
    assert all(same(one, other) for one, other in zip(mixed[0], base))
    for index, name in enumerate("abc", start=1):
        [alone] = run(fresh(name), of(name, n=5))
        assert all(same(one, other) for one, other in zip(mixed[index], alone)), name


def test_an_engine_that_had_an_adapter_serves_the_base_with_the_same_bits():
    core = build_core()
    [[before]] = run(core, of(None, label="before"))
    core.load_adapter("a", adapter(0))
    [[beside]] = run(core, of(None, label="beside"))
    core.adapters.unload("a")
    [[after]] = run(core, of(None, label="after"))
    assert same(before, beside) and same(before, after)


@pytest.mark.heavy
def test_caches_are_by_adapter_and_by_what_it_holds():
    long = np.arange(2, 39, dtype=np.int32)
    core = build_core()
    core.load_adapter("a", adapter(0))
    core.load_adapter("b", adapter(1))
    ask_for = lambda name, label: run(core, of(name, label=label, prompt=long, salt="same"))[0][0]
    cold = ask_for("a", "1")
    assert (cold.cached_tokens, ask_for("b", "2").cached_tokens, ask_for(None, "3").cached_tokens) == (0, 0, 0)
    warm = ask_for("a", "4")
    assert warm.cached_tokens >= 32 and same(warm, cold)
    core.load_adapter("a", adapter(2))
    replaced = ask_for("a", "5")
    assert replaced.cached_tokens == 0 and not same(replaced, cold)
    core.adapters.unload("a")
    core.load_adapter("a", adapter(0))
    again = ask_for("a", "6")
    assert again.cached_tokens == 0 and same(again, cold)


def test_tokens_are_marked_with_the_version_of_their_adapter():
    core = build_core()
    core.version = 7
    core.load_adapter("a", adapter(0))
    core.load_adapter("b", adapter(1), version=40)
    spans = [c[0].versions[0].version for c in run(core, of(None), of("a"), of("b"))]
    assert spans == [7, 0, 40]
    core.load_adapter("a", adapter(1))
    assert run(core, of("a", label="again"))[0][0].versions[0].version == 1


def test_requests_under_way_go_on_under_a_replaced_adapter_and_outlive_an_unloaded_one():
    core = build_core()
    core.load_adapter("a", adapter(0))
    [request] = submit(core, of("a", max_tokens=20))
    for _ in range(8):
        core.step()
    core.load_adapter("a", adapter(1))
    for _ in range(4):
        core.step()
    core.adapters.unload("a")
    assert core.refusal_reason(of("a", label="late")) is not None
    while core.has_work:
        core.step()
    [completion] = request.completions
    assert len(completion.token_ids) == 20
    [first, second] = completion.versions
    assert (first.version, second.version) == (0, 1) and 0 < first.end < 20
    ids = np.concatenate([PROMPT, completion.token_ids])
    before = logprobs_of(adapted(0), ids)[len(PROMPT) - 1 :][: first.end]
    np.testing.assert_allclose(completion.logprobs[: first.end], before, atol=2e-5, rtol=0)


@pytest.mark.heavy
def test_preemption_gives_the_same_tokens():
    roomy, tight = build_core(), build_core(kv_cache_tokens=256)
    for core in (roomy, tight):
        core.load_adapter("a", adapter(0))
    specs = [of(name, label=f"{name}{i}", max_tokens=60, seed=i) for i in range(4) for name in ("a", None)]
    expected, found = run(roomy, *specs), run(tight, *specs)
    assert tight.scheduler.counters.num_preemptions > 0
    assert all(same(a[0], b[0]) for a, b in zip(expected, found))


@pytest.mark.heavy
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("transport", ["filesystem", "shm", "collective"])
async def test_the_policys_adapter_comes_over_every_transport(transport, shape, tmp_path):
    kinds = {
        "filesystem": lambda: FilesystemPublisher(tmp_path, keep_versions=2),
        "shm": lambda: ShmPublisher("test-adapters"),
        "collective": lambda: pytest.importorskip("stretto_broadcast.collective").CollectivePublisher(
            "127.0.0.1", 0, bucket_bytes=4000, timeout_s=30
        ),
    }
    core = build_core(build_model(**shape))
    publisher = kinds[transport]()
    try:
        async with running(Engine(core)) as engine:
            for version, seed in ((1, 5), (2, 6)):
                policy = adapted(seed, **shape)
                manifest = publisher.publish(version, Adapter.of(policy).tensors())
                manifest = msgspec.structs.replace(manifest, adapter=AdapterInfo(4, 2.0))
                group = WeightGroup(request=uuid4().hex, world_size=1, rank=0)
                await engine.update(manifest, group if transport == "collective" else None)
                done = await engine.generate(of(None, label=f"v{version}"))
                [completion] = done.completions
                assert [span.version for span in completion.versions] == [version]
                expected = logprobs_of(policy, np.concatenate([PROMPT, completion.token_ids]))
                np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], atol=2e-5, rtol=0)
            whole = publisher.publish(3, hub.export_tensors(build_model(9, **shape)))
            group = WeightGroup(request=uuid4().hex, world_size=1, rank=0)
            await engine.update(whole, group if transport == "collective" else None)
            [completion] = (await engine.generate(of(None, label="whole"))).completions
            expected = logprobs_of(build_model(9, **shape), np.concatenate([PROMPT, completion.token_ids]))
            np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], atol=2e-5, rtol=0)
    finally:
        await asyncio.to_thread(publisher.close)


async def test_adapters_that_do_not_fit_are_refused_and_nothing_changes(tmp_path):
    core = build_core()
    publisher = FilesystemPublisher(tmp_path / "b", keep_versions=2)
    other = adapted(0, hidden_size=32)
    save_adapter(other, tmp_path / "other", LoRASection(rank=4, alpha=8.0))
    save_adapter(adapted(0), tmp_path / "good", LoRASection(rank=4, alpha=8.0))
    async with running(Engine(core)) as engine:
        [before] = (await engine.generate(of(None))).completions
        manifest = publisher.publish(1, Adapter.of(other).tensors())
        with pytest.raises(Refusal, match="do not fit"):
            await engine.update(msgspec.structs.replace(manifest, adapter=AdapterInfo(4, 2.0)))
        for path, message in (("other", "do not fit"), ("absent", "no such file")):
            with pytest.raises(Refusal, match=message):
                await engine.load_adapter("x", str(tmp_path / path), is_replacing=False)
        await engine.load_adapter("x", str(tmp_path / "good"), is_replacing=False)
        with pytest.raises(Refusal, match="load_inplace"):
            await engine.load_adapter("x", str(tmp_path / "good"), is_replacing=False)
        await engine.load_adapter("x", str(tmp_path / "good"), is_replacing=True)
        with pytest.raises(Refusal, match="no adapter is called 'y'"):
            await engine.unload_adapter("y")
        with pytest.raises(Refusal, match="no adapter is called 'y'"):
            await engine.generate(of("y"))
        [after] = (await engine.generate(of(None, label="after"))).completions
        assert same(before, after)
        await engine.unload_adapter("x")
        with pytest.raises(Refusal, match="no adapter is called 'x'"):
            await engine.generate(of("x"))


def test_an_adapter_of_the_output_head_or_a_router_is_refused():
    core = build_core(build_model(**SHAPES["moe"]))
    for name, shape in (("model.layers.0.mlp.gate", (4, 64)), ("model.embed_tokens", (40, 64))):
        pair = torch.zeros(2, shape[1]), torch.zeros(shape[0], 2)
        with pytest.raises(DataError, match="can be adapted"):
            core.load_adapter("x", Adapter({f"{name}.weight": pair}, 2, 1.0))
