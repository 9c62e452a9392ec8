"""Batches of whoever is done: as fast as their rules allow, and nothing is left out because it took long."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from fakes import EchoEnv, FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics

GROUPS, STEPS, TRAIN_S = 4, 80, 0.5


class Slow(EchoEnv):
    """The n-th task takes log-normal time of n: every run has the same ones."""

    def seconds(self, number: int) -> float:
        return random.Random(f"slow/{number}").lognormvariate(0.0, 1.0)

    async def score(self, task, text):
        await asyncio.sleep(self.seconds(int(task.data["word"].removeprefix("train"))))
        return float(text == task.data["word"])


class Trainer(FakeTrainer):
    """Remembers when each step ended."""

    ends: list[float]

    def _emit(self, message):
        if type(message).__name__ == "StepDone":
            self.ends.append(asyncio.get_running_loop().time())
        super()._emit(message)


def play(path, level, **settings):
    trainer = Trainer(max_steps=STEPS, step_delay=lambda _: TRAIN_S)
    trainer.ends = []
    shape = {"batch_size": GROUPS * 2, "group_size": 2, "filter_zero_advantages": False, "max_steps": STEPS}
    env = [{"id": f"{__name__}:Slow", "name": "echo"}]
    cfg = config(path, **shape, env=env, max_async_level=level, **settings)
    loop = train(cfg, FakeEngine(parrot(0.5)), trainer)
    assert not audit(cfg.run_dir)
    with LedgerReader(cfg.run_dir) as reader:
        drawn = reader.rows("SELECT group_id, task_id, state FROM draws ORDER BY group_id")
        trained = reader.rows(
            "SELECT step, group_id, min(first_version) AS version FROM live_rollouts GROUP BY group_id"
        )
    return trainer.ends, drawn, trained, loop


@pytest.mark.heavy
@pytest.mark.parametrize(("level", "oldest"), [(1, 4), (2, 8), (4, 8), (4, 30)])
def test_batches_of_whoever_is_done_are_as_fast_as_their_rules_allow_and_leave_nothing_out(
    tmp_path, monkeypatch, level, oldest
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks"))
    from asynchrony import least_times

    ends, drawn, trained, loop = play(tmp_path, level, batch_order="finished", max_off_policy_steps=oldest)
    assert Counter(row["state"] for row in drawn) == {"trained": STEPS * GROUPS}, "as many are trained as were drawn"
    ages = [row["step"] - 1 - row["version"] for row in trained]
    assert level <= max(ages) <= oldest and abs(sum(ages) / len(ages) - level) < 0.2 * level
    seconds = [Slow().seconds(int(row["task_id"].removeprefix("train-"))) for row in drawn]
    least = least_times(seconds, level=level, train_s=TRAIN_S, steps=STEPS, oldest=oldest, groups=GROUPS)
    assert ends == pytest.approx(least[1:])
    rows = read_metrics(loop.parts.run_dir.metrics("orchestrator"))
    assert all(row["time/wait_for_late"] >= 0 for row in rows if "time/step" in row)


@pytest.mark.heavy
def test_no_batch_waits_for_a_straggler_that_a_later_one_can_take(tmp_path):
    in_order, *_ = play(tmp_path / "dispatch", 2)
    as_done, *_ = play(tmp_path / "finished", 2, batch_order="finished", max_off_policy_steps=30)
    assert as_done[-1] < 0.7 * in_order[-1]
    gaps = [b - a for a, b in pairwise(as_done)]
    assert max(gaps) < max(b - a for a, b in pairwise(in_order))


def test_groups_of_an_environments_own_size_stay_within_the_rollouts_that_may_run(tmp_path):
    class Counting(FakeEngine):
        running = most = 0

        async def generate(self, request):
            self.running += request.n
            self.most = max(self.most, self.running)
            try:
                return await super().generate(request)
            finally:
                self.running -= request.n

    env = [{"id": "fakes:EchoEnv", "name": "echo", "group_size": 8}]
    cfg = config(tmp_path, env=env, batch_size=8, group_size=2, max_inflight_rollouts=16, max_steps=2)
    engine = Counting(parrot(0.5), delay=lambda request: 1.0)
    train(cfg, engine, FakeTrainer(max_steps=2))
    assert engine.most == 16
