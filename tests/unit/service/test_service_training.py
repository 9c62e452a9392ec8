"""The hub's part of a run's life, up to what it asks of the ranks: numbers, freezing, restarts, failed passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stretto.base.errors import DataError
from stretto.base.secret import load_secret
from stretto.config.root import ServeConfig
from stretto.records.sample import MicroBatch
from stretto.records.tenants import (
    AdamSettings,
    Done,
    TenantResult,
    TenantSpec,
    TenantWork,
)
from stretto.service.futures import Futures
from stretto.service.jobs import Limits, read_job
from stretto.service.journal import REFUSED, Journal
from stretto.service.store import Audit, Run, Store
from stretto.service.training import Training
from stretto.transports.engine.api import Refusal
from stretto.transports.service import StepBody, encode_work

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
        self.before_answer()
        future.set_result([Done(number=1, results=dict.fromkeys(tenants, results))])
        return future

    async def execute(self, operation: object) -> list[Done]:
        return await (await self.submit(operation))

    @property
    def names(self) -> list[str]:
        return [type(operation).__name__ for operation in self.operations]


Open = Callable[[], tuple[Training, Ranks]]


@pytest.fixture
def open_training(tmp_path: Path) -> Iterator[Open]:
    """Opens a service's hub, as often as a test starts it anew, without processes."""
    cfg = ServeConfig.model_validate(
        {
            "output_dir": str(tmp_path),
            "seq_len": 64,
            "model": {"name": "m"},
            "service": {"max_waiting_requests": 8},
        }
    )
    service = cfg.run_dir.path / "service"
    with ExitStack() as stack:

        def open_one() -> tuple[Training, Ranks]:
            store, audit, ranks = Store(service), Audit(service / "audit.jsonl"), Ranks()
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
            training.submit(run, "step", seq, STEP)
        assert refused.value.status == 429
    assert not training.tenants["r"].early
    training.submit(run, "step", 8, STEP)
    training.submit(run, "step", 1, STEP)  # there is always room for the next
    training.freeze(run, "because")
    with pytest.raises(Refusal) as refused:
        training.submit(run, "step", 10**15, STEP)
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


async def test_requests_that_freezing_refused_are_not_computed_after_a_restart(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    await serve(training)
    training.submit(run, "batch", 1, batch())
    training.submit(run, "step", 2, STEP)
    await serve(training)
    waiting = [training.submit(run, "step", seq, STEP) for seq in (3, 5)]
    training.freeze(run, "because")
    assert all("frozen: because" in (future.result.error or "") for future in waiting)
    again, ranks = open_training()
    await serve(again)
    assert ranks.names == ["CreateTenant", "Pass", "OptimStep"]
    run = again.tenants["r"].run
    assert run.state == "frozen" and again.tenants["r"].next_seq == 4
    again.resume(run)
    again.submit(run, "step", 4, STEP)
    await serve(again)
    assert ranks.names[3:] == ["DropGradients", "OptimStep"]
    assert again.tenants["r"].next_seq == 6


async def test_a_gap_that_was_closed_stays_closed_after_a_restart(open_training: Open) -> None:
    training, _ = open_training()
    run = make_run(training)
    await serve(training)
    late = training.submit(run, "step", 3, STEP)
    training._close_gap(training.tenants["r"])
    assert "seq_id = 1 never came" in (late.result.error or "")
    again, ranks = open_training()
    await serve(again)
    tenant = again.tenants["r"]
    assert (tenant.next_seq, tenant.early, tenant.gap_since) == (4, {}, None)
    assert ranks.names == ["CreateTenant"]


async def test_a_failed_pass_is_not_half_of_a_step(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    await serve(training)
    ranks.errors = {"Pass": "bad data"}
    training.submit(run, "batch", 1, batch())
    step = training.submit(run, "step", 2, STEP)
    await serve(training)
    assert ranks.names == ["CreateTenant", "Pass", "DropGradients", "DropGradients"]
    assert "bad data" in (step.result.error or "")
    ranks.errors = {}
    training.submit(run, "batch", 3, batch())
    step = training.submit(run, "step", 4, STEP)
    await serve(training)
    assert step.result is not None and step.result.error is None
    assert ranks.names[4:] == ["Pass", "OptimStep"]


async def test_what_an_ended_run_computed_is_not_its_successors(open_training: Open) -> None:
    training, ranks = open_training()
    old = make_run(training)
    await serve(training)
    training.submit(old, "step", 1, STEP)

    def replace() -> None:
        ranks.before_answer = lambda: None
        training.end(old)
        make_run(training)

    ranks.before_answer = replace
    [share] = training.queue.next(0.0)
    await training._turn([share])
    tenant = training.tenants["r"]
    assert (tenant.clean_seq, tenant.next_seq, tenant.unsaved_steps) == (0, 1, 0)
    assert tenant.journal.results() == {}


async def test_a_run_whose_weights_cannot_be_saved_still_gives_its_place_back(open_training: Open) -> None:
    training, ranks = open_training()
    run = make_run(training)
    await serve(training)
    training.submit(run, "step", 1, STEP)
    await serve(training)
    ranks.errors = {"SaveTenant": "weights of step 1 are not finite"}
    training.evict(run, "idle")
    await serve(training)
    assert run.state == "evicted" and not training.tenants
    ranks.operations, ranks.errors = [], {}
    training.submit(run, "step", 2, STEP)
    await serve(training)
    assert [name for name in ranks.names if name != "RemoveTenant"] == [
        "CreateTenant",
        "OptimStep",
        "OptimStep",
    ]


def test_a_refused_number_has_one_request(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(1, "pass", b"x")
    journal.write(1, REFUSED, b"")  # a crash before the other was deleted
    assert [entry.kind for entry in journal.requests()] == [REFUSED]
    journal.refuse(1)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001.refused"]
