"""The hub's HTTP API without a trainer or engines: what is answered before anything is computed."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from stretto.base.errors import ConfigError, DataError
from stretto.config.load import load
from stretto.records.sample import MicroBatch
from stretto_service import hub as hub_module
from stretto_service.access import SMALL_BYTES
from stretto_service.config import ServeConfig
from stretto_service.hub import Hub
from stretto_service.main import build
from stretto_service.store import Checkpoint, Run, Sampler, Session
from stretto_service.training import training
from stretto_service.training.checkpoints import LINK_S
from stretto_service.wires.operations import TenantSpec, TenantWork
from stretto_service.wires.service import CreateRun, ServiceRun, encode_work


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[TestClient]:
    """A hub with two users, of whom alice may have one run."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64}))
    users = {"alice": {"max_runs": 1}, "bob": {}}
    cfg = ServeConfig.model_validate(
        {
            "output_dir": str(tmp_path),
            "model": {"name": str(model)},
            "service": {"users": users, "engine_urls": ["http://127.0.0.1:1"], "max_waiting_bytes": 1 << 20},
        }
    )
    hub, app = build(cfg)
    async with TestClient(TestServer(app)) as running:
        running.hub = hub  # type: ignore[attr-defined]
        yield running
    await hub.close()


@asynccontextmanager
async def next_hub(hub: Hub) -> AsyncIterator[Hub]:
    """Another hub of the same service."""
    after, _ = build(hub.cfg)
    try:
        yield after
    finally:
        await after.close()


def token(client: TestClient, user: str) -> str:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    return str(json.loads((hub.cfg.run_dir.path / "tokens.json").read_text())[user])


async def post(client: TestClient, path: str, body: object = None, *, user: str = "alice") -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=io.BytesIO(data), headers={"X-API-Key": token(client, user)}) as response:
        return response.status, await response.json()


def creation(client: TestClient, **more: object) -> dict:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    return {"spec": {"name": "letters", "rank": 4}, "base_model": hub.model_name} | more


async def test_a_run_whose_answer_was_lost_is_made_once(client: TestClient) -> None:
    body = creation(client, key="k1")
    first, again = [await post(client, "/v1/runs", body) for _ in range(2)]
    assert first == again == (201, {"id": "alice:letters", "request_id": "alice:letters/0"})
    status, answer = await post(client, "/v1/runs", creation(client, key="k2"))
    assert status == 400 and "already" in answer["detail"]
    hub: Hub = client.hub  # type: ignore[attr-defined]
    assert [run.id for run in hub.store.all(Run)] == ["alice:letters"] == list(hub.training.places.tenants)


async def test_the_client_repeats_its_request_with_one_key(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = ServiceRun(str(client.make_url("")), token(client, "bob"))
    sent: list[bytes] = []
    call = remote._call

    async def lossy(method: str, path: str, body: bytes | None = None) -> dict:
        answer = await call(method, path, body)
        if path == "/v1/runs":
            sent.append(body or b"")
            answer = await call(method, path, body)  # the first answer was lost
        return answer

    async def wait(request_id: str) -> dict:
        return {"request_id": request_id}

    monkeypatch.setattr(remote, "_call", lossy)
    monkeypatch.setattr(remote, "wait", wait)
    spec = TenantSpec(name="mine", rank=4)
    answer = await remote.create(CreateRun(spec=spec, base_model=creation(client)["base_model"]))
    await remote.close()
    assert answer == {"request_id": "bob:mine/0"} and json.loads(sent[0])["key"]


async def test_the_admin_freezes_and_only_the_admin_resumes(client: TestClient) -> None:
    await post(client, "/v1/runs", creation(client))
    path = "/v1/runs/alice:letters"
    assert await post(client, f"{path}/freeze", user="admin") == (200, {"id": "alice:letters", "state": "frozen"})
    status, answer = await post(client, f"{path}/resume")
    assert status == 403 and "admin has frozen it" in answer["detail"]
    assert (await post(client, f"{path}/resume", user="bob"))[0] == 403
    assert (await post(client, f"{path}/end"))[0] == 200
    status, answer = await post(client, "/v1/runs", creation(client))
    assert status == 423 and "only the admin" in answer["detail"]  # nor does a new run of its name
    status, answer = await post(client, f"{path}/freeze", user="admin")
    assert status == 400 and "nothing to freeze" in answer["detail"]


async def test_a_user_has_as_many_runs_as_he_may(client: TestClient) -> None:
    assert (await post(client, "/v1/runs", creation(client)))[0] == 201
    more = creation(client) | {"spec": {"name": "more", "rank": 4}}
    status, answer = await post(client, "/v1/runs", more)
    assert status == 403 and "service.users.alice.max_runs" in answer["detail"]
    assert (await post(client, "/v1/runs", more, user="bob"))[0] == 201


async def test_a_body_is_not_read_if_there_is_no_room_for_it(client: TestClient) -> None:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    big = bytes(900 << 10)
    with hub.reading.body("alice", 500 << 10):
        status, answer = await post(client, "/v1/runs", big)
        assert status == 429 and "max_waiting_bytes" in answer["detail"]
        assert (await post(client, "/v1/runs", b"{"))[0] == 400  # a small one
        assert (await post(client, "/v1/runs", big, user="bob"))[0] == 400
    assert (await post(client, "/v1/runs", big))[0] == 400


async def test_a_name_too_long_for_a_file_is_refused_and_the_next_hub_starts(client: TestClient) -> None:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    for name in ("\u5b57" * 100, "a" * 101):
        body = creation(client) | {"spec": {"name": name, "rank": 4}}
        status, answer = await post(client, "/v1/runs", body)
        assert status == 400 and "letters of ASCII" in answer["detail"]
    _, session = await post(client, "/api/v1/create_session", {})
    model = {"session_id": session["session_id"], "base_model": hub.model_name, "lora_config": {"rank": 4}}
    for number in (10**300, -1):
        status, answer = await post(client, "/api/v1/create_model", model | {"model_seq_id": number})
        assert status == 400 and "model_seq_id" in answer["detail"], answer
    assert not list(hub.store.all(Run))
    async with next_hub(hub) as after:
        assert after.training.places.tenants == {}


async def test_a_run_whose_files_cannot_be_read_fails_alone(client: TestClient) -> None:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    await post(client, "/v1/runs", creation(client))
    await post(client, "/v1/runs", creation(client), user="bob")
    run = hub.store.get(Run, "alice:letters")
    assert run is not None
    journal = hub.training.directory / run.spec.name / "journal"
    (journal / "00000001.step").mkdir()
    async with next_hub(hub) as after:
        found = after.store.get(Run, run.id)
        assert found is not None and found.state == "failed" and "cannot be read" in found.reason
        assert list(after.training.places.tenants) == ["bob:letters"]


async def test_what_is_kept_for_too_long_is_refused_at_once(client: TestClient) -> None:
    await post(client, "/v1/runs", creation(client))
    body = {"model_id": "alice:letters", "seq_id": 1, "path": "a", "ttl_seconds": 10**400}
    status, answer = await post(client, "/api/v1/save_weights", body)
    assert status == 400 and "ttl_seconds" in answer["detail"]


async def test_a_compressed_body_counts_as_the_largest(client: TestClient) -> None:
    headers = {"X-API-Key": token(client, "alice"), "Content-Encoding": "gzip"}
    hub: Hub = client.hub  # type: ignore[attr-defined]
    with hub.reading.body("alice", 1 << 17):  # the user has another body waiting
        async with client.post("/v1/runs", data=gzip.compress(bytes(1 << 24)), headers=headers) as response:
            assert response.status == 429, await response.text()


async def test_tokens_and_numbers_that_are_no_text_are_refused(client: TestClient) -> None:
    for headers in ({"X-API-Key": "\udcff"}, {"Authorization": "Bearer \xff"}):
        async with client.get("/v1/status", headers=headers) as response:
            assert response.status == 401
    for path in ("/download/99999999999-\xff/a", "/download/\xb2-0/a"):
        async with client.get(path) as response:
            assert response.status == 403, await response.text()
    await post(client, "/v1/runs", creation(client))
    status, answer = await post(client, "/v1/runs/alice:letters/step?seq=%C2%B2", {})
    assert status == 400 and "seq" in answer["detail"]
    status, answer = await post(client, "/api/v1/sessions/search", {"limit": "all"})
    assert status == 400 and "limit" in answer["detail"]


async def test_a_run_is_saved_once_however_often_it_is_to_leave(client: TestClient) -> None:
    await post(client, "/v1/runs", creation(client))
    for _ in range(5):
        assert (await post(client, "/v1/runs/alice:letters/evict"))[0] == 200
    hub: Hub = client.hub  # type: ignore[attr-defined]
    kinds = [request.payload.kind for request in hub.training.queue.requests("alice:letters")]
    assert kinds == ["create", "save_state"]


async def test_a_user_finds_his_own_actions_however_many_others_have(client: TestClient) -> None:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    hub.audit.write("alice", "mine")
    for _ in range(2000):
        hub.audit.write("bob", "his")
    assert [entry["action"] for entry in hub.audit.read("alice")] == ["mine"]
    assert len(hub.audit.read()) == 1000


async def test_what_the_admin_has_frozen_gets_no_samples(client: TestClient) -> None:
    await post(client, "/v1/runs", creation(client))
    hub: Hub = client.hub  # type: ignore[attr-defined]
    hub.store.put(Sampler(id="s", owner="alice", base_model=hub.model_name, run="alice:letters"))
    await post(client, "/v1/runs/alice:letters/freeze", user="admin")
    body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "sampling_session_id": "s"}
    for path, sent in (
        ("/v1/runs/alice:letters/inference/v1/generate", {"token_ids": [1]}),
        ("/runs/letters/engine/inference/v1/generate", {"token_ids": [1]}),
        ("/api/v1/asample", body),
    ):
        status, answer = await post(client, path, sent)
        assert status == 423 and "admin has frozen it" in answer["detail"], path


async def test_the_engine_of_a_new_run_has_nothing_of_one_that_had_its_name(client: TestClient) -> None:
    await post(client, "/v1/runs", creation(client))
    assert (await post(client, "/runs/letters/engine/pause"))[0] == 200
    paused = "/runs/letters/engine/is_paused"
    headers = {"X-API-Key": token(client, "alice")}
    async with client.get(paused, headers=headers) as response:
        assert await response.json() == {"is_paused": True}
    await post(client, "/v1/runs/alice:letters/end")
    await post(client, "/v1/runs", creation(client))
    async with client.get(paused, headers=headers) as response:
        assert await response.json() == {"is_paused": False}


async def test_who_asks_late_for_his_run_is_answered(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_service.tinker.routes.POLL_S", 0.1)
    hub: Hub = client.hub  # type: ignore[attr-defined]
    _, session = await post(client, "/api/v1/create_session", {})
    body = {"model_seq_id": 1, "base_model": hub.model_name, "lora_config": {"rank": 4}} | session
    body = {key: body[key] for key in ("session_id", "model_seq_id", "base_model", "lora_config")}
    _, made = await post(client, "/api/v1/create_model", body)
    [run] = hub.store.all(Run)
    run.state = "evicted"  # created, saved, and away
    hub.futures.forget(run.id)
    fetch = {"request_id": made["request_id"]}
    status, answer = await post(client, "/api/v1/retrieve_future", fetch)
    assert status == 410 and "its result is gone" in answer["detail"]
    assert (await post(client, "/api/v1/create_model", body))[1] == made
    status, answer = await post(client, "/api/v1/retrieve_future", fetch)
    assert (status, answer) == (200, {"model_id": run.id, "type": "create_model"})
    run.state, run.reason = "failed", "no room"
    hub.futures.forget(run.id)
    await post(client, "/api/v1/create_model", body)
    _, answer = await post(client, "/api/v1/retrieve_future", fetch)
    assert answer == {"error": f"{run.id}: no room", "category": "user"}


async def test_what_asks_all_the_time_is_not_in_the_audit_log(client: TestClient) -> None:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    for path in ("/health", "/api/v1/healthz"):
        async with client.get(path) as response:
            assert response.status == 503
    async with client.get("/v1/status", headers={"X-API-Key": token(client, "admin")}) as response:
        assert response.status == 200
    async with client.get("/v1/status") as response:
        assert response.status == 401
    assert [(entry["action"], entry["status"]) for entry in hub.audit.read()] == [("GET /v1/status", 401)]


async def test_exported_traces_go_with_their_links(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_service.training.checkpoints.MAX_TRACES", 3)
    hub: Hub = client.hub  # type: ignore[attr-defined]
    links = []
    for i in range(5):
        _, session = await post(client, "/api/v1/create_session", {})
        path = f"/api/v1/sessions/{session['session_id']}/trace_export"
        async with client.get(path, headers={"X-API-Key": token(client, "alice")}) as response:
            links.append((await response.json())["url"].partition("/download")[2])
        newest = max(hub.checkpoints.directory.glob("*/*/*.json"), key=lambda each: each.stat().st_mtime_ns)
        os.utime(newest, (time.time() - 100 + i,) * 2)

    async def answers() -> list[int]:
        found = []
        for link in links:
            async with client.get(f"/download{link}") as response:
                found.append(response.status)
        return found

    assert await answers() == [404, 404, 200, 200, 200]
    for i, file in enumerate(
        sorted(hub.checkpoints.directory.glob("*/*/*.json"), key=lambda each: each.stat().st_mtime)
    ):
        os.utime(file, (time.time() - (LINK_S + 1 if i else 0),) * 2)
    hub.checkpoints.sweep_traces()
    assert await answers() == [404, 404, 200, 404, 404]


async def test_links_to_files_begin_with_the_public_address(client: TestClient) -> None:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    service = hub.cfg.service.model_copy(update={"public_url": "https://tinker.example/"})
    hub.cfg = hub.cfg.model_copy(update={"service": service})
    _, session = await post(client, "/api/v1/create_session", {})
    path = f"/api/v1/sessions/{session['session_id']}/trace_export"
    key = {"X-API-Key": token(client, "alice")}
    for host, status in (("evil.example", 200), ("evil.example/\\@tinker.example", 400)):
        async with client.get(path, headers=key | {"Host": host}) as response:
            assert response.status == status, await response.text()
            if status == 200:
                assert (await response.json())["url"].startswith("https://tinker.example/download/")


@pytest.mark.parametrize(
    "error_of",
    [
        lambda path: DataError(f"{path}: damaged"),
        lambda path: OSError(13, "Permission denied", path),
        lambda path: sqlite3.OperationalError(f"{path} is full"),
    ],
)
async def test_answers_to_requests_that_fail_tell_no_paths(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_of: Callable[[str], Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error_of(str(tmp_path / "file"))

    monkeypatch.setattr(Hub, "new_run", fail)
    _, answer = await post(client, "/v1/runs", creation(client))
    assert str(tmp_path) not in json.dumps(answer) and "file" in answer["detail"]


def test_a_public_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"public.url.* is no address"):
        load(ServeConfig, ["--model.name", "m", "--service.public-url", "tinker.example"])


@pytest.mark.parametrize(
    "flag", ["--model.tp=2", "--model.ep=2", "--model.compile", "--model.lora", "--inference.lora.compute-policy"]
)
def test_what_the_backbone_of_a_service_cannot_have_is_refused_with_its_key(flag: str) -> None:
    key = flag.removeprefix("--").partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key}\b.*leave it out"):
        load(ServeConfig, ["--model.name", "m", flag])
    assert load(ServeConfig, ["--model.name", "m", "--model.cp=2", "--trainer.num-ranks=2"]).model.cp == 2


async def test_weights_that_are_deleted_before_they_are_copied_are_not_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    await post(client, "/v1/runs", creation(client))
    path = "tinker://alice:letters/weights/a"
    directory = hub.checkpoints.directory / "letters" / "weights" / "a"

    def save() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "state").write_text("whole")
        saved = Checkpoint(
            path=path, run="alice:letters", owner="alice", kind="training", name="a",
            directory=str(directory), created_at=1,
        )  # fmt: skip
        hub.store.put(saved)

    save()
    assert (await post(client, "/api/v1/copy_weights", {"source_path": path}))[0] == 200
    copytree = shutil.copytree

    def deleted(*args: object, **more: object) -> object:
        del hub.store._records[Checkpoint][path]  # and its files, after some of them were copied
        return copytree(*args, **more)  # type: ignore[arg-type]

    def gone(*args: object, **more: object) -> object:
        shutil.rmtree(directory)
        return copytree(*args, **more)  # type: ignore[arg-type]

    for change in (deleted, gone):
        save()
        monkeypatch.setattr("stretto_service.tinker.rest.shutil.copytree", change)
        status, answer = await post(client, "/api/v1/copy_weights", {"source_path": path})
        assert status == 404 and f"{path}: these weights were deleted" in answer["detail"]
        monkeypatch.setattr("stretto_service.tinker.rest.shutil.copytree", copytree)
    assert len(list(hub.checkpoints.directory.glob("*/weights/a/state"))) == 1  # the first copy


async def test_a_stranger_does_not_push_users_out_of_the_audit_log(client):
    audit = client.hub.audit
    audit.write("alice", "POST /api/v1/create_model")
    before = audit.path.stat().st_size
    for _ in range(300):
        assert (await client.post("/api/v1/create_session", json={})).status == 401
    assert audit.path.stat().st_size == before
    assert [entry["action"] for entry in audit.read() if entry["user"] == "alice"]
    assert 1 <= sum(entry["user"] is None for entry in audit.read()) <= 2


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_of_its_encoding_is_the_senders_error(client, encoding):
    headers = {"X-API-Key": token(client, "alice"), "Content-Encoding": encoding}
    answer = await client.post("/api/v1/create_session", data=b"no such thing", headers=headers)
    assert answer.status == 400


async def test_a_session_is_small_however_it_is_compressed(client):
    headers = {"X-API-Key": token(client, "alice"), "Content-Encoding": "gzip", "Content-Type": "application/json"}
    for size in (20_000, 3 << 20):
        body = gzip.compress(json.dumps({"tags": ["x" * size]}).encode())
        assert (await client.post("/api/v1/create_session", data=body, headers=headers)).status == 413


async def test_a_body_larger_than_its_route_takes_is_refused_before_it_is_read(client):
    """Also at routes of runs, and for a request for samples that no sequence of the model needs."""
    await post(client, "/v1/runs", creation(client))
    for path in ("/v1/runs", "/v1/runs/alice:letters/step?seq=1", "/api/v1/asample", "/runs/letters/engine/abort"):
        status, answer = await post(client, path, bytes(1_100_000))
        assert status == 413 and "takes at most" in answer["detail"], (path, answer)
    tokens = {"token_ids": [1] * 200_000}
    for path in ("/v1/runs/alice:letters/inference/v1/generate", "/runs/letters/engine/inference/v1/generate"):
        status, answer = await post(client, path, tokens)
        assert status == 413 and "values" in answer["detail"], (path, answer)


async def test_a_large_request_is_read_in_a_thread_and_once(client, monkeypatch):
    """Its number is used once, however often it is sent meanwhile, and requests behind it wait for it."""
    await post(client, "/v1/runs", creation(client))
    hub, threads, release = client.hub, [], threading.Event()
    read = training.read_job

    def slow(run, kind, body, limits, *, seq):
        threads.append(threading.current_thread() is threading.main_thread())
        if kind == "batch":
            assert release.wait(60)
        return read(run, kind, body, limits, seq=seq)

    monkeypatch.setattr(training, "read_job", slow)
    path = "/v1/runs/alice:letters"
    body = large_batch(hub.cfg.seq_len)
    sent = [asyncio.create_task(post(client, f"{path}/batch?seq=1", body)) for _ in range(2)]
    while not threads:
        await asyncio.sleep(0.01)
    assert (await post(client, f"{path}/step?seq=2", {}))[0] == 200
    assert [job.payload.kind for job in hub.training.queue.requests("alice:letters")] == ["create"]
    release.set()
    answers = await asyncio.gather(*sent)
    assert answers == [(200, {"request_id": "alice:letters/1"})] * 2
    kinds = [job.payload.kind for job in hub.training.queue.requests("alice:letters")]
    assert kinds == ["create", "batch", "step"] and threads == [False, False]
    async with next_hub(hub) as after:
        kinds = [job.payload.kind for job in after.training.queue.requests("alice:letters")]
        assert kinds == ["create", "batch", "step"]


async def test_a_run_that_ends_while_its_request_is_read_refuses_it(client, monkeypatch):
    await post(client, "/v1/runs", creation(client))
    hub, begun, release = client.hub, threading.Event(), threading.Event()
    read = training.read_job

    def slow(*args, **how):
        begun.set()
        assert release.wait(60)
        return read(*args, **how)

    monkeypatch.setattr(training, "read_job", slow)
    body = large_batch(hub.cfg.seq_len)
    sent = asyncio.create_task(post(client, "/v1/runs/alice:letters/batch?seq=1", body))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    assert (await post(client, "/v1/runs/alice:letters/end"))[0] == 200
    release.set()
    status, answer = await sent
    assert status == 410 and "ended" in answer["detail"]


def large_batch(seq_len: int) -> bytes:
    """A batch of more bytes than are read on the event loop."""
    size = min(seq_len, 1000)
    rows = [
        MicroBatch(
            token_ids=np.full(size, 3, np.int32),
            cu_seqlens=np.array([0, size], np.int32),
            loss_mask=np.ones(size, bool),
            **{name: np.ones(size, np.float32) for name in ("logprobs", "advantages", "temperatures")},
            sample_ids=("0",),
            envs=("",),
        )
        for _ in range(1 + 2 * SMALL_BYTES // (17 * size))
    ]
    return encode_work(TenantWork(tenant="", micro_batches=tuple(rows)))


async def test_a_user_has_so_many_bytes_of_records_and_checkpoints_and_is_told(client, monkeypatch):
    """Those of another user do not count."""
    hub: Hub = client.hub
    monkeypatch.setattr(hub_module, "MAX_USER_BYTES", 20_000)
    tags = {"tags": ["x" * 9000]}
    statuses = [(await post(client, "/api/v1/create_session", tags))[0] for _ in range(3)]
    assert statuses == [200, 200, 413]
    status, answer = await post(client, "/v1/runs", creation(client, metadata={"x": "y" * 9000}))
    assert status == 413 and "your sessions" in answer["detail"]
    assert (await post(client, "/v1/runs", creation(client), user="bob"))[0] == 201
    async with next_hub(hub) as after:
        assert after.store.user_bytes("alice") == hub.store.user_bytes("alice") > 18_000
    hub.store.delete(*hub.store.all(Session))
    assert hub.store.user_bytes("alice") == 0


async def test_metadata_of_runs_and_checkpoints_has_a_size(client):
    large = {"note": "x" * 20_000}
    status, answer = await post(client, "/v1/runs", creation(client, metadata=large))
    assert status == 413 and "metadata of a run" in answer["detail"]
    await post(client, "/v1/runs", creation(client))
    body = {"model_id": "alice:letters", "seq_id": 1, "path": "a", "user_metadata": large}
    status, answer = await post(client, "/api/v1/save_weights", body)
    assert status == 413 and "user_metadata" in answer["detail"]


async def test_a_save_beyond_the_users_bytes_on_the_disk_is_refused_and_told(client):
    hub: Hub = client.hub
    await post(client, "/v1/runs", creation(client))
    run = hub.store.get(Run, "alice:letters")
    path = "tinker://alice:letters/weights/big"
    hub.store.put(
        Checkpoint(
            path=path, run=run.id, owner="alice", kind="training", name="big", directory="/nowhere",
            created_at=time.time(), size_bytes=hub.cfg.service.max_checkpoint_bytes + 1,
        )
    )  # fmt: skip
    status, answer = await post(client, "/v1/runs/alice:letters/save?seq=1", {"name": "more"})
    assert status == 413 and "service.max_checkpoint_bytes" in answer["detail"]
    await hub.checkpoints.delete(hub.store.get(Checkpoint, path))
    assert (await post(client, "/v1/runs/alice:letters/save?seq=2", {"name": "more"}))[0] == 200


async def test_records_that_cannot_be_written_are_an_answer_and_written_later(client):
    hub: Hub = client.hub
    hub.store._db.execute("pragma query_only = on")
    status, answer = await post(client, "/api/v1/create_session", {})
    assert status == 507 and "cannot write its records" in answer["detail"]
    hub.store._db.execute("pragma query_only = off")
    assert (await post(client, "/api/v1/create_session", {}))[0] == 200
    async with next_hub(hub) as after:
        assert len(list(after.store.all(Session))) == 2
