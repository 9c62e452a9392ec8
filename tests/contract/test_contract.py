"""What every engine promises, embedded or vLLM: one file, the same requests, real servers.

Tests change the served weights and leave version 0's weights behind (fixture `client`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from hostile import fire, greedy, shots
from ports import free_port
from processes import forked
from servers import logprobs_of, needs_vllm, save, scores_of, scratch, serve, until_counted

from stretto.base.errors import EngineError
from stretto.base.paths import RunDir
from stretto.config.sections.transport import CollectiveWeights, DeltaSection, FilesystemWeights
from stretto.models.hub import export_tensors
from stretto.models.tensor_map import as_whole_slices
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.weight_manifest import WeightGroup, WeightManifest
from stretto.trainer.network import scaled
from stretto.transports.engine import api, updates
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights import build_publisher, receive
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.shm import ShmPublisher
from stretto.transports.weights.store import connect_store
from stretto_broadcast.collective import CollectivePublisher

PROMPT = np.arange(20, 50, dtype=np.int32)
CLOSE = {"atol": 2e-5, "rtol": 0}


@pytest.fixture
async def client(engine):
    async with EngineClient([engine[1]], timeout_s=120) as client:
        yield client


@pytest.fixture
async def weights(client, tmp_path):
    """Loads scratch(seed) as a version; the first weights are loaded again at the end."""
    publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)

    async def load(version: int, seed: int) -> None:
        await client.update_weights(publisher.publish(version, export_tensors(scratch(seed))))

    yield load
    await load(1000, 0)
    publisher.close()


def ask(name: str, prompt=PROMPT, n: int = 1, salt: str | None = None, **sampling) -> GenerateRequest:
    sampling = {"max_tokens": 8, "seed": 1, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=name, prompt_ids=prompt, n=n, sampling=SamplingParams(**sampling), cache_salt=salt
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(client, temperature):
    for completion in await client.generate(ask("lp", n=4, temperature=temperature, max_tokens=24)):
        expected = logprobs_of(scratch(0), np.concatenate([PROMPT, completion.token_ids]), temperature)
        np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], **CLOSE)


async def test_greedy_is_the_likeliest_token(client):
    [completion] = await client.generate(ask("greedy", temperature=0.0, seed=None))
    [again] = await client.generate(ask("greedy-2", temperature=0.0, seed=None))
    assert completion.token_ids.tolist() == again.token_ids.tolist()
    ids = np.concatenate([PROMPT, completion.token_ids])
    chosen = logprobs_of(scratch(0), ids)[len(PROMPT) - 1]
    other = [logprobs_of(scratch(0), [*PROMPT, token])[-1] for token in range(0, 112, 7)]
    assert chosen >= max(other)


async def test_a_seed_gives_the_same_tokens_and_samples_differ(client):
    first = await client.generate(ask("seeded", n=3))
    second = await client.generate(ask("seeded-again", n=3))
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in second]
    assert len({tuple(c.token_ids.tolist()) for c in first}) == 3
    [other] = await client.generate(ask("another", seed=2))
    assert other.token_ids.tolist() != first[0].token_ids.tolist()


async def test_top_k_of_one_is_certain(client):
    [completion] = await client.generate(ask("top-k", top_k=1))
    np.testing.assert_allclose(completion.logprobs, 0.0, atol=1e-5)


async def test_a_stop_token_ends_the_reply_and_belongs_to_it(client):
    [free] = await client.generate(ask("free", max_tokens=12))
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)
    [ended] = await client.generate(ask("stopped", max_tokens=12, stop_token_ids=(stop,)))
    assert ended.token_ids.tolist() == free.token_ids.tolist()[: first + 1]
    assert (ended.finish_reason, free.finish_reason) == ("stop", "length")


async def test_prompt_logprobs_are_those_of_the_prompt(client):
    scores = await scores_of(client, PROMPT, "score")
    assert scores[0] == 0.0
    np.testing.assert_allclose(scores[1:], logprobs_of(scratch(0), PROMPT), **CLOSE)


async def test_what_was_sampled_is_read_again_with_the_same_numbers(client, weights):
    await weights(5, 3)
    for n, completion in enumerate(await client.generate(ask("sampled", n=2, max_tokens=60))):
        whole = np.concatenate([PROMPT, completion.token_ids])
        answer = await client.read(whole, f"read-{n}")
        np.testing.assert_allclose(answer.prompt_logprobs[len(PROMPT) :], completion.logprobs, **CLOSE)
        np.testing.assert_allclose(answer.prompt_logprobs[1:], logprobs_of(scratch(3), whole), **CLOSE)
        assert {span.version for span in answer.versions} == {span.version for span in completion.versions} == {5}


async def test_equal_prompts_share_a_cache_under_one_salt_only(client):
    prompt = (np.arange(200, dtype=np.int32) * 7 % 90 + 10).astype(np.int32)
    await client.generate(ask("cold", prompt, salt="g0.1/0/large"))
    [warm] = await client.generate(ask("warm", prompt, salt="g0.1/0/large"))
    [other] = await client.generate(ask("other", prompt, salt="g0.1/0/small"))
    assert warm.cached_tokens >= 128 and other.cached_tokens == 0
    assert warm.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize(
    ("what", "request_", "message"),
    [
        ("an unknown token", ask("bad", np.array([5, 9999], np.int32)), "vocab"),
        ("a prompt that is too long", ask("long", np.full(600, 5, np.int32)), "512|maximum"),
        ("a negative temperature", ask("cold", temperature=-1.0), "temperature"),
        ("a nucleus of nothing", ask("none", top_p=0.0), "top_p"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason(client, what, request_, message):
    with pytest.raises(EngineError, match=message):
        await client.generate(request_)


async def test_a_body_that_is_no_request_is_a_client_error(engine):
    async with aiohttp.ClientSession() as http:
        for body in (b"{", b"[]", json.dumps({"token_ids": "abc"}).encode()):
            headers = {"Content-Type": "application/json"}
            async with http.post(engine[1] + api.GENERATE, data=body, headers=headers) as answer:
                assert 400 <= answer.status < 500, await answer.text()


async def test_weights_change_there_and_back_and_there(client, weights):
    for version, seed in enumerate((1, 0, 1, 2), start=1):
        await weights(version, seed)
        scores = await scores_of(client, PROMPT, f"canary-{version}")
        np.testing.assert_allclose(scores[1:], logprobs_of(scratch(seed), PROMPT), **CLOSE)
        [completion] = await client.generate(ask(f"v{version}"))
        assert [span.version for span in completion.versions] == [version]


async def test_weights_come_through_shared_memory(client, weights):
    publisher = ShmPublisher("test-contract")
    try:
        await client.update_weights(publisher.publish(5, export_tensors(scratch(5))))
        scores = await scores_of(client, PROMPT, "shm")
        np.testing.assert_allclose(scores[1:], logprobs_of(scratch(5), PROMPT), **CLOSE)
    finally:
        publisher.close()


async def test_a_probe_moves_every_tensor_and_the_version_itself_moves_it_back(client, weights):
    publisher = ShmPublisher("test-contract-probe")
    try:
        manifest = publisher.publish(6, export_tensors(scratch(6)))
        probed = scratch(6)
        with scaled(as_whole_slices(probed.named_parameters()).values()):
            await client.update_weights(msgspec.structs.replace(manifest, is_probe=True))
            scores = await scores_of(client, PROMPT, "probe")
            np.testing.assert_allclose(scores[1:], logprobs_of(probed, PROMPT), **CLOSE)
        await client.update_weights(manifest)
        back = await scores_of(client, PROMPT, "back")
        np.testing.assert_allclose(back[1:], logprobs_of(scratch(6), PROMPT), **CLOSE)
        assert np.abs(back - scores)[1:].mean() > 100 * CLOSE["atol"]
    finally:
        publisher.close()


async def test_weights_come_by_broadcast(client, weights):
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=20_000, timeout_s=60)
    try:
        for version in (6, 7):
            manifest = publisher.publish(version, export_tensors(scratch(version)))
            await client.update_weights(manifest)
            publisher.release(version - 1)
            scores = await scores_of(client, PROMPT, f"broadcast-{version}")
            np.testing.assert_allclose(scores[1:], logprobs_of(scratch(version), PROMPT), **CLOSE)
    finally:
        publisher.close()


@pytest.mark.parametrize("transport", ["filesystem", "collective"])
async def test_weights_come_as_changes_there_and_back_and_there(client, weights, transport, tmp_path):
    changes = DeltaSection()
    cfg = FilesystemWeights(delta=changes)
    if transport == "collective":
        cfg = CollectiveWeights(port=free_port(), bucket_bytes=20_000, delta=changes)
    publisher = build_publisher(cfg, RunDir(tmp_path / "run"), f"contract-{transport}")
    models = [scratch(0), scratch(0)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.view(-1)[::50] += 0.5
    scores = []
    try:
        for version in range(1, 5):
            model = models[version % 2]
            manifest = publisher.publish(version, export_tensors(model))
            assert version == 1 or manifest.sent_bytes < sum(e.num_bytes for e in manifest.tensors) / 5
            await client.update_weights(manifest)
            publisher.release(version - 1)
            found = await scores_of(client, PROMPT, f"changes-{transport}-{version}")
            np.testing.assert_allclose(found[1:], logprobs_of(model, PROMPT), **CLOSE)
            scores.append(found)
        assert abs(scores[0] - scores[1]).max() > 0.1
    finally:
        publisher.close()


async def test_a_request_under_way_goes_on_under_the_new_weights(client, weights):
    for old in range(1, 40, 2):  # again, if it has ended before the weights came
        await weights(old, 0)
        asked = ask(f"running-{old}", max_tokens=450, salt=str(old))
        running = asyncio.create_task(client.generate(asked))
        before = (await client.metrics())["vllm:generation_tokens_total"]
        while (await client.metrics())["vllm:generation_tokens_total"] < before + 3:
            await asyncio.sleep(0.005)
        await weights(old + 1, 1)
        [completion] = await running
        if len(completion.versions) > 1:
            break
    assert len(completion.token_ids) == 450 and completion.finish_reason == "length"
    assert [span.version for span in completion.versions] == [old, old + 1]
    assert [(s.start, s.end) for s in completion.versions][1][1] == 450
    changed = completion.versions[1].start
    assert completion.versions[0].end == changed
    expected = logprobs_of(scratch(0), np.concatenate([PROMPT, completion.token_ids]))
    np.testing.assert_allclose(completion.logprobs[:changed], expected[len(PROMPT) - 1 :][:changed], **CLOSE)


async def started(client, name: str, **settings) -> tuple[asyncio.Task, str]:
    """A running request and its id; if one ends before it is observed, another one is sent."""
    for attempt in range(100):
        running = asyncio.create_task(client.generate(ask(f"{name}-{attempt}", **settings)))
        while not running.done():
            if (await client.metrics())["vllm:num_requests_running"]:
                return running, f"{name}-{attempt}"
            await asyncio.sleep(0.002)
    raise AssertionError(f"{name}: no request was observed while it ran")


async def test_pause_keeps_waits_or_aborts(client):
    for mode in ("keep", "wait", "abort"):
        for attempt in range(20):  # again, if it has ended before the pause
            running, _ = await started(client, f"paused-{mode}-{attempt}", max_tokens=300)
            await client._all("POST", f"{api.PAUSE}?mode={mode}")
            if mode != "abort" or (await running)[0].finish_reason == "abort":
                break
            await client._all("POST", api.RESUME)
        queued = asyncio.create_task(client.generate(ask(f"queued-{mode}")))
        if mode == "wait":
            assert len((await running)[0].token_ids) == 300
        if mode == "abort":
            [partial] = await running
            assert partial.finish_reason == "abort" and 0 < len(partial.token_ids) < 300
        await asyncio.sleep(0.1)
        assert not queued.done()
        await client._all("POST", api.RESUME)
        assert len((await queued)[0].token_ids) == 8
        if mode == "keep":
            assert len((await running)[0].token_ids) == 300


async def test_an_update_has_its_order_and_nothing_is_computed_before_its_end(engine, client, weights, tmp_path):
    """Calls out of order are refused with 409, and requests sent meanwhile wait for the new weights."""
    publisher = FilesystemPublisher(tmp_path / "in-order", keep_versions=2)
    whole, lost = (updates.encode_update(publisher.publish(number, export_tensors(scratch(1)))) for number in (7, 8))
    shutil.rmtree(tmp_path / "in-order" / "version_8")

    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http:

        async def post(path: str, body: bytes = b"") -> int:
            async with http.post(engine[1] + path, data=body) as answer:
                text = await answer.text()
                assert answer.status == 200 or json.loads(text)["error"]["message"], text
                return answer.status

        assert await post(api.START_UPDATE) == 409  # the engine computes
        running, _ = await started(client, "over-an-update", max_tokens=400)
        assert await post(f"{api.PAUSE}?mode=keep") == 200
        assert await post(api.START_UPDATE) == 200
        waiting = asyncio.create_task(client.generate(ask("in-an-update", salt="7")))
        assert await post(api.RESUME) == 409
        assert await post(api.FINISH_UPDATE, updates.encode_finish(7)) == 409
        assert await post(api.UPDATE_WEIGHTS, lost) == 409
        assert await post(api.FINISH_UPDATE, updates.encode_finish(8)) == 409
        assert await post(api.RESUME) == 409
        assert await post(api.START_UPDATE) == 200  # after a failure, all of it again
        assert await post(api.UPDATE_WEIGHTS, whole) == 200
        assert await post(api.RESUME) == 409
        assert not waiting.done() and not running.done()
        assert await post(api.FINISH_UPDATE, updates.encode_finish(7)) == 200
        assert await post(api.RESUME) == 200
        [completion] = await waiting
        assert [span.version for span in completion.versions] == [7]
        expected = logprobs_of(scratch(1), np.concatenate([PROMPT, completion.token_ids]))[len(PROMPT) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, **CLOSE)
        assert [span.version for span in (await running)[0].versions][1:] == [7]


async def test_an_update_that_was_given_up_is_begun_anew(engine, client, weights, tmp_path):
    """As after a failure between two calls; the given up update had weights of a part of each layer."""
    publisher = FilesystemPublisher(tmp_path / "given-up", keep_versions=2)
    tensors = [*export_tensors(scratch(3))]
    part, whole = (
        updates.encode_update(publisher.publish(number, sent))
        for number, sent in ((8, [named for named in tensors if "q_proj" in named[0]]), (9, tensors))
    )
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http:

        async def post(path: str, body: bytes = b"") -> int:
            async with http.post(engine[1] + path, data=body) as answer:
                return answer.status

        for update in (None, part, whole):
            assert await post(f"{api.PAUSE}?mode=keep") == 200
            assert await post(api.START_UPDATE) == 200
            if update is not None:
                await post(api.UPDATE_WEIGHTS, update)  # the embedded engine refuses a part
        assert await post(api.FINISH_UPDATE, updates.encode_finish(9)) == 200
        assert await post(api.RESUME) == 200
    scores = await scores_of(client, PROMPT, "begun-anew")
    np.testing.assert_allclose(scores[1:], logprobs_of(scratch(3), PROMPT), **CLOSE)
    publisher.close()


async def test_an_engine_that_waits_for_others_in_an_update_is_alive(engine, client, weights):
    """Their caller gives up; the engine loads the next version as soon as the others have come."""
    port = free_port()
    publisher = CollectivePublisher("127.0.0.1", port, bucket_bytes=20_000, timeout_s=120)
    manifest = publisher.publish(9, export_tensors(scratch(4)))

    def join() -> None:
        with receive(manifest, WeightGroup(request="g", world_size=2, rank=1), 0, torch.device("cpu")) as tensors:
            for _ in tensors:
                pass

    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http:

        async def ask_engine(method: str, path: str, body: bytes = b"") -> int:
            async with http.request(method, engine[1] + path, data=body) as answer:
                return answer.status

        assert await ask_engine("POST", f"{api.PAUSE}?mode=keep") == 200
        assert await ask_engine("POST", api.START_UPDATE) == 200
        body = updates.encode_update(manifest, WeightGroup(request="g", world_size=2, rank=0))
        update = asyncio.create_task(ask_engine("POST", api.UPDATE_WEIGHTS, body))
        store = connect_store("127.0.0.1", port, 60, "test")
        await asyncio.to_thread(store.wait, ["join/g/0"])
        assert await ask_engine("GET", api.LIVENESS) == 200
        assert not update.done()
        update.cancel()
    others = asyncio.create_task(asyncio.to_thread(join))
    await client.update_weights(manifest)
    await others
    scores = await scores_of(client, PROMPT, "waited")
    np.testing.assert_allclose(scores[1:], logprobs_of(scratch(4), PROMPT), **CLOSE)
    publisher.close()


async def test_requests_without_a_salt_read_no_cache_of_older_weights(client, weights):
    """Also while another request keeps the caches from being emptied, and with both kinds of updates."""
    prompt = np.arange(3, 103, dtype=np.int32)
    for version, seed in ((51, 1), (52, 0), (53, 1)):
        running = asyncio.create_task(client.generate(ask(f"keeps-{version}", prompt, max_tokens=200)))
        await weights(version, seed)
        for _ in range(2):
            before = await client.metrics()
            [completion] = await client.generate(ask(f"unsalted-{version}", prompt))
            expected = logprobs_of(scratch(seed), np.concatenate([prompt, completion.token_ids]))[len(prompt) - 1 :]
            np.testing.assert_allclose(completion.logprobs, expected, **CLOSE)
        hits = "vllm:prefix_cache_hits_total"
        assert (await client.metrics())[hits] > before[hits]  # what has been cached since then is used
        await running


@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])])
async def test_requests_that_wait_while_weights_are_loaded_read_only_caches_of_these(engine, tmp_path):
    """A salt of the caller stays, and so does what is cached under it."""
    prompt, other = np.arange(3, 103, dtype=np.int32), np.arange(103, 3, -1, dtype=np.int32)
    flags = ("--max-num-seqs", "1", "--kv-cache-tokens", "4096")
    with serve(engine, save(scratch(0), tmp_path / "model"), tmp_path / "log", *flags) as (url, _):
        async with EngineClient([url], timeout_s=120) as client:
            await client.wait_ready(240)
            publisher = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2)
            for version, seed in ((1, 1), (2, 2)):
                await client.generate(ask(f"before-{version}", prompt))
                [own] = await client.generate(ask(f"own-{version}", prompt, salt="own"))
                running = asyncio.create_task(client.generate(ask(f"runs-{version}", other, max_tokens=350)))
                await until_counted(client, "vllm:num_requests_running", 1)
                queued = [
                    asyncio.create_task(client.generate(ask(f"{name}-waits-{version}", prompt, salt=salt)))
                    for name, salt in (("first", None), ("own", "own"), ("second", None))
                ]
                await until_counted(client, "vllm:num_requests_waiting", 3)
                await client.update_weights(publisher.publish(version, export_tensors(scratch(seed))))
                assert not any(task.done() for task in (running, *queued)), "nothing waited"
                await running
                [first], [own], [second] = await asyncio.gather(*queued)
                assert first.cached_tokens == 0 < min(own.cached_tokens, second.cached_tokens)
                for completion in (first, second):
                    known = np.concatenate([prompt, completion.token_ids])
                    expected = logprobs_of(scratch(seed), known)[len(prompt) - 1 :]
                    np.testing.assert_allclose(completion.logprobs, expected, **CLOSE)
            publisher.close()


PUBLISHERS = {
    "shm": lambda path: ShmPublisher("test-contract-damaged"),
    "filesystem": lambda path: FilesystemPublisher(path, keep_versions=2),
    "collective": lambda path: CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=20_000, timeout_s=60),
}


def with_wrong_checksum(manifest: WeightManifest) -> WeightManifest:
    """The same version, but its bytes are not those that the publisher has summed."""
    if manifest.transport != "collective":
        return msgspec.structs.replace(manifest, checksum=manifest.checksum ^ 1)
    location = json.loads(manifest.location)
    for part in location["parts"]:
        part["checksum"] ^= 1
    return msgspec.structs.replace(manifest, location=json.dumps(location))


@pytest.mark.parametrize("transport", PUBLISHERS)
async def test_a_damaged_version_is_refused_and_the_engine_goes_on_with_the_old_one(
    client, weights, transport, tmp_path
):
    await weights(20, 1)  # from now on an update is one call, and requests run beside it
    publisher = PUBLISHERS[transport](tmp_path / "damaged")
    try:
        manifest = publisher.publish(21, export_tensors(scratch(2)))
        running, _ = await started(client, f"damaged-{transport}", max_tokens=400)
        with pytest.raises(EngineError, match="checksum"):
            await client.update_weights(with_wrong_checksum(manifest))
        assert [span.version for span in (await running)[0].versions] == [20]
        scores = await scores_of(client, PROMPT, f"damaged-{transport}")
        np.testing.assert_allclose(scores[1:], logprobs_of(scratch(1), PROMPT), **CLOSE)
        await client.update_weights(manifest)
        scores = await scores_of(client, PROMPT, f"whole-{transport}")
        np.testing.assert_allclose(scores[1:], logprobs_of(scratch(2), PROMPT), **CLOSE)
    finally:
        publisher.close()


TRAINER = """
import sys, time
from servers import scratch
from stretto.models.hub import export_tensors
from stretto_broadcast.collective import CollectivePublisher
import msgspec
publisher = CollectivePublisher("127.0.0.1", int(sys.argv[1]), bucket_bytes=20_000, timeout_s=60)
print(msgspec.json.encode(publisher.publish(31, export_tensors(scratch(2)))).decode(), flush=True)
time.sleep(600)
"""


async def test_tokens_are_sampled_while_a_version_is_on_its_way_and_after_its_trainer_was_killed(
    engine, client, weights
):
    """The engine waits for another one that has to receive the version, too; then the trainer is killed."""
    await weights(30, 1)
    port = free_port()
    trainer = forked.Popen(
        [sys.executable, "-c", TRAINER, str(port)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        manifest = msgspec.json.decode(await asyncio.to_thread(trainer.stdout.readline), type=WeightManifest)
        body = updates.encode_update(manifest, WeightGroup(request="killed", world_size=2, rank=0))
        async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http:

            async def update() -> tuple[int, str]:
                async with http.post(engine[1] + api.UPDATE_WEIGHTS, data=body) as answer:
                    return answer.status, await answer.text()

            updating = asyncio.create_task(update())
            store = connect_store("127.0.0.1", port, 60, "test")
            await asyncio.to_thread(store.wait, ["join/killed/0"])
            [completion] = await client.generate(ask("beside", max_tokens=50))
            assert [span.version for span in completion.versions] == [30] and not updating.done()
            async with http.get(f"{engine[1]}{api.LIVENESS}?{api.IDLE}") as answer:
                assert answer.status == 200  # the worker answers, too
            trainer.kill()
            status, text = await updating
            assert status == 409 and "the trainer's store" in text and "gone" in text
        [completion] = await client.generate(ask("after", max_tokens=50))
        assert [span.version for span in completion.versions] == [30]
    finally:
        trainer.kill()
        trainer.communicate()
    await weights(32, 2)
    scores = await scores_of(client, PROMPT, "after-the-kill")
    np.testing.assert_allclose(scores[1:], logprobs_of(scratch(2), PROMPT), **CLOSE)


async def test_an_aborted_request_gives_what_it_has(client):
    for attempt in range(20):  # again, if it has ended before
        running, name = await started(client, f"to-abort-{attempt}", max_tokens=450)
        await client.abort([name])
        [partial] = await running
        if partial.finish_reason == "abort":
            break
    assert partial.finish_reason == "abort" and len(partial.token_ids) < 450
    assert len(partial.logprobs) == len(partial.token_ids)


async def test_a_client_that_goes_away_frees_its_place(client):
    running, _ = await started(client, "to-leave", max_tokens=480)
    running.cancel()
    async with asyncio.timeout(60):
        while (await client.metrics())["vllm:num_requests_running"]:
            await asyncio.sleep(0.01)


async def test_health_liveness_models_and_metrics(engine):
    async with aiohttp.ClientSession() as http:
        for path in (api.HEALTH, api.LIVENESS):
            async with http.get(engine[1] + path) as answer:
                assert answer.status == 200
        async with http.get(engine[1] + api.MODELS) as answer:
            [card] = (await answer.json())["data"]
            assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "tiny", 512)
        async with http.get(engine[1] + api.METRICS) as answer:
            page = await answer.text()
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    ):
        assert f"vllm:{name}" in page, name


async def test_chat_completions_speak_openai(engine):
    body = {"model": None, "messages": [{"role": "user", "content": "cab"}], "max_tokens": 4, "seed": 1}
    async with aiohttp.ClientSession() as http:
        async with http.get(engine[1] + api.MODELS) as answer:
            body["model"] = (await answer.json())["data"][0]["id"]
        async with http.post(engine[1] + api.CHAT_COMPLETIONS, json=body) as answer:
            assert answer.status == 200, await answer.text()
            reply = await answer.json()
    assert reply["choices"][0]["message"]["role"] == "assistant"
    assert reply["usage"]["completion_tokens"] <= 4


async def test_no_request_is_answered_with_5xx_and_a_plain_one_stays_as_it_was(engine):
    name, url = engine
    before = await greedy(url)
    outcome = await fire(url, shots(seed=1, count=400))
    assert outcome.failures == [], name
    assert outcome.statuses[200] > 50 and outcome.statuses[400] > 150
    assert await greedy(url) == before


async def test_an_update_whose_caller_has_left_gives_way_to_the_next_one(engine, client, weights):
    """It waits for an engine that died, until its deadline; the next one must not fail with its error."""
    await weights(60, 1)
    of_the_left_s = 1.5
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=20_000, timeout_s=120)
    try:
        manifest = publisher.publish(61, export_tensors(scratch(2)))
        location = json.loads(manifest.location)
        hasty = msgspec.structs.replace(manifest, location=json.dumps(location | {"timeout_s": of_the_left_s}))
        body = updates.encode_update(hasty, WeightGroup(request="left", world_size=2, rank=0))
        async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http:
            left = asyncio.create_task(http.post(engine[1] + api.UPDATE_WEIGHTS, data=body))
            store = connect_store("127.0.0.1", location["port"], 60, "test")
            await asyncio.to_thread(store.wait, ["join/left/0"])
            left.cancel()
        deadline = asyncio.create_task(asyncio.sleep(of_the_left_s + 0.5))
        async with EngineClient([engine[1]]) as anew:  # sends all calls, as after a failure
            await anew.update_weights(manifest)
        await deadline  # of the one that was left
        scores = await scores_of(client, PROMPT, "gave-way")
        np.testing.assert_allclose(scores[1:], logprobs_of(scratch(2), PROMPT), **CLOSE)
        [completion] = await client.generate(ask("gave-way", max_tokens=4))
        assert [span.version for span in completion.versions] == [61]
    finally:
        publisher.close()
