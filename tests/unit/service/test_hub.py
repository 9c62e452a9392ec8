"""The hub's HTTP API without a trainer or engines: what is answered before anything is computed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from stretto.config.root import ServeConfig
from stretto.records.tenants import TenantSpec
from stretto.service.hub import Hub
from stretto.service.main import build
from stretto.service.store import Run
from stretto.transports.service import CreateRun, ServiceRun


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
    await hub.engines.client.close()
    hub.store.close()
    hub.audit.close()


def token(client: TestClient, user: str) -> str:
    hub: Hub = client.hub  # type: ignore[attr-defined]
    return str(json.loads((hub.cfg.run_dir.path / "tokens.json").read_text())[user])


async def post(
    client: TestClient, path: str, body: object = None, *, user: str = "alice"
) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data, headers={"X-API-Key": token(client, user)}) as response:
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
    assert [run.id for run in hub.store.all(Run)] == ["alice:letters"] == list(hub.training.tenants)


async def test_the_client_repeats_its_request_with_one_key(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert await post(client, f"{path}/freeze", user="admin") == (
        200,
        {"id": "alice:letters", "state": "frozen"},
    )
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
