"""The whole orchestrator against a fake engine and a fake trainer, with the real ledger, in virtual time."""

import asyncio
import itertools
import json
import random
import socket
import subprocess
import sys

import pytest
from fakes import EchoEnv, FakeEngine, FakeTrainer, parrot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_runs import num_reused
from orchestrator_runs import ECHO, config, sampled, train

from stretto.base.errors import ConfigError, EngineError, EnvError, StrettoError, WireError
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.envs.base import TaskSource
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.ledger.writer import Ledger
from stretto.monitors.file import read_metrics
from stretto.orchestrator.eval import verb as eval_verb
from stretto.orchestrator.groups.buffer import Slot, SlotState
from stretto.orchestrator.run.loop import Loop
from stretto.orchestrator.run.pipeline import GroupPipeline
from stretto.orchestrator.state import run_checkpoint
from stretto.orchestrator.state.run_checkpoint import summary_of
from stretto.records.rollout import Task


def test_a_run_trains_every_step_and_its_ledger_is_clean(tmp_path):
    cfg = config(tmp_path, eval={"num_examples": 10, "interval": 2, "sampling": {}})
    trainer = FakeTrainer(max_steps=5)
    loop = train(cfg, FakeEngine(parrot(0.5)), trainer)
    assert loop.progress.step == 5 and len(trainer.batches) == 5
    assert audit(cfg.run_dir) == []
    assert sorted(loop.progress.sampled) == sorted(loop.progress.greedy) == [0, 2, 4, 5]
    rows = read_metrics(cfg.run_dir.metrics("orchestrator"))
    assert [row["step"] for row in rows] == list(range(6))
    assert rows[0]["eval/echo/sampled/mean"] == loop.progress.sampled[0]
    for row in rows[1:]:
        assert 0 < row["reward/mean"] < 1 and row["loss/mean"] == 0.5 and row["mismatch_kl/mean"] == 1e-7
        assert row["groups/unaccounted"] == 0 and row["advantage/group_sum"] < 1e-6
        assert row["off_policy/max"] <= 1
        assert row["inference/num_requests_running"] >= 0
    with LedgerReader(cfg.run_dir) as ledger:
        assert [b["state"] for b in ledger.batches()] == ["trained"] * 5
        assert len(ledger.events("eval")) == 4
        looks = [event["data"] for event in ledger.events("engines")]
        assert looks and all(each.keys() == {"fake:1"} and each["fake:1"][0] >= 0 for each in looks)


def test_groups_that_end_in_one_iteration_of_the_event_loop_are_written_together(tmp_path, monkeypatch):
    written, write = [], Ledger.groups_finished
    monkeypatch.setattr(
        Ledger, "groups_finished", lambda self, groups: (written.append(len(groups)), write(self, groups))
    )
    cfg = config(tmp_path)
    train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5))
    assert max(written) > 1 and audit(cfg.run_dir) == []


async def _ends_of_three(drop) -> list[int]:
    """The groups that are handed over of three that end together; `drop` gets the slot and the task of the first."""
    pipeline, handed_over = object.__new__(GroupPipeline), []
    pipeline._played = []
    pipeline._hand_over = lambda played: handed_over.extend(slot.group_id for slot, _ in played)
    slots = [Slot(number, Task(env="echo", task_id="x", data={}), 0) for number in range(3)]
    jobs = [asyncio.create_task(pipeline._hand_over_together(slot, None)) for slot in slots]
    await asyncio.sleep(0)
    drop(slots[0], jobs[0])
    await asyncio.gather(*jobs, return_exceptions=True)
    assert pipeline._played == []
    return handed_over


def test_a_group_that_is_dropped_before_it_is_handed_over_keeps_no_other_from_it():
    drop = lambda slot, job: (slot.move(SlotState.DROPPED), job.cancel())
    assert asyncio.run(_ends_of_three(drop)) == [1, 2]
    assert asyncio.run(_ends_of_three(lambda slot, job: None)) == [0, 1, 2]


def test_several_of_the_longest_samples_share_a_row_that_is_longer_than_they_may_be(tmp_path):
    longest = {}
    for row_tokens in (None, 1000):
        trainer = FakeTrainer(max_steps=2)
        train(config(tmp_path / str(row_tokens), max_steps=2, row_tokens=row_tokens), FakeEngine(parrot(0.5)), trainer)
        rows = [micro for step in trainer.batches for batch in step for micro in batch.micro_batches]
        assert sum(micro.num_samples for micro in rows) == 16
        longest[row_tokens] = max(len(micro.token_ids) for micro in rows)
    assert longest[None] <= 64 < longest[1000]


def test_rows_are_packed_by_what_samples_share_where_the_trainer_computes_that_once(tmp_path):
    """Prompts of 31 tokens and more, twice in each group; what the trainer says decides, not the configuration."""
    longest = {}
    for shares, asked in ((False, "tree"), (True, "auto")):
        trainer = FakeTrainer(max_steps=2, shares_prefixes=shares)
        env = [{"id": ECHO, "name": "echo", "system_prompt": "x" * 24}]
        cfg = config(tmp_path / asked, max_steps=2, env=env, model={"name": "", "shared_prefixes": asked})
        train(cfg, FakeEngine(parrot(0.5)), trainer)
        rows = [micro for step in trainer.batches for batch in step for micro in batch.micro_batches]
        assert sum(micro.num_samples for micro in rows) == 16
        longest[shares] = max(len(micro.token_ids) for micro in rows)
    assert longest[False] <= cfg.seq_len < longest[True], "shared tokens count once"


def test_every_rank_gets_its_share(tmp_path):
    cfg = config(tmp_path, num_train_workers=3, max_steps=2)
    trainer = FakeTrainer(max_steps=2, world_size=3)
    train(cfg, FakeEngine(parrot(0.5)), trainer)
    for step in trainer.batches:
        assert len({len(batch.micro_batches) for batch in step}) == 1
        assert sum(micro.num_samples for batch in step for micro in batch.micro_batches) == 8


def token_batches(path, limit, **settings):
    """By step: the tokens of the groups of a batch, in draw order, and the number of all its rows' tokens."""
    cfg = config(path, token_batch_size=limit, batch_size=32, max_steps=5, filter_zero_advantages=False, **settings)
    trainer, rng = FakeTrainer(max_steps=5), random.Random(3)
    train(cfg, FakeEngine(parrot(0.5), delay=lambda request: rng.random()), trainer)
    found = []
    for step in trainer.batches:
        groups: dict[str, int] = {}
        for micro in (micro for batch in step for micro in batch.micro_batches):
            for sample, start, end in zip(micro.sample_ids, micro.cu_seqlens, micro.cu_seqlens[1:]):
                group = sample.partition(".")[0]
                groups[group] = groups.get(group, 0) + int(end - start)
        found.append([groups[key] for key in sorted(groups, key=lambda key: int(key.lstrip("g")))])
    return found


@pytest.mark.parametrize("max_async_level", [0, 1])
def test_a_batch_counted_in_tokens_ends_with_the_group_that_fills_it(tmp_path, max_async_level):
    whole = token_batches(tmp_path / "all", 10**6, max_async_level=max_async_level)
    assert {len(step) for step in whole} == {8}, "never more than batch_size rollouts"
    limit = 2 * max(whole[0]) + 1
    steps = token_batches(tmp_path / "some", limit, max_async_level=max_async_level)
    assert len(steps) == 5 and {len(step) for step in steps} <= set(range(2, 8))
    for step in steps:
        assert sum(step) >= limit > sum(step[:-1])


delays = st.fixed_dictionaries(
    {
        "max_async_level": st.integers(0, 3),
        "max_off_policy_steps": st.integers(0, 3),
        "seed": st.integers(0, 10**6),
        "spread": st.floats(0, 3),
        "step_s": st.floats(0, 5),
        "load_s": st.floats(0, 1),
        "skill": st.sampled_from([0.05, 0.5, 0.95]),
    }
)


@pytest.mark.heavy
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(delays)
def test_no_batch_is_older_than_the_bound_whatever_takes_long(tmp_path_factory, delays):
    bounds = {k: delays[k] for k in ("max_async_level", "max_off_policy_steps")}
    bounds["max_async_level"] = min(bounds.values())  # what the config allows
    cfg = config(tmp_path_factory.mktemp("run"), max_steps=6, **bounds)
    rng = random.Random(delays["seed"])
    engine = FakeEngine(
        parrot(delays["skill"]),
        delay=lambda request: rng.lognormvariate(0, delays["spread"]),
        load_delay=delays["load_s"],
    )
    trainer = FakeTrainer(max_steps=6, step_delay=lambda step: delays["step_s"] * rng.random())
    loop = train(cfg, engine, trainer)
    assert loop.progress.step == 6
    assert engine.num_running == 0
    assert audit(cfg.run_dir) == []
    assert all(slot.state is not SlotState.RUNNING for slot in loop.buffer.slots.values())
    with LedgerReader(cfg.run_dir) as ledger:
        for step in range(1, 7):
            for row in ledger.trained_rollouts(step):
                assert row["first_version"] >= step - 1 - cfg.max_off_policy_steps
                assert row["version"] >= step - 1 - cfg.max_off_policy_steps
                if cfg.max_async_level == 0:
                    assert row["first_version"] == step - 1


@pytest.mark.heavy
def test_synchronous_runs_train_the_same_whatever_order_groups_finish_in(tmp_path):
    def run_once(name, delay):
        cfg = config(tmp_path / name, max_async_level=0, max_steps=4, batch_size=16)
        trainer = FakeTrainer(max_steps=4)
        train(cfg, FakeEngine(parrot(0.2), delay=delay), trainer)
        return sampled(trainer)

    rng = random.Random(1)
    at_once, shuffled = run_once("a", None), run_once("b", lambda request: rng.random())
    count = itertools.count()
    reversed_order = run_once("c", lambda request: 100.0 - next(count) % 97)
    assert at_once == shuffled == reversed_order


@pytest.mark.heavy
def test_asynchronous_runs_overlap_generation_with_training(tmp_path):
    def wall(name, level):
        cfg = config(tmp_path / name, max_async_level=level, max_steps=20, filter_zero_advantages=False)
        trainer = FakeTrainer(max_steps=20, step_delay=lambda step: 1.0)
        ended = []

        async def clock(loop):
            while loop.progress.step < 20:
                await asyncio.sleep(0.25)
            ended.append(asyncio.get_running_loop().time())

        train(cfg, FakeEngine(parrot(0.5), delay=lambda request: 1.0), trainer, meanwhile=clock)
        return ended[0]

    assert wall("sync", 0) >= 40
    assert wall("async", 1) <= 22


def test_an_environment_that_always_fails_stops_the_run_with_its_cause(tmp_path):
    cfg = config(tmp_path, env=[{"id": ECHO, "args": {"broken": True}}], max_failed_groups=5)
    with pytest.raises(EnvError, match=r"5 groups .*failed.*scorer is on strike"):
        train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5))
    with LedgerReader(cfg.run_dir) as ledger:
        assert ledger.rollouts_by_status()["failed"] >= 20
        rows = ledger.rows("SELECT DISTINCT error FROM rollouts WHERE status = 'failed'")
        assert "ValueError: the scorer is on strike" in rows[0]["error"]
        assert ledger.batches() == []


def test_an_engine_that_always_fails_stops_the_run_with_its_cause(tmp_path):
    cfg = config(tmp_path, max_failed_groups=3)
    engine = FakeEngine(parrot(0.5), fail=lambda request: "out of memory")
    with pytest.raises(EngineError, match=r"3 groups in a row.*out of memory"):
        train(cfg, engine, FakeTrainer(max_steps=5))


def test_now_and_then_a_failure_costs_nothing_but_a_retry(tmp_path):
    cfg = config(tmp_path, max_rollout_retries=3)
    rng = random.Random(0)
    engine = FakeEngine(parrot(0.5), fail=lambda request: "hiccup" if rng.random() < 0.3 else None)
    trainer = FakeTrainer(max_steps=5)
    loop = train(cfg, engine, trainer)
    assert loop.progress.step == 5 and audit(cfg.run_dir) == []
    assert loop.progress.num_rollouts == 40


def test_a_trainer_that_dies_ends_the_run_by_name(tmp_path):
    cfg = config(tmp_path)
    with pytest.raises(EngineError, match="trainer rank 0 failed: killed"):
        train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5, die_after=2))


def test_a_trainer_of_another_checkpoint_is_refused(tmp_path):
    with pytest.raises(WireError, match="rank 0 continues after step 3"):
        train(config(tmp_path), FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5, start=3))


@pytest.mark.parametrize("level", [0, 1])
def test_a_resumed_run_reuses_what_was_finished_and_trains_nothing_twice(tmp_path, level):
    cfg = config(tmp_path, max_steps=8, max_async_level=level)
    rng = random.Random(3)
    delay = lambda request: rng.random()
    with pytest.raises(EngineError):
        train(
            cfg,
            FakeEngine(parrot(0.4), delay=delay),
            FakeTrainer(max_steps=8, checkpoint_every=2, die_after=5, step_delay=lambda step: 1.0),
        )
    resumed = cfg.model_copy(update={"resume": type(cfg).model_fields["resume"].annotation.__args__[0]()})
    assert cfg.run_dir.complete_checkpoints() == [2, 4]
    engine = FakeEngine(parrot(0.4), delay=delay)
    engine.version = 4
    trainer = FakeTrainer(max_steps=8, start=4, checkpoint_every=2)
    loop = train(resumed, engine, trainer)
    assert loop.progress.step == 8 and loop.progress.num_resumes == 1
    assert len(trainer.batches) == 4
    assert audit(cfg.run_dir) == []
    with LedgerReader(cfg.run_dir) as ledger:
        assert num_reused(ledger) > 0
        ids = [(r["group_id"], r["member"]) for step in range(1, 9) for r in ledger.trained_rollouts(step)]
    assert len(ids) == len(set(ids)) == 64
    assert summary_of(loop.progress, max_steps=8)["resumed"] is True


def test_a_resumed_synchronous_run_trains_what_an_unbroken_one_does(tmp_path):
    whole = FakeTrainer(max_steps=6)
    train(config(tmp_path / "whole", max_async_level=0, max_steps=6), FakeEngine(parrot(0.3)), whole)

    cfg = config(tmp_path / "broken", max_async_level=0, max_steps=6)
    first = FakeTrainer(max_steps=6, checkpoint_every=1, die_after=4)
    rng = random.Random(5)
    with pytest.raises(EngineError):
        train(cfg, FakeEngine(parrot(0.3), delay=lambda request: rng.random()), first)
    step = cfg.run_dir.latest_complete_checkpoint()
    assert step == 3
    cfg.run_dir.checkpoint(9).mkdir()
    cfg.run_dir.complete_marker(9).touch()  # as if it had come to step 9 and now goes back
    again = OrchestratorConfig.model_validate(cfg.model_dump() | {"resume": {"step": 3}})
    engine = FakeEngine(parrot(0.3))
    engine.version = 3
    second = FakeTrainer(max_steps=6, start=3)
    train(again, engine, second)
    assert cfg.run_dir.complete_checkpoints() == [1, 2, 3], "a kill now goes on with what is trained now"
    assert sampled(first)[:3] + sampled(second) == sampled(whole)


def test_one_interrupt_finishes_the_step_and_saves(tmp_path):
    cfg = config(tmp_path, max_steps=None)
    trainer = FakeTrainer(max_steps=None, step_delay=lambda step: 1.0)

    async def interrupt(loop: Loop):
        await asyncio.sleep(3.5)
        loop.stop()

    loop = train(cfg, FakeEngine(parrot(0.5), delay=lambda r: 0.5), trainer, meanwhile=interrupt)
    done = loop.progress.step
    assert 3 <= done <= 6
    assert cfg.run_dir.complete_checkpoints() == [done]
    assert run_checkpoint.load(cfg.run_dir, done).step == done
    assert audit(cfg.run_dir) == []


def test_an_interrupt_before_the_first_step_ends_in_good_order(tmp_path):
    async def interrupt(loop):
        loop.stop()

    loop = train(config(tmp_path), FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5), meanwhile=interrupt)
    assert loop.progress.step == 0


def test_a_checkpoint_without_its_marker_does_not_exist(tmp_path):
    cfg = config(tmp_path)
    progress = run_checkpoint.Progress(step=3, num_tokens=7, sampled={0: 0.25}, greedy={0: 0.5})
    run_checkpoint.save(cfg.run_dir, progress)
    assert run_checkpoint.load(cfg.run_dir, 3) == progress
    cfg.run_dir.complete_marker(3).unlink()
    with pytest.raises(StrettoError, match="not complete"):
        run_checkpoint.load(cfg.run_dir, 3)


def test_a_step_whose_end_is_heard_right_after_another_is_no_faster_than_the_trainer_says(tmp_path):
    cfg = config(tmp_path)
    train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5, time_s=1000.0))
    rows = read_metrics(cfg.run_dir.metrics("orchestrator"))
    totals = [0.0, *(row["progress/tokens"] for row in rows if row["step"])]
    tokens = [after - before for before, after in itertools.pairwise(totals)]
    assert [row["tokens_per_s"] * 1000.0 for row in rows if row["step"]] == pytest.approx(tokens)


def test_the_summary_has_what_the_end_of_a_run_tells(tmp_path):
    cfg = config(tmp_path, eval={"num_examples": 5, "sampling": {}})
    loop = train(cfg, FakeEngine(lambda p, rng, v: parrot(0.2 + 0.1 * v)(p, rng, v)), FakeTrainer(max_steps=5))
    summary = summary_of(loop.progress, max_steps=5)
    wanted = {"reward_before", "reward_after", "greedy_before", "greedy_after", "steps", "wall_s", "tokens_per_s"}
    assert wanted | {"mismatch_kl_max", "resumed"} <= set(summary)
    assert None not in [summary[name] for name in wanted]
    assert summary["steps"] == 5 and summary["mismatch_kl_max"] == 1e-7 and summary["resumed"] is False
    assert json.loads(json.dumps(summary)) == summary


def test_an_eval_never_takes_another_engine_for_its_own(tmp_path):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen(1)
        server = {"port": stranger.getsockname()[1]}
        model = build_letters_tokenizer(tmp_path / "model")
        (model / "config.json").write_text('{"model_type": "qwen3"}')
        cfg = EvalConfig.model_validate(
            {"model": str(model), "output_dir": str(tmp_path), "inference": {"server": server}}
            | {"eval": {"env": [{"id": "sort-letters"}]}, "run": {"name": "eval"}}
        )
        with pytest.raises(ConfigError, match=f"port = {server['port']} is taken"):
            eval_verb.main(cfg)


@pytest.mark.heavy
def test_no_library_that_takes_seconds_is_imported():
    code = "import sys, stretto.orchestrator.main; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


class Listed(EchoEnv):
    """Its tasks are made when it is, under the name that it has by then; `missing` cannot be had."""

    def __init__(self, missing: int | None = None) -> None:
        super().__init__()
        self.missing = missing
        self.made = {i: Task(env=self.name, task_id=f"{i}", data={"word": f"w{i}"}) for i in range(64)}

    def tasks(self, split):
        return TaskSource(lambda i: self.made[-1 if i == self.missing else i], 64)


def test_tasks_that_were_made_under_another_name_are_trained(tmp_path):
    trainer = FakeTrainer(max_steps=2)
    cfg = config(tmp_path, env=[{"id": "test_orchestrator:Listed", "name": "shout"}], max_steps=2)
    loop = train(cfg, FakeEngine(parrot(0.5)), trainer)
    assert loop.progress.step == 2


def test_a_task_that_cannot_be_made_ends_the_run_with_one_message(tmp_path):
    env = {"id": "test_orchestrator:Listed", "name": "shout", "args": {"missing": 5}}
    with pytest.raises(EnvError, match=r"'shout', tasks\('train'\), task 5: .*test_orchestrator.py.*KeyError: -1"):
        train(config(tmp_path, env=[env], max_steps=40), FakeEngine(parrot(0.5)), FakeTrainer(max_steps=40))


def test_tasks_are_begun_at_even_distances(tmp_path):
    cfg = config(tmp_path, batch_size=8, group_size=2, max_steps=1, tasks_per_minute=1200)
    asked_at = []

    def delay(request):
        asked_at.append(asyncio.get_running_loop().time())
        return 0.0

    train(cfg, FakeEngine(parrot(0.5), delay=delay), FakeTrainer(max_steps=1))
    turns = sorted({round(at, 6) for at in asked_at})
    assert len(turns) >= 4  # the groups of the batch
    distances = [after - before for before, after in itertools.pairwise(turns)]
    assert distances == pytest.approx([60 / 1200] * len(distances), abs=1e-4)
