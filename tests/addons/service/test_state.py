"""Tokens, futures, the journal and the database: what outlives a hub, and who may have it."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from stretto.base.errors import ConfigError, DataError
from stretto.transports.engine.api import Refusal
from stretto_service.access import ADMIN, Access, prepare_tokens
from stretto_service.config import UserSection
from stretto_service.futures import KEEP_SENT_S, KEEP_UNSENT_S, Futures, Result
from stretto_service.store import KEEP_S, KEEP_USAGE_S, Audit, Checkpoint, Record, Run, Sampler, Session, Store, Usage
from stretto_service.training.checkpoints import published_version
from stretto_service.training.journal import REFUSED, Journal
from stretto_service.usage import HOUR_S, Meter
from stretto_service.wires.operations import TenantSpec


def test_tokens_are_made_once_and_only_the_owner_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    tokens = prepare_tokens(path, {"alice": None, "bob": "tml-" + "b" * 20})
    assert tokens["bob"] == "tml-" + "b" * 20 and tokens["alice"].startswith("tml-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert prepare_tokens(path, {"alice": None, "bob": None}) == tokens


def test_two_users_cannot_have_one_token_nor_the_admins_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="same token"):
        prepare_tokens(tmp_path / "tokens.json", dict.fromkeys(("a", "b"), "tml-" + "x" * 20))
    with pytest.raises(ConfigError, match=ADMIN):
        prepare_tokens(tmp_path / "tokens.json", {ADMIN: None})


def test_a_user_is_found_by_either_header_and_nobody_without_one() -> None:
    access = Access({"alice": UserSection()}, {"alice": "tml-a", ADMIN: "tml-z"})
    assert access.user({"X-API-Key": "tml-a"}).name == "alice"
    assert access.user({"Authorization": "Bearer tml-z"}).is_admin
    assert not access.user({"X-API-Key": "tml-a"}).may_access("bob")
    for headers in ({}, {"X-API-Key": "tml-"}, {"Authorization": "Bearer "}, {"X-API-Key": "tml-é"}):
        with pytest.raises(Refusal) as refused:
            access.user(headers)
        assert refused.value.status == 401


def test_only_a_sampler_named_v_and_a_number_is_a_published_version() -> None:
    def version(name: str, kind: str = "sampler") -> int | None:
        return published_version(
            Checkpoint(path="p", run="r", owner="a", kind=kind, name=name, directory="d", created_at=0.0)
        )

    assert version("v12") == 12
    assert [version(name) for name in ("12", "v", "vv1", "v1a")] == [None] * 4
    assert version("v12", "training") is None


async def test_a_future_is_its_owners() -> None:
    futures = Futures()
    future = futures.open("run/1", "alice")
    assert futures.open("run/1", "alice") is future
    with pytest.raises(Refusal) as refused:
        futures.of("run/1", "bob")
    assert refused.value.status == 403
    with pytest.raises(Refusal) as refused:
        futures.of("run/2", "alice")
    assert refused.value.status == 410
    assert await futures.wait(future, 0.01) is None
    asyncio.get_running_loop().call_later(0.01, future.set, Result.of({"a": 1}))
    result = await futures.wait(future, 10.0)
    assert result is not None and result.json() == b'{"a":1}'


def test_a_journal_gives_back_requests_in_order_after_the_saved_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for seq in (3, 1, 2, 10):
        journal.write(seq, "pass", f"body {seq}".encode())
    journal.write(11, REFUSED, b"")
    journal.write_result(2, Result(b"two", is_protobuf=True))
    journal.write_result(3, Result.failed("no"))
    again = Journal(tmp_path / "journal")
    assert [(entry.seq, entry.kind, entry.body) for entry in again.requests(2)] == [
        (3, "pass", b"body 3"),
        (10, "pass", b"body 10"),
        (11, REFUSED, b""),
    ]
    assert again.results() == {2: Result(b"two", is_protobuf=True), 3: Result.failed("no")}
    again.forget(3, unsent={3})
    assert [entry.seq for entry in again.requests()] == [10, 11]
    assert list(again.results()) == [3]


def test_a_flipped_byte_of_the_journal_is_found(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(1, "pass", b'{"lr": 1e-5}')
    journal.write_result(1, Result.of({"loss": 0.5}))
    for path in list(tmp_path.iterdir()):
        data = path.read_bytes()
        for at in range(len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            if path.suffix == ".result":
                assert journal.results() == {}
            else:
                with pytest.raises(DataError, match=f"{path}: damaged"):
                    journal.requests()
        path.write_bytes(data)
    assert [entry.body for entry in journal.requests()] == [b'{"lr": 1e-5}'] and 1 in journal.results()


def test_records_are_there_when_the_database_is_opened_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = Run(id="r", owner="alice", spec=TenantSpec(name="r", rank=3), base_model="m", created_at=1.0)
    store.put(run)
    run.state, run.saved_seq = "active", 7
    store.put(run)
    store.close()
    again = Store(tmp_path)
    found = again.get(Run, "r")
    assert found == run and found is not run
    again.delete(found)
    again.close()
    assert Store(tmp_path).get(Run, "r") is None


async def test_what_is_done_is_reported_once_in_order_and_to_who_asked() -> None:
    futures = Futures()
    first, second, other = (futures.open(name, "alice") for name in ("s/1", "s/2", "t/1"))
    is_own = lambda future: future.id.startswith("s/")
    assert await futures.wait_any(is_own, 0, 0.01) == []
    waiting = asyncio.create_task(futures.wait_any(is_own, 0, 30.0))
    await asyncio.sleep(0)
    other.set(Result())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    second.set(Result.failed("no"))
    assert await waiting == [second]
    first.set(Result())
    assert await futures.wait_any(is_own, 0, 30.0) == [second, first]
    assert await futures.wait_any(is_own, second.number_done, 30.0) == [first]
    assert await futures.wait_any(is_own, first.number_done, 0.01) == []


def test_usage_is_counted_by_hour_user_and_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100 * HOUR_S
    monkeypatch.setattr("stretto_service.usage.time.time", lambda: now)
    store = Store(tmp_path)
    meter = Meter(store)
    meter.add("alice", "s", training=3, sampled=1)
    meter.add("alice", "s", training=4)
    meter.add("bob", None, prefill=5)
    assert meter.between(0, 100 * HOUR_S) == []
    found = meter.between(100 * HOUR_S, 101 * HOUR_S)
    assert [(each.owner, each.session, each.counts) for each in found] == [
        ("alice", "s", {"training": 7, "sampled": 1}),
        ("bob", None, {"prefill": 5}),
    ]
    store.close()
    again = Meter(Store(tmp_path))
    again.add("alice", "s", training=1)
    now += HOUR_S
    again.add("alice", "s", training=9)
    assert [each.counts.get("training") for each in again.between(0, 102 * HOUR_S) if each.owner == "alice"] == [8, 9]


async def test_results_that_nobody_fetches_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("stretto_service.futures.time.monotonic", lambda: now)
    futures = Futures()
    sent, unsent, waiting = (futures.open(name, "alice") for name in ("sent", "unsent", "waiting"))
    for future in (sent, unsent):
        future.set(Result())
    await futures.wait(sent, 0.0)
    for at, left in ((KEEP_SENT_S, 3), (KEEP_SENT_S + 1, 2), (KEEP_UNSENT_S, 2), (KEEP_UNSENT_S + 1, 1)):
        now = at
        futures.sweep()
        assert sum(futures.find(name) is not None for name in ("sent", "unsent", "waiting")) == left, at
    assert futures.find("waiting") is waiting  # its work is not done
    with pytest.raises(Refusal, match=r"result is gone.*3600 s.*120 s") as gone:
        futures.of("unsent", "alice")
    assert gone.value.status == 410


async def test_a_user_with_many_results_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_service.futures.MAX_KEPT", 3)
    monkeypatch.setattr("stretto_service.futures.MAX_KEPT_BYTES", 100)
    futures = Futures()

    def kept(user: str, sizes: list[int]) -> list[int]:
        for i, size in enumerate(sizes):
            futures.open(f"{user}/{i}", user).set(Result(bytes(size)))
        futures.sweep()
        return [i for i in range(len(sizes)) if futures.find(f"{user}/{i}") is not None]

    assert kept("alice", [1] * 5) == [2, 3, 4]
    assert kept("bob", [60, 60, 40]) == [1, 2]
    assert kept("carol", [10, 1000]) == [1]  # the newest, however large it is
    assert futures.find("alice/2") is not None


def test_records_of_what_is_not_used_any_more_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = Store(tmp_path), 2 * KEEP_USAGE_S
    old, new = now - KEEP_S - 1, now - 1

    def put(record: Record) -> None:
        store.put(record)

    def run(name: str, state: str, at: float, **more: object) -> None:
        spec = TenantSpec(name=name)
        put(Run(id=name, owner="alice", spec=spec, base_model="m", created_at=at, state=state, **more))  # type: ignore[arg-type]

    for name, at in (("old", old), ("new", new), ("of-evicted", old), ("of-ended", old)):
        put(Session(id=name, owner="alice", created_at=at, last_seen_at=at))
        put(Sampler(id=name, owner="alice", base_model="m", used_at=at))
    run("evicted", "evicted", old, session="of-evicted")
    run("ended", "ended", old, session="of-ended")
    run("saved", "ended", old)
    run("watched", "ended", old, directory="runs/run_a")
    path = "tinker://saved/weights/a"
    put(Checkpoint(path=path, run="saved", owner="alice", kind="training", name="a", directory="", created_at=old))
    for hour in (0, int(now // HOUR_S)):
        put(Usage(id=str(hour), owner="alice", session=None, hour=hour))
    assert store.unneeded(now=now, since=new)[0].id == "ended"  # of others it is not known when they were used
    gone = store.unneeded(now=now, since=0.0)
    store.delete(*gone)
    store.close()
    again = Store(tmp_path)
    names = {kind: {each.id for each in again.all(kind)} for kind in (Session, Sampler, Run)}
    assert names == {Session: {"new", "of-evicted"}, Sampler: {"new"}, Run: {"evicted", "saved", "watched"}}
    assert [each.hour for each in again.all(Usage)] == [now // HOUR_S]
    monkeypatch.setattr("stretto_service.store.MAX_RECORDS", 3)
    for i in range(5):
        for user in ("alice", "bob"):
            again.put(Session(id=f"{user}{i}", owner=user, created_at=new + i, last_seen_at=new + i))
    gone = again.unneeded(now=now, since=0.0)
    assert {each.id for each in gone} == {"new", "alice0", "alice1", "bob0", "bob1"}


def test_the_audit_log_keeps_its_newest_part(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", max_bytes=4000)
    for i in range(500):
        audit.write("alice", f"action {i}")
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4200
    found = [entry["action"] for entry in audit.read()]
    assert found == [f"action {i}" for i in range(500 - len(found), 500)] and len(found) > 15
    audit.close()
    again = Audit(tmp_path / "audit.jsonl", max_bytes=4000)
    again.write("alice", "last")
    assert [entry["action"] for entry in again.read()][-2:] == ["action 499", "last"]
    again.close()
