"""A service that is told to end, and runs whose clients are silent: what they had is saved, and goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from services import Service, serving

from stretto.base.errors import EngineError
from stretto.records.sample import MicroBatch
from stretto.trainer.state.checkpoint import SavedState
from stretto_service.store import Run, Store
from stretto_service.wires.operations import AdamSettings, SumLoss, TenantSpec, TenantWork
from stretto_service.wires.service import CreateRun, ServiceRun, encode_work

STEPS = 6
ADAM = AdamSettings(lr=1e-2)


def work(seed: int = 0) -> TenantWork:
    tokens = np.random.default_rng(seed).integers(15, 25, 24).astype(np.int32)
    ones = np.ones(24, np.float32)
    row = MicroBatch(
        token_ids=tokens,
        cu_seqlens=np.array([0, 24], np.int32),
        loss_mask=np.arange(24) > 0,
        logprobs=0 * ones,
        advantages=0 * ones,
        temperatures=ones,
        ce_weights=(np.arange(24) > 0).astype(np.float32),
        rl_weights=0 * ones,
        sample_ids=("0",),
        envs=("",),
    )
    return TenantWork(tenant="", micro_batches=(row,), sum_loss=SumLoss(type="cross_entropy"))


async def begin(service: Service, name: str, user: str = "alice") -> ServiceRun:
    run = ServiceRun(service.url, service.token(user))
    spec = TenantSpec(name=name, rank=4, seed=3)
    try:
        await run.create(CreateRun(spec=spec, base_model=service.model))
    except EngineError:
        await run.close()
        raise
    return run


async def learn(run: ServiceRun, steps: int) -> list[float]:
    """The losses of some steps on one row."""
    losses = []
    for _ in range(steps):
        losses.append((await run.train(work()))["metrics"]["loss"])
        await run.step(ADAM)
    return losses


async def alone(service: Service, user: str = "alice") -> list[float]:
    run = await begin(service, "alone", user)
    losses = await learn(run, STEPS)
    await run.end()
    await run.close()
    return losses


async def state(service: Service, name: str) -> dict:
    return service.call("GET", f"/v1/runs/alice:{name}")[1]


async def until_state(service: Service, name: str, wanted: str) -> dict:
    async with asyncio.timeout(120.0):
        while (found := await state(service, name))["state"] != wanted:
            await asyncio.sleep(0.2)
    return found


@pytest.mark.slow
def test_a_service_that_is_told_to_end_saves_its_runs_and_the_next_goes_on(sorter: Path, tmp_path: Path) -> None:
    with serving(tmp_path, sorter.resolve(), save_steps=1000, idle_timeout_s=None) as service:

        async def first() -> list[float]:
            run = await begin(service, "mine")
            losses = await learn(run, STEPS // 2)
            await run.close()
            return losses

        losses = asyncio.run(first())
        expected = asyncio.run(alone(service, "bob"))
        assert service.stop() == 0
        store = Store(service.run / "service")
        [saved] = [run for run in store.all(Run) if run.id == "alice:mine"]
        store.close()
        assert (saved.state, saved.step, saved.saved_seq) == ("active", STEPS // 2, STEPS)
        assert saved.saved is not None
        SavedState(Path(saved.saved), advice="none")  # raises if it is not complete
        journal = service.run / "service" / "runs" / saved.spec.name / "journal"
        assert not list(journal.glob("*.batch")) and not list(journal.glob("*.step"))

        service.start()

        async def second() -> list[float]:
            run = ServiceRun(service.url, service.token("alice"))
            assert (await run.attach("alice:mine"))["next_seq"] == STEPS + 1
            losses = await learn(run, STEPS // 2)
            await run.end()
            await run.close()
            return losses

        assert losses + asyncio.run(second()) == pytest.approx(expected, rel=1e-5)


def test_a_silent_run_gives_its_place_back_and_comes_back_where_it_was(sorter: Path, tmp_path: Path) -> None:
    with serving(tmp_path, sorter.resolve(), save_steps=1000, idle_timeout_s=3.0, max_concurrent_runs=1) as service:

        async def scenario() -> None:
            expected = await alone(service)
            run = await begin(service, "mine")
            losses = await learn(run, STEPS // 2)
            with pytest.raises(EngineError, match=r"HTTP 403.*max_concurrent_runs"):
                await begin(service, "other", "bob")
            found = await until_state(service, "mine", "evicted")
            assert found["reason"] == "its client was silent for 3 s" and found["step"] == STEPS // 2
            other = await begin(service, "other", "bob")
            with pytest.raises(EngineError, match=r"HTTP 403.*places"):
                await run.train(work())
            await other.end()
            run._seq -= 1  # the request that was refused has used no number
            losses += await learn(run, STEPS - len(losses))
            assert (await state(service, "mine"))["state"] == "active"
            assert losses == pytest.approx(expected, rel=1e-5)
            await run.close()
            await other.close()

        asyncio.run(scenario())


@pytest.mark.slow
def test_a_request_during_which_the_trainer_dies_again_and_again_is_given_up(sorter: Path, tmp_path: Path) -> None:
    with serving(tmp_path, sorter.resolve(), max_concurrent_runs=2) as service:

        async def until_ready(recoveries: int) -> None:
            async with asyncio.timeout(120.0):
                while True:
                    trainer = service.call("GET", "/v1/status")[1]["trainer"]
                    if trainer["is_ready"] and trainer["recoveries"] >= recoveries:
                        return
                    await asyncio.sleep(0.1)

        async def scenario() -> None:
            good, bad = await begin(service, "good", "bob"), await begin(service, "bad")
            await learn(bad, 1)
            one = work()
            huge = msgspec.structs.replace(one, micro_batches=one.micro_batches * 3000)
            request = await bad.submit("batch", encode_work(huge))
            behind = await bad.submit("step", b"{}")
            for kills in range(8):
                await until_ready(kills)
                if (await state(service, "bad"))["state"] == "frozen":
                    break
                await asyncio.sleep(1.0)  # it is being computed: that takes longer than this
                service.kill("tenants")
            with pytest.raises(EngineError, match=r"request 3 .*ended the trainer"):
                await bad.wait(request)
            with pytest.raises(EngineError, match="frozen"):
                await bad.wait(behind)
            assert (await state(service, "bad"))["state"] == "frozen"
            losses = await learn(good, 4)
            assert losses[-1] < losses[0]
            service.call("POST", "/v1/runs/alice:bad/resume", user="alice")
            losses = await learn(bad, 2)  # after the one step that it had made
            assert (await state(service, "bad"))["step"] == 3 and losses[-1] < losses[0]
            await good.close()
            await bad.close()

        asyncio.run(scenario())


def test_clients_of_a_service_that_is_gone_are_closed_here(tmp_path: Path) -> None:
    """Their heartbeats would go on, and complain into the output of other tests."""
    closed: list[str] = []
    holder = SimpleNamespace(close=lambda: closed.append("session"))
    service = Service(tmp_path, tmp_path)
    service._clients.append(SimpleNamespace(_session_holder=holder, _rest_holder=None))
    service.end_sessions()
    assert closed == ["session"] and not service._clients
