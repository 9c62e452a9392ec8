"""The simulated run: what it must say whatever the figures, and what follows from them by hand."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import build
from stretto.config.root import RLConfig
from stretto.config.sections.model import ScratchSection
from stretto.models.config import scratch_config
from stretto.virtual_clock import Cores, run_virtual
from stretto_bench.hardware import GPUS
from stretto_plan.compare import compare
from stretto_plan.costs import Costs, Measured, lookup
from stretto_plan.setup import build_setup
from stretto_plan.simulation.run import _run, _simulated_config, simulate
from stretto_plan.workload import Numbers, Workload, workload_of_run

MEASURED = Measured(
    decode=((1, 0.001), (64, 0.001)), prefill_token_s=0.0, request_s=0.0, train=((1, 0.05), (1 << 20, 0.05)),
    update_s=0.0, publish_s=0.0, load_s=0.0, rollout_s=0.0, turn_s=0.0, step_s=0.0,
)  # fmt: skip
"""A token takes a millisecond whatever the batch, a row 50 ms, and nothing else takes time."""


def costs(tmp_path, **orchestrator) -> Costs:
    (tmp_path / "config.json").write_text(json.dumps(scratch_config(ScratchSection(), 64).hf))
    base = {"env": [{"id": "sort-letters"}], "batch_size": 16, "group_size": 4}
    values = {"model": {"name": str(tmp_path)}, "seq_len": 512, "orchestrator": base | orchestrator}
    return Costs(build_setup(build(RLConfig, values), gpu="H100"), measured=MEASURED)


def test_a_synchronous_step_is_generation_then_training(tmp_path) -> None:
    times = simulate(costs(tmp_path, max_async_level=0), Workload(Numbers(10), Numbers(20)), steps=6)
    rows = 1
    assert times.step_s == pytest.approx(0.02 + rows * 0.05, rel=0.02)
    assert times.staleness_p95 == 0 and times.trainer_idle == pytest.approx(0.02 / 0.07, rel=0.05)
    assert times.sampled_tokens == 16 * 20


def test_an_asynchronous_step_is_the_longer_of_both(tmp_path) -> None:
    times = simulate(costs(tmp_path, max_async_level=1), Workload(Numbers(10), Numbers(20)), steps=6)
    assert times.step_s == pytest.approx(0.05, rel=0.02)
    assert times.staleness_p95 == 1 and times.trainer_idle < 0.02 and times.engine_idle > 0.3


@pytest.mark.heavy
def test_engines_that_get_every_second_version_cost_half_the_updates(tmp_path) -> None:
    def times(interval: int, level: int):
        given = costs(tmp_path, max_async_level=level)
        rl = given.setup.rl
        wire = rl.weight_broadcast.model_copy(update={"interval": interval})
        setup = replace(given.setup, cfg=rl.model_copy(update={"weight_broadcast": wire}))
        slow = replace(MEASURED, publish_s=0.2)
        return simulate(replace(given, setup=setup, measured=slow), Workload(Numbers(10), Numbers(20)), steps=12)

    each, second = times(1, 1), times(2, 2)
    assert each.step_s == pytest.approx(0.05 + 0.2, rel=0.02) and each.publish_s == pytest.approx(0.2)
    assert second.step_s == pytest.approx(0.05 + 0.2 / 2, rel=0.02) and second.publish_s == pytest.approx(0.1)
    assert second.staleness_p95 == 2 and second.staleness_mean == pytest.approx(1.5)


def test_a_batch_in_tokens_is_as_large_as_they_make_it(tmp_path) -> None:
    """30 tokens per rollout: 240 are two groups of four; a long context is simulated in larger units."""
    given = costs(tmp_path, max_async_level=0, token_batch_size=240)
    assert simulate(given, Workload(Numbers(10), Numbers(20)), steps=6).rollouts == 8
    ahead = costs(tmp_path, max_async_level=8, token_batch_size=240, batch_size=64)
    times = simulate(ahead, Workload(Numbers(10), Numbers(20)), steps=12)
    assert times.rollouts == 8 and times.dropped_groups < 12 * 2, "generation is ahead by steps, not by batch_size"
    assert _simulated_config(given, tmp_path, 3, 4.0).token_batch_size == 60


@pytest.mark.heavy
def test_an_engine_goes_on_where_groups_are_given_up_as_too_old(tmp_path) -> None:
    """Rollouts of very different lengths, far ahead: long ones are cancelled while they are written."""
    ahead = costs(tmp_path, max_async_level=8, token_batch_size=400, batch_size=64)
    times = simulate(ahead, Workload(Numbers(10), Numbers(200, 1.5)), steps=30)
    assert times.dropped_groups > 0
    assert times.trainer_idle < 0.5


def test_an_engine_that_ends_is_heard(tmp_path, monkeypatch) -> None:
    def broken(self, *args) -> float:
        raise ZeroDivisionError("no time at all")

    monkeypatch.setattr(Costs, "decode_s", broken)
    with pytest.raises(ZeroDivisionError, match="no time at all"):
        simulate(costs(tmp_path), Workload(Numbers(10), Numbers(20)), steps=2)


@pytest.mark.heavy
def test_groups_without_signal_are_drawn_again(tmp_path) -> None:
    workload = Workload(Numbers(10), Numbers(20), score_s=Numbers(0.2))
    all_count = simulate(costs(tmp_path, max_async_level=0), workload, steps=6)
    some = Workload(Numbers(10), Numbers(20), score_s=Numbers(0.2), signal=0.4)
    assert simulate(costs(tmp_path, max_async_level=0), some, steps=6).step_s > 1.5 * all_count.step_s


def test_turns_and_waits_add_up(tmp_path) -> None:
    workload = Workload(
        Numbers(10), Numbers(20), Numbers(3), Numbers(5), turn_wait_s=Numbers(0.1), score_s=Numbers(0.05)
    )
    times = simulate(costs(tmp_path, max_async_level=0), workload, steps=4)
    assert times.rollout_s_mean == pytest.approx(3 * 0.02 + 2 * 0.1 + 0.05, rel=0.02)


@pytest.mark.heavy
@pytest.mark.parametrize("turns", [1.0, 3.0])
def test_lengths_and_waits_of_a_run_are_found_in_its_ledger(tmp_path, turns) -> None:
    given = Workload(
        Numbers(30, 0.2), Numbers(20, 0.3), Numbers(turns), Numbers(5), Numbers(0.2, 0.5), Numbers(0.2, 0.5)
    )
    found = costs(tmp_path, max_async_level=1)
    run = tmp_path / "run"
    asked = _simulated_config(found, run, 20, 1.0)
    run_virtual(_run(asked, found, given, 1.0, 2))
    read = workload_of_run(asked.run_dir.path)
    assert read.reply_tokens.mean == pytest.approx(given.reply_tokens.mean, rel=0.1)
    assert read.turns.mean == turns and read.signal == 1.0
    assert read.score_s.mean == pytest.approx(given.score_s.mean, rel=0.1)
    assert (read.turn_wait_s.mean > 0.15) == (turns > 1)


@pytest.mark.heavy
def test_the_spread_of_equal_steps_is_nothing_and_of_unequal_ones_shrinks_with_their_number(tmp_path) -> None:
    even = simulate(costs(tmp_path, max_async_level=0), Workload(Numbers(10), Numbers(20)), steps=6)
    slow = Workload(Numbers(10), Numbers(20), score_s=Numbers(0.5, 1.0))
    few, many = (simulate(costs(tmp_path, max_async_level=0), slow, steps=steps).spread for steps in (6, 60))
    assert even.spread < 0.01 < many < few


def test_processes_that_share_a_core_take_twice_as_long() -> None:
    async def run() -> float:
        cores = Cores(1)
        await asyncio.gather(cores.work(1.0), cores.work(1.0))
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == pytest.approx(2.0)


def test_work_that_is_cut_short_says_how_much_was_done() -> None:
    async def run() -> float:
        job = Cores(1).start(4.0)
        asyncio.get_running_loop().call_later(1.0, job.cut)
        return await job.done

    assert run_virtual(run()) == pytest.approx(0.25)


def test_tables_are_linear_between_their_sizes() -> None:
    assert [lookup(((1, 1.0), (3, 2.0), (5, 6.0)), size) for size in (0, 2, 4, 7)] == [1.0, 1.5, 4.0, 10.0]


def test_a_directory_that_is_no_run_cannot_be_compared_with(tmp_path) -> None:
    with pytest.raises(ConfigError, match="this is no run directory"):
        compare(None, tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"orchestrator\.jsonl is missing"):
        compare(None, tmp_path)


@pytest.mark.parametrize(("keeps", "gathers"), [(False, 2), (True, 1)])
def test_weights_are_gathered_once_per_pass_however_much_is_computed_again(tmp_path, keeps: bool, gathers: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(scratch_config(ScratchSection(), 64).hf))
    orchestrator = {"env": [{"id": "sort-letters"}], "batch_size": 16, "num_train_workers": 2}

    def row_s(**model: object) -> float:
        section = {"name": str(tmp_path), "reshard_after_forward": not keeps, **model}
        setup = build_setup(build(RLConfig, {"model": section, "orchestrator": orchestrator}), hardware=GPUS["H100"])
        assert setup.num_ranks == 2 and setup.train_dtype == "bfloat16"
        moved = setup.size.total * (2 * gathers + 4)  # bfloat16, and gradients in float32
        assert moved / (GPUS["H100"].link_bandwidth * 0.7) == pytest.approx(Costs(setup)._gather_s)
        return Costs(setup).train_s([(8.0, 4.0)])  # so short that the gathers decide

    assert row_s() == pytest.approx(row_s(ac={"mode": "full"}))


@pytest.mark.heavy
@pytest.mark.parametrize("turns", [1, 3])
def test_what_samples_begin_with_is_trained_once_where_it_is_shared(tmp_path, turns) -> None:
    """Groups of 4 with prompts of 200 and replies of 20: 280 tokens instead of 880, one millisecond each."""
    (tmp_path / "config.json").write_text(json.dumps(scratch_config(ScratchSection(), 64).hf))
    times = {}
    for sharing in ("off", "tree"):
        given = costs(tmp_path, max_async_level=0)
        model = given.setup.cfg.model.model_copy(update={"shared_prefixes": sharing})
        cfg = given.setup.cfg.model_copy(update={"model": model})
        measured = replace(MEASURED, train=((1, 0.001), (1 << 20, 0.001 * (1 << 20))))
        given = replace(given, setup=replace(given.setup, cfg=cfg), measured=measured)
        workload = Workload(Numbers(200), Numbers(20), turns=Numbers(float(turns)), observation_tokens=Numbers(0.0))
        times[sharing] = simulate(given, workload, steps=4)
    own = 20 * turns + turns - 1  # the environment says one token between two turns
    assert times["off"].train_s == pytest.approx(16 * (200 + own) * 0.001, rel=0.01)
    assert times["tree"].train_s == pytest.approx(4 * (200 + 4 * own) * 0.001, rel=0.01)
    assert times["tree"].trained_tokens == times["off"].trained_tokens == pytest.approx(16 * (200 + own))
