"""The hub's part of a run's life, up to what it asks of the ranks: numbers, freezing, restarts, failed passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from stretto.base.errors import DataError, EngineError
from stretto.base.secret import load_secret
from stretto.records.sample import MicroBatch
from stretto.transports.engine.api import Refusal
from stretto_service.config import ServeConfig, ServiceSection, UserSection
from stretto_service.engines import adapter_name
from stretto_service.futures import Futures
from stretto_service.store import Audit, Checkpoint, Run, Sampler, Store
from stretto_service.training.jobs import Limits, assign, read_job
from stretto_service.training.journal import REFUSED, Journal
from stretto_service.training.place import check_place
from stretto_service.training.scheduler import Request, Share
from stretto_service.training.training import Training
from stretto_service.wires.operations import (
    AdamSettings,
    Done,
    ExportAdapter,
    Pass,
    SaveTenant,
    TenantResult,
    TenantSpec,
    TenantWork,
)
from stretto_service.wires.service import PublishBody, SaveBody, StepBody, encode_work

STEP = b"{}"


class Ranks:
    """Answers operations as one rank does; says which it got."""

    def __init__(self) -> None:
        self.operations: list = []
        self.errors: dict[str, str] = {}
        self.before_answer = lambda: None

    async def submit(self, operation: object) -> asyncio.Future:
        [operation] = operation if isinstance(operation, list) else [operation]
        self.operations.append(operation)
        name = type(operation).__name__
        results = TenantResult(error=self.errors.get(name), metrics={"step": 1.0})
        works = getattr(operation, "works", None)
        spec = getattr(operation, "spec", None)
        tenants = (
            [work.tenant for work in works]
            if works is not None
            else [spec.name if spec is not None else operation.tenant]
        )
        future = asyncio.get_running_loop().create_future()
        if name == "SaveTenant":
            assert isinstance(operation, SaveTenant)
            Path(operation.path).mkdir(parents=True, exist_ok=True)
        if name == "ExportAdapter":
            assert isinstance(operation, ExportAdapter)
            Path(operation.directory).mkdir(parents=True, exist_ok=True)
        self.before_answer()
        future.set_result([Done(number=1, results=dict.fromkeys(tenants, results))])
        return future

    async def execute(self, operation: object) -> list[Done]:
        return await (await self.submit(operation))

    @property
    def names(self) -> list[str]:
        return [type(operation).__name__ for operation in self.operations]


Open = Callable[..., tuple[Training, Ranks]]


@pytest.fixture
def open_training(tmp_path: Path) -> Iterator[Open]:
    """Opens a service's hub, as often as a test starts it anew, without processes."""
    base = ServeConfig.model_validate(
        {"output_dir": str(tmp_path), "seq_len": 64, "model": {"name": "m"}, "service": {"max_waiting_requests": 8}}
    )
    service = base.run_dir.path / "service"
    stores: list[Store] = []
    with ExitStack() as stack:

        def open_one(**section: object) -> tuple[Training, Ranks]:
            cfg = base.model_copy(update={"service": base.service.model_copy(update=section)})
            for before in stores:
                before.flush()  # one that starts anew finds it
            store, audit, ranks = Store(service), Audit(service / "audit.jsonl", max_bytes=1 << 20), Ranks()
            stores.append(store)
            stack.callback(store.close)
            stack.callback(audit.close)
            training = Training(cfg, load_secret(cfg.run_dir), store, Futures(), audit, Limits(64, 100))
            training._server = ranks
            return training, ranks

        yield open_one


def make_run(training: Training, name: str = "r") -> Run:
    run = Run(id=name, owner="alice", spec=TenantSpec(name=name), base_model="m", created_at=1.0)
    training.create(run)
    return run


async def serve(training: Training) -> None:
    """Turns until nothing waits."""
    while shares := training.queue.next(0.0):
        await training._turn(shares)
        await asyncio.sleep(0)


def batch(num_targets: int = 0) -> bytes:
    rows = [
        MicroBatch(
            token_ids=np.arange(4, dtype=np.int32),
            loss_mask=np.ones(4, bool),
            logprobs=np.zeros(4, np.float32),
            advantages=np.ones(4, np.float32),
            temperatures=np.ones(4, np.float32),
            cu_seqlens=np.array([0, 4], np.int32),
            sample_ids=("0",),
            envs=("",),
        )
    ] * 2
    targets = (np.zeros(4, np.int32),) * num_targets
    return encode_work(TenantWork(tenant="", micro_batches=tuple(rows), targets=targets))


async def test_a_number_far_ahead_is_not_taken(open_training: Open) -> None:
    training, _ = open_training()
    run = make_run(training)
    await serve(training)
    for seq in (10**15, 9):
        with pytest.raises(Refusal) as refused:
            await training.receive(run, "step", seq, STEP)
        assert refused.value.status == 429
    assert not training.places.tenants["r"].early
    await training.receive(run, "step", 8, STEP)
    await training.receive(run, "step", 1, STEP)  # there is always room for the next
    training.freeze(run, "because")
    with pytest.raises(Refusal) as refused:
        await training.receive(run, "step", 10**15, STEP)
    assert refused.value.status == 429


@pytest.mark.parametrize("adam", [{"beta1": 1.0}, {"beta2": 5.0}, {"eps": -1.0}, {"max_norm": -1.0}])
def test_settings_that_end_a_rank_are_refused(adam: dict) -> None:
    run = Run(id="r", owner="a", spec=TenantSpec(name="r"), base_model="m", created_at=1.0)
    body = msgspec.json.encode(StepBody(adam=AdamSettings(**adam)))
    with pytest.raises(DataError, match=next(iter(adam))):
        read_job(run, "step", body, Limits(64, 100), seq=1)


def test_a_batch_with_fewer_targets_than_micro_batches_is_refused() -> None:
    run = Run(id="r", owner="a", spec=TenantSpec(name="r"), base_model="m", created_at=1.0)
    with pytest.raises(DataError, match="targets: 1 for 2"):
        read_job(run, "batch", batch(1), Limits(64, 100), seq=1)
    assert len(read_job(run, "batch", batch(2), Limits(64, 100), seq=1).body.targets) == 2


async def test_passes_without_a_step_do_not_fill_the_disk(open_training: Open) -> None:
    most = 3 * len(batch())
    training, _ = open_training(max_waiting_bytes=most)
    run = make_run(training)
    for seq in range(1, 14):
        await training.receive(run, "batch", seq, batch())
        await serve(training)
    with pytest.raises(Refusal, match="make a step"):
        await training.receive(run, "batch", 14, batch())
    await training.receive(run, "step", 15, STEP)
    await serve(training)
    await training.receive(run, "batch", 16, batch())
    assert training.places.tenants["r"].gradient_bytes == 0
    training.places.tenants.clear()
    after, _ = open_training(max_waiting_bytes=most)
    assert [r.payload.seq for r in after.queue.requests("r")] == [None, *range(1, 14), 15, 16]


async def test_requests_that_freezing_refused_are_not_computed_after_a_restart(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    await serve(training)
    await training.receive(run, "batch", 1, batch())
    await training.receive(run, "step", 2, STEP)
    await serve(training)
    waiting = [await training.receive(run, "step", seq, STEP) for seq in (3, 5)]
    training.freeze(run, "because")
    assert all("frozen: because" in (future.result.error or "") for future in waiting)
    again, ranks = open_training()
    await serve(again)
    assert ranks.names == ["CreateTenant", "Pass", "OptimStep"]
    run = again.places.tenants["r"].run
    assert run.state == "frozen" and again.places.tenants["r"].next_seq == 4
    again.resume(run)
    await again.receive(run, "step", 4, STEP)
    await serve(again)
    assert ranks.names[3:] == ["DropGradients", "OptimStep"]
    assert again.places.tenants["r"].next_seq == 6


async def test_a_gap_that_was_closed_stays_closed_after_a_restart(open_training: Open) -> None:
    training, _ = open_training()
    run = make_run(training)
    await serve(training)
    late = await training.receive(run, "step", 3, STEP)
    training.places.close_gap(training.places.tenants["r"])
    assert "seq_id = 1 never came" in (late.result.error or "")
    again, ranks = open_training()
    await serve(again)
    tenant = again.places.tenants["r"]
    assert (tenant.next_seq, tenant.early, tenant.gap_since) == (4, {}, None)
    assert ranks.names == ["CreateTenant"]


async def test_a_failed_pass_is_not_half_of_a_step(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    await serve(training)
    ranks.errors = {"Pass": "bad data"}
    await training.receive(run, "batch", 1, batch())
    step = await training.receive(run, "step", 2, STEP)
    await serve(training)
    assert ranks.names == ["CreateTenant", "Pass", "DropGradients", "DropGradients"]
    assert "bad data" in (step.result.error or "")
    ranks.errors = {}
    await training.receive(run, "batch", 3, batch())
    step = await training.receive(run, "step", 4, STEP)
    await serve(training)
    assert step.result is not None and step.result.error is None
    assert ranks.names[4:] == ["Pass", "OptimStep"]


async def test_what_an_ended_run_computed_is_not_its_successors(open_training: Open) -> None:
    training, ranks = open_training()
    old = make_run(training)
    await serve(training)
    await training.receive(old, "step", 1, STEP)

    def replace() -> None:
        ranks.before_answer = lambda: None
        training.end(old)
        make_run(training)

    ranks.before_answer = replace
    [share] = training.queue.next(0.0)
    await training._turn([share])
    tenant = training.places.tenants["r"]
    assert (tenant.clean_seq, tenant.next_seq, tenant.unsaved_steps) == (0, 1, 0)
    assert tenant.journal.results() == {}


async def test_a_run_whose_weights_cannot_be_saved_still_gives_its_place_back(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    await serve(training)
    await training.receive(run, "step", 1, STEP)
    await serve(training)
    ranks.errors = {"SaveTenant": "weights of step 1 are not finite"}
    training.evict(run, "idle")
    await serve(training)
    assert run.state == "evicted" and not training.places.tenants
    ranks.operations, ranks.errors = [], {}
    await training.receive(run, "step", 2, STEP)
    await serve(training)
    assert [name for name in ranks.names if name != "RemoveTenant"] == ["CreateTenant", "OptimStep", "OptimStep"]


async def test_a_run_whose_journal_is_damaged_fails_alone_when_the_trainer_is_started_anew(open_training: Open) -> None:
    training, _ = open_training()
    run, other = make_run(training), make_run(training, "other")
    await serve(training)
    waiting = [await training.receive(each, "step", 1, STEP) for each in (run, other)]
    early = await training.receive(run, "step", 3, STEP)
    (training.directory / "r" / "journal" / "00000001.step").write_bytes(b"\0" * 6)
    training.places.rebuild()
    assert list(training.places.tenants) == ["other"] and waiting[1].result is None
    assert run.state == "failed" and "00000001.step: damaged" in run.reason
    for future in (waiting[0], early):
        assert future.result is not None and "00000001.step: damaged" in (future.result.error or "")


async def test_users_learn_no_paths_of_the_machine_from_what_fails(open_training: Open, tmp_path: Path) -> None:
    training, ranks = open_training(max_failures=1)
    broken, made = make_run(training), make_run(training, "other")
    await serve(training)
    file = tmp_path / "service" / "weights" / "a.safetensors"
    ranks.errors = {"OptimStep": f"{file}: cannot be read ('{file}'); load /v1/runs, tinker://r/weights/a or 1/2 of it"}
    future = await training.receive(broken, "step", 1, STEP)
    await serve(training)
    told = "a.safetensors: cannot be read ('a.safetensors'); load /v1/runs, tinker://r/weights/a or 1/2 of it"
    assert future.result is not None and future.result.error == told
    assert broken.state == "frozen" and told in broken.reason
    training.places.drop(made.id, "failed", f"RankFailed: OSError: [Errno 28] No space left on device: '{file}'")
    assert made.reason == "RankFailed: OSError: [Errno 28] No space left on device: 'a.safetensors'"


def test_a_refused_number_has_one_request(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(1, "pass", b"x")
    journal.write(1, REFUSED, b"")  # a crash before the other was deleted
    assert [entry.kind for entry in journal.requests()] == [REFUSED]
    journal.refuse(1)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001.refused"]


async def test_waiting_requests_are_bounded_in_bytes_per_user(open_training: Open) -> None:
    size = len(batch())
    training, _ = open_training(max_waiting_bytes=2 * size)
    run, other = make_run(training), make_run(training, "other")
    await serve(training)
    await training.receive(run, "batch", 1, batch())
    await training.receive(run, "batch", 3, batch())
    assert training.places.waiting_bytes("alice") == size
    for refused_run, seq in ((run, 4), (run, 2)):
        with pytest.raises(Refusal, match="max_waiting_bytes") as refused:
            await training.receive(refused_run, "batch", seq, batch())
        assert refused.value.status == 429
    await training.receive(other, "batch", 1, batch())  # the next of a run that has nothing waiting
    await serve(training)
    await training.receive(run, "batch", 2, batch())
    await serve(training)
    assert training.places.waiting_bytes("alice", with_early=True) == 0


async def test_what_the_admin_froze_no_user_resumes(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    await serve(training)
    training.freeze(run, "by alice")
    training.freeze(run, "by the admin", by_admin=True)
    with pytest.raises(Refusal, match="only the admin") as refused:
        training.resume(run)
    assert refused.value.status == 403
    training.evict(run, "idle")
    await serve(training)
    assert run.state == "evicted" and run.reason == "by the admin"
    with pytest.raises(Refusal, match="only the admin") as refused:
        await training.receive(run, "step", 1, STEP)
    assert refused.value.status == 423 and not training.places.tenants
    training.resume(run, by_admin=True)
    await training.receive(run, "step", 1, STEP)
    await serve(training)
    assert run.state == "active" and ranks.names[-1] == "OptimStep"


async def test_a_run_that_is_frozen_before_it_is_created_is_created(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    training.freeze(run, "because")
    await serve(training)
    assert ranks.names == ["CreateTenant"] and run.state == "frozen"
    training.resume(run)
    await training.receive(run, "step", 1, STEP)
    await serve(training)
    assert ranks.names[1:] == ["DropGradients", "OptimStep"]


@pytest.mark.parametrize("num_places", [3, 4, 8])
def test_one_user_leaves_a_place_for_every_other_unless_a_limit_says_more(num_places: int) -> None:
    users = {"alice": UserSection(), "bob": UserSection(), "carol": UserSection()}
    section = ServiceSection(users=users, max_concurrent_runs=num_places)
    owners: list[str] = []
    for _ in range(num_places - 2):
        check_place(section, owners, "alice")
        owners.append("alice")
    with pytest.raises(Refusal, match="kept for users who have none") as refused:
        check_place(section, owners, "alice")
    assert refused.value.status == 403
    for other in ("bob", "carol"):
        check_place(section, owners, other)
        owners.append(other)
    with pytest.raises(Refusal, match="places of this service are taken"):
        check_place(section, owners, "bob")
    if num_places > 3:
        check_place(section, owners[1:], "bob")  # all have one: who comes first has what is free
    limited = section.model_copy(update={"users": users | {"alice": UserSection(max_runs=num_places)}})
    check_place(limited, ["alice"] * (num_places - 1), "alice")
    alone = section.model_copy(update={"users": {"alice": UserSection()}})
    check_place(alone, ["alice"] * (num_places - 1), "alice")


async def test_a_run_that_comes_back_counts_among_its_users_runs(open_training: Open) -> None:
    training, _ = open_training(users={"alice": UserSection(max_runs=1)})
    first = make_run(training, "first")
    await serve(training)
    training.evict(first, "idle")
    await serve(training)
    second = make_run(training, "second")
    await serve(training)
    with pytest.raises(Refusal, match="max_runs") as refused:
        await training.receive(first, "step", 1, STEP)
    assert refused.value.status == 403 and first.state == "evicted"
    training.end(second)
    await training.receive(first, "step", 1, STEP)
    await serve(training)
    assert first.state == "active"


def test_neighbours_that_split_rows_have_the_same_micro_batches() -> None:
    payload = SimpleNamespace(run=SimpleNamespace(id="r"))
    shares = [Share(Request("r", (30, 20, 10), payload), 0, 3)]
    assert [own["r"] for own in assign(shares, 4, 2)] == [[0], [0], [1, 2], [1, 2]]
    assert [own["r"] for own in assign(shares, 2)] == [[0], [1, 2]]


def test_largest_values_of_several_turns_are_not_summed() -> None:
    run = Run(id="r", owner="a", spec=TenantSpec(name="r"), base_model="m", created_at=1.0)
    job = read_job(run, "batch", batch(), Limits(64, 100), seq=1)
    for loss, most in ((1.0, -5.0), (2.0, -3.0), (3.0, -4.0)):
        job.add(TenantResult(metrics={"loss": loss, "max/mismatch_kl": most}), [0], is_first=True)
    assert job.sums == {"loss": 6.0, "max/mismatch_kl": -3.0}


async def test_saving_over_a_checkpoint_keeps_the_old_one_until_the_new_one_is_there(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    await serve(training)
    body = msgspec.json.encode(SaveBody(name="best"))
    await training.receive(run, "save", 1, body)
    await serve(training)
    found = training.checkpoints.find("tinker://r/weights/best", "alice")
    (Path(found.directory) / "old").touch()
    ranks.errors = {"SaveTenant": "no space left on device"}
    failed = await training.receive(run, "save", 2, body)
    await serve(training)
    assert "no space" in (failed.result.error or "")
    assert training.checkpoints.find("tinker://r/weights/best", "alice") == found
    assert (Path(found.directory) / "old").exists()


async def test_a_checkpoint_deleted_while_one_of_its_name_is_saved_takes_only_its_own_files(
    open_training: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, ranks = open_training()
    run, body = make_run(training), msgspec.json.encode(SaveBody(name="best"))
    await training.receive(run, "save", 1, body)
    await serve(training)
    old = training.checkpoints.find("tinker://r/weights/best", "alice")
    submit = ranks.submit

    async def deleted_meanwhile(operation: object) -> asyncio.Future:
        answer = await submit(operation)
        await training.checkpoints.delete(old)
        return answer

    monkeypatch.setattr(ranks, "submit", deleted_meanwhile)
    await training.receive(run, "save", 2, body)
    await serve(training)
    new = training.checkpoints.find("tinker://r/weights/best", "alice")
    assert Path(new.directory).is_dir() and not Path(old.directory).exists()


async def test_a_sampler_keeps_the_weights_that_it_was_made_of(open_training: Open) -> None:
    training, _ = open_training()
    run, store, checkpoints = make_run(training), training._store, training.checkpoints
    sweep = partial(checkpoints.sweep, lambda _: False, since=0.0, sampler_timeout_s=60.0)

    async def save(seq: int) -> Path:
        body = {"model_id": "r", "seq_id": seq, "path": "mine", "overwrite": True}
        await training.receive(run, "save_weights_for_sampler", seq, msgspec.json.encode(body))
        await serve(training)
        return Path(checkpoints.find("tinker://r/sampler_weights/mine", "alice").directory)

    first = await save(1)
    sampler = Sampler(
        id="s", owner="alice", base_model="m", model_path="tinker://r/sampler_weights/mine", run="r",
        directory=str(first), used_at=time.time(),
    )  # fmt: skip
    store.put(sampler)
    (first / "first").touch()
    name = adapter_name(sampler)
    second = await save(2)
    assert second != first and not (second / "first").exists()
    third = await save(3)
    assert await sweep() == 0
    assert (first / "first").exists() and adapter_name(sampler) == name
    assert third.is_dir() and not second.exists()  # nobody has made a sampler of the second
    again, _ = open_training()
    await again.checkpoints.sweep(lambda _: False, since=0.0, sampler_timeout_s=60.0)
    assert first.is_dir() and third.is_dir()
    sampler.used_at = 0.0
    assert await sweep() == 1
    assert not first.exists() and third.is_dir()


async def test_what_a_save_left_that_was_not_recorded_is_deleted(open_training: Open) -> None:
    training, _ = open_training()
    make_run(training)
    training._store.flush()
    left = training.directory / "r" / "weights" / "best"
    for path in (left, left.with_name("other.part")):
        path.mkdir(parents=True)
    again, _ = open_training()
    run = again._store.get(Run, "r")
    assert run is not None
    await again.receive(run, "save", 1, msgspec.json.encode(SaveBody(name="best")))
    await serve(again)
    await again.checkpoints.sweep(lambda _: False, since=0.0, sampler_timeout_s=None)
    found = again.checkpoints.find("tinker://r/weights/best", "alice")
    assert [str(path) for path in left.parent.iterdir()] == [found.directory]


async def test_the_state_that_a_run_continues_from_is_the_one_just_saved(open_training: Open) -> None:
    training, ranks = open_training(save_steps=1)
    run = make_run(training)
    await serve(training)
    left = training.directory / "r" / "state" / "99999999-1"  # by name it is newer than all
    left.mkdir(parents=True)
    await training.receive(run, "step", 1, STEP)
    await serve(training)
    [saved] = [operation for operation in ranks.operations if isinstance(operation, SaveTenant)]
    assert run.saved == saved.path and run.saved_seq == 1
    training._store.flush()
    assert [path.name for path in left.parent.iterdir()] == [Path(saved.path).name]


async def test_only_the_last_published_versions_stay(open_training: Open) -> None:
    training, _ = open_training(kept_versions=2)
    run = make_run(training)
    await serve(training)
    body = msgspec.json.encode({"model_id": "r", "seq_id": 1, "path": "mine"})
    await training.receive(run, "save_weights_for_sampler", 1, body)
    for seq in range(2, 7):
        await training.receive(run, "publish", seq, msgspec.json.encode(PublishBody(version=seq)))
    await serve(training)
    names = [each.name for each in training._store.all(Checkpoint)]
    assert names == ["mine", "v5", "v6"] and run.published == "tinker://r/sampler_weights/v6"


async def test_what_has_expired_is_deleted_unless_it_is_used(open_training: Open) -> None:
    training, _ = open_training()
    run = make_run(training)
    await serve(training)
    for seq, extra in enumerate(({"path": "short", "ttl_seconds": 1}, {"path": "long"}, {}, {}), 1):
        body = {"model_id": "r", "seq_id": seq, "sampling_session_seq_id": seq} | extra
        await training.receive(run, "save_weights_for_sampler", seq, msgspec.json.encode(body))
    await serve(training)
    store, checkpoints = training._store, training.checkpoints
    idle, busy = store.all(Sampler)
    for record in (*store.all(Checkpoint), idle, busy):
        assert Path(record.directory).is_dir()
    short = checkpoints.find("tinker://r/sampler_weights/short", "alice")
    short.expires_at = time.time() - 1
    idle.used_at = busy.used_at = time.time() - 100
    sweep = partial(checkpoints.sweep, since=0.0)
    assert await sweep(lambda _: True, sampler_timeout_s=60.0) == 0
    assert await sweep(lambda path: path == busy.directory, sampler_timeout_s=60.0) == 2
    assert [each.name for each in store.all(Checkpoint)] == ["long"] and list(store.all(Sampler)) == [busy]
    assert not Path(short.directory).exists() and not Path(idle.directory).exists()
    assert await sweep(lambda _: False, sampler_timeout_s=None) == 0
    assert await checkpoints.sweep(lambda _: False, since=time.time(), sampler_timeout_s=60.0) == 0


async def test_a_request_that_ends_the_trainer_twice_is_given_up_and_others_go_on(
    open_training: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, ranks = open_training()
    bad, good = make_run(training, "bad"), make_run(training, "good")
    turns: list[list[str]] = []

    @asynccontextmanager
    async def ranks_until_poison(*_: object) -> AsyncIterator[Ranks]:
        yield ranks

    submit = ranks.submit

    async def dies(operation: object) -> asyncio.Future:
        [one] = operation if isinstance(operation, list) else [operation]
        if isinstance(one, Pass):
            turns.append(sorted(work.tenant for work in one.works))
            if any(len(work.targets) for work in one.works):
                raise EngineError("trainer rank 0 has died")
        return await submit(operation)

    monkeypatch.setattr(ranks, "submit", dies)
    monkeypatch.setattr(ranks, "check", lambda: None, raising=False)
    monkeypatch.setattr("stretto_service.training.training.connected_ranks", ranks_until_poison)
    monkeypatch.setattr("stretto_service.training.training._PAUSE_S", 0.0)
    await training.receive(bad, "step", 1, STEP)
    poison = await training.receive(bad, "batch", 2, batch(2))
    behind = await training.receive(bad, "step", 3, STEP)
    await training.receive(good, "step", 1, STEP)
    passed = await training.receive(good, "batch", 2, batch())
    work = asyncio.create_task(training.work())
    async with asyncio.timeout(20.0):
        for future in (poison, behind, passed):
            await future.changed.wait()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert turns == [["bad", "good"], ["bad"], ["good"]] or turns == [["bad", "good"], ["good"], ["bad"]]
    assert "ended the trainer 2 times" in (poison.result.error or "") and "frozen" in behind.result.error
    assert passed.result.error is None and training.num_recoveries == 2
    assert (bad.state, good.state) == ("frozen", "active")
    again, _ = open_training()
    await serve(again)  # what the journal still has does no harm
    assert again.places.tenants["bad"].next_seq == 4 and again.places.tenants["bad"].run.state == "frozen"
