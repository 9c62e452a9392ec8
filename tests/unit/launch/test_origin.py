"""A run that starts from a checkpoint of another run: what it takes over, and that the other is only read."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, sampled, train

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.load import build
from stretto.config.root import OrchestratorConfig, SFTConfig
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.state import run_checkpoint
from stretto.orchestrator.state.resume import starting_point
from stretto.orchestrator.state.run_checkpoint import Progress, carry_over, summary_of

pytestmark = pytest.mark.heavy

# -- which checkpoint is meant --


@pytest.fixture
def other(tmp_path: Path) -> RunDir:
    """A run with complete checkpoints of steps 10 and 20, and one that was never completed."""
    run = RunDir(tmp_path / "other")
    for step in (10, 20, 30):
        run.checkpoint(step).mkdir(parents=True)
        if step < 30:
            run.complete_marker(step).touch()
    return run


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_run_or_one_of_its_checkpoints_may_be_named(other, tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    assert rundir.find_checkpoint(run, None, other.path) == (other, 20)
    assert rundir.find_checkpoint(run, 10, other.path) == (other, 10)
    assert rundir.find_checkpoint(run, None, other.checkpoint(10)) == (other, 10)
    monkeypatch.chdir(tmp_path)
    assert rundir.find_checkpoint(run, None, Path("other/checkpoints/step_20/")) == (other, 20)


@pytest.mark.parametrize(
    ("where", "step", "message"),
    [
        ("nowhere", None, "there is no directory .*nowhere"),
        (".", None, "neither a run directory .* nor one of a run's checkpoints"),
        ("other", 30, "no complete checkpoint of step 30; complete: 10, 20"),
        ("other/checkpoints/step_30", None, "no complete checkpoint of step 30; complete: 10, 20"),
        ("run", None, "this run itself; continue it with --resume alone"),
    ],
)
def test_an_unusable_origin_is_reported_and_nothing_is_created(other, tmp_path, where, step, message):
    run = RunDir(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        rundir.claim(run, resume=True, step=step, clean=False, origin=tmp_path / where)
    assert not run.path.exists()


def test_an_existing_run_does_not_start_from_an_origin_again(other, tmp_path):
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    run.weights_step(3).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"(?s)--resume .* without resume.dir.*--clean.*--run.name"):
        rundir.claim(run, resume=True, step=None, clean=False, origin=other.path)
    claim = rundir.claim(run, resume=True, step=None, clean=True, origin=other.path)
    assert claim.resume_step == 20 and not run.weights.exists()
    claim.close()


@pytest.mark.parametrize("root", [SFTConfig, OrchestratorConfig])
def test_two_different_resume_steps_are_refused(root, tmp_path):
    data = {"output_dir": tmp_path, "max_steps": 9, "data": {"type": "environment", "id": "sort-letters"}}
    if root is OrchestratorConfig:
        data = {"output_dir": tmp_path, "env": [{"id": "sort-letters"}]}
    with pytest.raises(ConfigError, match=r"the checkpoint of step 4, and resume\.step = 5"):
        build(root, data | {"resume": {"dir": "x/checkpoints/step_4", "step": 5}})
    build(root, data | {"resume": {"dir": "x/checkpoints/step_4", "step": 4}, "clean": True})


# -- rl: the orchestrator's half --


def started_from(cfg: OrchestratorConfig, path: Path, origin: RunDir, step: int, **changes) -> OrchestratorConfig:
    own = {"output_dir": path, "resume": {"dir": origin.path, "step": step}}
    return OrchestratorConfig.model_validate(cfg.model_dump() | own | changes)


def test_a_run_begun_at_a_checkpoint_draws_what_the_other_would_have(tmp_path):
    whole = FakeTrainer(max_steps=6, checkpoint_every=1)
    cfg = config(tmp_path / "whole", max_async_level=0, max_steps=6)
    train(cfg, FakeEngine(parrot(0.3)), whole)
    before = contents(cfg.run_dir.path)

    fork = started_from(cfg, tmp_path / "fork", cfg.run_dir, 3)
    engine = FakeEngine(parrot(0.3))
    engine.version = 3
    second = FakeTrainer(max_steps=6, start=3, checkpoint_every=1)
    loop = train(fork, engine, second)
    assert sampled(second) == sampled(whole)[3:]
    assert contents(cfg.run_dir.path) == before
    assert audit(fork.run_dir) == []
    assert fork.run_dir.complete_checkpoints() == [4, 5, 6]
    summary = summary_of(loop.progress, max_steps=6)
    assert summary["origin"] == str(cfg.run_dir.checkpoint(3)) and not summary["resumed"]
    assert summary["steps"] == 6 and summary["rollouts"] == 24


def test_unfinished_draws_are_made_again_with_their_numbers(tmp_path):
    cfg = config(tmp_path / "first", max_async_level=2, max_steps=6)
    train(cfg, FakeEngine(parrot(0.3)), FakeTrainer(max_steps=6, checkpoint_every=1))
    saved = run_checkpoint.load(cfg.run_dir, 3)
    assert saved.open_draws and saved.next_draw > max(saved.open_draws)

    fork = started_from(cfg, tmp_path / "fork", cfg.run_dir, 3)
    engine = FakeEngine(parrot(0.3))
    engine.version = 3
    train(fork, engine, FakeTrainer(max_steps=6, start=3, checkpoint_every=1))
    assert audit(fork.run_dir) == []
    with LedgerReader(cfg.run_dir) as first, LedgerReader(fork.run_dir) as second:
        draws = [
            {row["group_id"]: row["task_id"] for row in ledger.rows("SELECT group_id, task_id FROM draws")}
            for ledger in (first, second)
        ]
        assert [each["resumed_step"] for each in second.rows("SELECT * FROM incarnations")] == [3]
    assert set(saved.open_draws) <= draws[1].keys() and draws[1].keys() - set(saved.open_draws) <= set(
        range(saved.next_draw, max(draws[1]) + 1)
    )
    both = draws[0].keys() & draws[1].keys()
    assert both and all(draws[0][number] == draws[1][number] for number in both)


def test_a_started_run_resumes_its_own_checkpoints(tmp_path):
    cfg = config(tmp_path / "first", max_async_level=0, max_steps=8)
    whole = FakeTrainer(max_steps=8, checkpoint_every=2)
    train(cfg, FakeEngine(parrot(0.3)), whole)
    fork = started_from(cfg, tmp_path / "fork", cfg.run_dir, 4, max_steps=6)
    lives = [FakeTrainer(max_steps=6, start=4, checkpoint_every=1), FakeTrainer(max_steps=8, start=6)]
    own = OrchestratorConfig.model_validate(fork.model_dump() | {"resume": {}, "max_steps": 8})
    for settings, life, version in zip((fork, own), lives, (4, 6), strict=True):
        engine = FakeEngine(parrot(0.3))
        engine.version = version
        loop = train(settings, engine, life)
    assert sampled(lives[0]) + sampled(lives[1]) == sampled(whole)[4:]
    assert audit(fork.run_dir) == [] and loop.progress.num_resumes == 1
    assert loop.progress.origin == str(cfg.run_dir.checkpoint(4))

    with pytest.raises(ConfigError, match=r"begun before.*--resume"):
        train(fork, FakeEngine(parrot(0.3)), FakeTrainer(max_steps=6, start=4))


def test_held_out_rewards_are_compared_with_those_at_the_beginning(tmp_path):
    progress = Progress(step=9, first_step=4, sampled={4: 0.25, 9: 0.5}, greedy={9: 0.75})
    summary = summary_of(progress, max_steps=9)
    assert (summary["reward_before"], summary["reward_after"]) == (0.25, 0.5)
    assert (summary["greedy_before"], summary["greedy_after"]) == (None, 0.75)


def test_other_environments_are_drawn_from_their_start():
    saved = Progress(
        step=7,
        num_tokens=100,
        sampled={0: 0.5},
        curriculum={"a": {"1": 0.5}, "b": {"1": 0.25}},
        baselines={"a": {"x": 0.5}},
        ratios={"a": 1.0, "b": 2.0},
        data={"b": 11},
        next_draw=40,
        open_draws=[38],
        origin="o",
    )
    same = carry_over(saved, {"a": None, "b": 11}, {"a": 1.0, "b": 2.0})
    assert (same.next_draw, same.open_draws, same.curriculum) == (40, [38], saved.curriculum)
    assert (same.step, same.first_step, same.num_tokens, same.sampled) == (7, 7, 0, {})
    other = carry_over(saved, {"a": None, "b": 12}, {"a": 1.0, "b": 2.0})
    assert (other.next_draw, other.open_draws) == (0, [])
    assert other.curriculum == {"a": {"1": 0.5}} and other.baselines == saved.baselines
    assert carry_over(saved, {"a": None, "b": 11}, {"a": 1.0, "b": 1.0}).next_draw == 0
    assert carry_over(saved, {"a": None}, {"a": 1.0}).next_draw == 0


def test_a_step_after_the_end_is_reported(tmp_path):
    cfg = config(tmp_path / "first", max_steps=2)
    train(cfg, FakeEngine(parrot(0.3)), FakeTrainer(max_steps=2, checkpoint_every=2))
    with pytest.raises(ConfigError, match=r"max_steps = 1, .*step 2"):
        starting_point(started_from(cfg, tmp_path / "fork", cfg.run_dir, 2, max_steps=1))
